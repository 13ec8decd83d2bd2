#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory.h"
#include "core/tensor.h"
#include "ops/backend.h"

namespace tessera {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  /// Whether every parameter is decayed; otherwise only matrices are (rank 2 and more).
  bool decay_all = false;
};

/// The host with the kernels that an optimizer needs.
Backend optimizer_on_host();

/// A parameter as the optimizer sees it: views that must outlive it.
struct Parameter {
  std::string name;
  Tensor weight;  ///< F32: the master itself; BF16: rounded from a separate F32 master
  Tensor grad;    ///< F32, of the weight's shape
  /// Whether it is decayed; unset, AdamWOptions and its rank decide.
  std::optional<bool> decay = std::nullopt;
  double lr_multiplier = 1.0;
};

/// Told of an update's operators by name, when the device is next synchronised, with the times at
/// which it did the work.
using UpdateObserver =
    std::function<void(std::string_view what, Device::Time begin, Device::Time end)>;

struct StepInput {
  int64_t step_idx = 0;        ///< updates made before this one
  double lr = 0.0;             ///< before each parameter's multiplier
  double max_grad_norm = 0.0;  ///< the global norm is clipped to this; 0: not clipped
  double grad_scale = 1.0;     ///< what the gradients are multiplied by before anything else
  UpdateObserver observer = {};
};

struct StepResult {
  double grad_norm = 0.0;  ///< the global norm before clipping, grad_scale included
  double clip_factor = 1.0;
  bool updated = false;  ///< false where the norm is NaN or infinite: then nothing has changed
};

/// AdamW over a list of parameters; owns m, v and, for BF16 weights, the masters. One update:
///   norm = sqrt(Σ over parameters of Σ (grad · grad_scale)²), summed in double in the order of the
///   list; clip = min(1, max_grad_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_;
///   operator `adamw` on every parameter with scale grad_scale · clip.
/// A parameter with a zero gradient (an expert that saw no token) is decayed all the same. The
/// result does not depend on the number of threads. Not thread-safe.
class AdamWOptimizer {
 public:
  /// Weights and gradients are in the memory of the back end's device, and so is the state. Masters
  /// start as the BF16 weights' values, m and v as zeros. Throws UserError for options out
  /// of range, InternalError for tensors that do not fit together.
  AdamWOptimizer(const std::vector<Parameter>& parameters, const AdamWOptions& options,
                 const Backend& backend = optimizer_on_host());

  /// The global norm of grad · grad_scale.
  double grad_norm(double grad_scale);
  /// Clips and updates.
  StepResult step(const StepInput& input);

  /// The parts of a step, for whoever has but a part of the gradients. Σ x² in double of F32
  /// tensors, of which number i is no larger than parameter i;
  std::vector<double> sums_of_squares(std::span<const Tensor> grads,
                                      const UpdateObserver& observer = {});
  /// what a step makes of the sum over all gradients (`updated` says whether it is to go on);
  static StepResult judge(double sum_of_squares, const StepInput& input);
  /// and the update of parameters, by their places in the list. Those of one kind are one operator.
  void update(std::span<const size_t> parameters, const StepInput& input, double clip_factor) const;

  /// Views of all state, parameter by parameter, F32 of the weight's shape: "<parameter>.m",
  /// "<parameter>.v" and "<parameter>.master". After filling masters call round_masters.
  std::vector<NamedTensor> state() const;
  /// The masters alone, by the names of their parameters.
  std::vector<NamedTensor> masters() const;
  /// Sets the BF16 weights to their masters, rounded.
  void round_masters() const;
  /// Sets the masters to the BF16 weights, exactly: after the weights were loaded or initialised
  /// without masters.
  void reset_masters() const;

  /// The bytes of state for such parameters: exactly what an optimizer allocates for it. Only dtype
  /// and shape of the tensors are read.
  static int64_t state_bytes(std::span<const Tensor> weights);
  int64_t state_bytes() const { return state_.num_bytes(); }

 private:
  /// A parameter with its state and its operator.
  struct Slot {
    Parameter parameter;
    Tensor master;  // the weight itself where that is F32
    Tensor m;
    Tensor v;
    size_t kind;

    bool has_master() const { return is_low_precision(parameter.weight.dtype); }
  };

  /// What parameters that are updated with the same factors share.
  struct Kind {
    OperatorPtr op;
    double lr_multiplier;
  };

  size_t find_kind(const Parameter& parameter, const AdamWOptions& options);
  void update_kind(const Kind& kind, std::span<const Slot* const> slots, const StepInput& input,
                   double clip_factor) const;
  double global_sum_of_squares(const UpdateObserver& observer = {});
  Slot make_slot(const Parameter& parameter, size_t kind, int64_t state_offset) const;

  void run_kernel(const Operator& op, std::span<const Tensor> inputs,
                  std::span<const Tensor> outputs, std::span<std::byte> workspace,
                  const UpdateObserver& observer) const;

  Backend backend_;
  OperatorPtr sum_of_squares_;
  Buffer state_;
  Buffer workspace_;
  Buffer sums_;  // one of each parameter, where the host reaches them
  std::vector<Kind> kinds_;
  std::vector<Slot> slots_;
};

}  // namespace tessera
