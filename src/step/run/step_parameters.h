#pragma once

#include "model/weights/parameters.h"
#include "model/weights/weight_store.h"
#include "optim/gradient_math.h"
#include "optim/sharded/fully_sharded.h"
#include "optim/sharded/sharded_optimizer.h"
#include "step/step_plan.h"

namespace tessera {

/// What the tasks of a plan ask of a rank's weights, gradients and optimizer. Units are those of
/// the exchanges that the plan was built of. Not thread-safe.
class StepParameters {
 public:
  virtual ~StepParameters() = default;
  StepParameters(const StepParameters&) = delete;
  StepParameters& operator=(const StepParameters&) = delete;

  /// Gradients hold nothing.
  virtual void begin() = 0;
  /// Starts an exchange of a bucket or module, or a copy of a bucket's state, or waits for it.
  virtual void start(TaskAction action, int64_t unit) = 0;
  virtual void wait(TaskAction action, int64_t unit) = 0;
  /// Adds what a program added up to the gradients that are kept in fewer bits.
  virtual void round_gradients(const ProgramParameters& program);
  /// Moves on what is under way.
  virtual void progress() {}
  /// Returns when the sums are in their owners' rows.
  virtual void finish_gradients() = 0;
  /// What a step makes of them; with `discard` they are forgotten and nothing is updated.
  virtual StepResult judge(const StepInput& input) = 0;
  virtual void discard() = 0;
  /// A bucket's update, or that of all where `unit` is -1.
  virtual void update(int64_t unit, const StepInput& input) = 0;
  /// Where the host updates: starts a part of a bucket's update (kStoreGradients, kUpdate,
  /// kLoadWeights), for which wait() waits.
  virtual void start_update(TaskAction part, int64_t unit, const StepInput& input);

  /// Where the device judges, as ShardedOptimizer's.
  virtual void prepare(const StepInput& input);
  virtual void give_factors();
  virtual void give_clip(std::span<const Tensor> losses, const StepInput& input);
  virtual void mark_clip();
  virtual StepResult wait_clip();

 protected:
  StepParameters() = default;
};

/// Weights and gradients that stay where they are, without an optimizer: gradients are the result.
class LocalParameters final : public StepParameters {
 public:
  explicit LocalParameters(ParameterSet& parameters) : parameters_(parameters) {}

  void begin() override { parameters_.reset_gradients(); }
  void start(TaskAction action, int64_t unit) override;
  void wait(TaskAction action, int64_t unit) override;
  void finish_gradients() override { parameters_.settle_gradients(); }
  StepResult judge(const StepInput& /*input*/) override { return {}; }
  void discard() override {}
  void update(int64_t, const StepInput&) override {}

 private:
  ParameterSet& parameters_;
};

/// With buckets of replicated parameters. Both must outlive it.
class ReplicatedParameters final : public StepParameters {
 public:
  /// The set's trained parameters, which come first, are the optimizer's, in its order, and on the
  /// back end's device.
  ReplicatedParameters(ParameterSet& parameters, ShardedOptimizer& optimizer,
                       const Backend& backend)
      : parameters_(parameters), optimizer_(optimizer), math_(backend) {}

  void begin() override;
  void start(TaskAction action, int64_t unit) override;
  void wait(TaskAction action, int64_t unit) override;
  void round_gradients(const ProgramParameters& program) override;
  void progress() override { optimizer_.poll(); }
  void finish_gradients() override;
  StepResult judge(const StepInput& input) override { return optimizer_.judge(input); }
  void discard() override { optimizer_.discard_gradients(); }
  void update(int64_t unit, const StepInput& input) override;
  void start_update(TaskAction part, int64_t unit, const StepInput& input) override;
  void prepare(const StepInput& input) override { optimizer_.prepare(input); }
  void give_factors() override { optimizer_.give_factors(); }
  void give_clip(std::span<const Tensor> losses, const StepInput& input) override;
  void mark_clip() override { optimizer_.mark_clip(); }
  StepResult wait_clip() override { return optimizer_.wait_clip(); }

 private:
  StateWindows& windows(TaskAction action) const;
  void settle(int64_t bucket);

  ParameterSet& parameters_;
  ShardedOptimizer& optimizer_;
  GradientMath math_;
};

/// With modules that are gathered while they are used: also gives programs their weights.
class ShardedParameters final : public StepParameters, public WeightStore {
 public:
  /// Parameters have the same indices in `sharded`, which must outlive it, and in the model.
  explicit ShardedParameters(FullySharded& sharded) : sharded_(sharded) {}

  void begin() override { sharded_.begin_step(); }
  void start(TaskAction action, int64_t unit) override;
  void wait(TaskAction action, int64_t unit) override;
  void finish_gradients() override { sharded_.finish_gradients(); }
  StepResult judge(const StepInput& input) override { return sharded_.judge(input); }
  void discard() override { sharded_.discard_gradients(); }
  void update(int64_t unit, const StepInput& input) override;

  void bind(const ProgramParameters& program, Bindings& bindings) override;
  void done(const ProgramParameters& program) override;

 private:
  FullySharded& sharded_;
};

}  // namespace tessera
