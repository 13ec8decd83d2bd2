#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/memory.h"
#include "optim/exchange/bucket_reduction.h"
#include "optim/sharded/distributed_optimizer.h"
#include "optim/sharded/held_state.h"
#include "optim/sharded/shard_plan.h"
#include "optim/sharded/step_exchanges.h"

namespace tessera {

/// The ranks over which parameters are sharded: of the data-parallel axis for dense ones, of the
/// expert-data-parallel axis for experts. Both communicators serve full sharding alone.
struct ShardGroup {
  CommunicatorPtr shard;
  /// Hybrid sharding: the ranks of other shard groups that hold the same share. Null: there are
  /// none.
  CommunicatorPtr replicas = nullptr;

  int64_t num_replicas() const { return replicas ? replicas->size() : 1; }
};

struct FullShardingOptions {
  GradientCompression compression = GradientCompression::kNone;
  /// How many modules' weights, and gradients, may be there at a time: two, so that the next module
  /// is gathered, and the last one reduced, while one computes.
  int64_t weight_buffers = 2;
  int64_t gradient_buffers = 2;
};

/// Full sharding (FSDP): every rank holds its share of weights, gradients and optimizer state, and
/// a module is whole only while it is used (Megatron-Core MoE, section 4.1.7). For each module:
///   begin_step;
///   forward, backward:  gather(next) early; weight(p) of this one; release(this);
///   backward:           gradient(p) accumulates; reduce(this) once all of it is there.
/// After the micro-batches: step. Gathered modules and gradients take turns in a few buffers that
/// are there from the beginning, so a weight's address changes from one gathering to the next.
///
/// Parameters whose group has one rank are held whole: their weights and gradients are used where
/// they lie. All ranks of a group call gather, reduce and step for the same modules in the same
/// order. Not thread-safe.
class FullySharded final : public DistributedOptimizer {
 public:
  /// Tensors of `parameters` need a type and a shape, not memory; `group` is an index into
  /// `groups`. `modules` has the indices of each module's parameters; every parameter is in one
  /// module. Weights are zero until weight_slices are filled; masters follow by reset_masters.
  FullySharded(std::vector<ShardGroup> groups, std::vector<ReplicatedParameter> parameters,
               const std::vector<std::vector<size_t>>& modules, CommunicatorPtr world,
               const OptimizerOptions& options, const FullShardingOptions& sharding,
               const Backend& backend = optimizer_on_host());

  size_t num_modules() const { return plan_.modules.size(); }
  size_t module_of(size_t parameter) const { return plan_.places[parameter].module; }
  /// Bytes that a module takes when it is gathered; 0 where this rank has all of it.
  int64_t gathered_bytes(size_t module) const { return plan_.modules[module].weight_bytes; }

  /// Begins a step, with gradients of zero.
  void begin_step();
  /// Starts to gather a module's weights; nothing if it is there. Throws InternalError if all
  /// buffers are in use.
  void gather(size_t module);
  /// A parameter's whole weight, of a module that is gathered or about to be: waits for it. Valid
  /// until the module is released.
  Tensor weight(size_t parameter);
  /// Returns when it is there.
  void wait_gathering(size_t module);
  void release(size_t module);

  /// The F32 accumulator of a parameter's whole gradient, valid until its module is reduced. That
  /// of a module's first call after a reduction is zero. Waits for the reduction of an earlier
  /// module if all buffers are in use.
  Tensor gradient(size_t parameter);
  /// Starts to sum a module's gradients over the shard group, to be added to this rank's share: of
  /// the units (see ShardUnit) that a gradient was asked for, which are the same on all ranks.
  void reduce(size_t module);
  /// Returns when the oldest reduction under way, which must be this module's, is in the share.
  void wait_reduction(size_t module);
  /// Also sums over micro-batches. Until the next begin_step no gradient may be asked for.
  void finish_gradients() override;
  /// No module may be gathered.
  StepResult step(const StepInput& input) override;
  /// The parts of a step: after finish_gradients the norm and what follows from it, on all ranks
  /// together; and where that updates, the update of all shares.
  StepResult judge(const StepInput& input);
  void update(const StepInput& input);
  void discard_gradients() override { finish_gradients(); }

  /// Of shares that several replicas hold, the first owns.
  std::vector<NamedSlice> weight_slices(HeldPart part) const override {
    return state_->weight_slices(part);
  }
  std::vector<NamedSlice> state_slices(HeldPart part) const override {
    return state_->state_slices(part);
  }
  void change_masters(const std::function<void(const NamedSlice& master)>& change) const override {
    state_->change_masters(change);
  }
  void set_row_factors(const FillRowFactors& fill) override { state_->set_row_factors(fill); }
  std::vector<NamedSlice> gradient_slices() const override {
    return state_->gradient_slices(HeldPart::kOwned);
  }
  void round_masters() const { state_->round_masters(); }
  void reset_masters() const override { state_->reset_masters(); }

  /// What this rank allocates.
  struct Bytes {
    int64_t weights = 0;  ///< shares
    int64_t gradients = 0;
    int64_t state = 0;
    int64_t weight_buffers = 0;
    int64_t gradient_buffers = 0;
    int64_t staging = 0;    ///< of compressed gradients
    int64_t workspace = 0;  ///< of updates
    int64_t total() const {
      return weights + gradients + state + weight_buffers + gradient_buffers + staging + workspace;
    }
    bool operator==(const Bytes&) const = default;
  };
  /// Exact; of `groups` only sizes and places are read.
  static Bytes count_bytes(const std::vector<ShardGroup>& groups,
                           std::span<const ReplicatedParameter> parameters,
                           const std::vector<std::vector<size_t>>& modules,
                           const FullShardingOptions& sharding,
                           const OptimizerOptions& options = {},
                           const Backend& backend = optimizer_on_host());
  Bytes bytes() const;
  /// What a step exchanges with such sharding. Of weights types and shapes are read.
  static ShardedExchanges list_exchanges(const std::vector<ShardGroup>& groups,
                                         std::span<const ReplicatedParameter> parameters,
                                         const std::vector<std::vector<size_t>>& modules,
                                         const FullShardingOptions& sharding,
                                         const OptimizerOptions& options = {});

 private:
  /// A buffer in turn for a module.
  struct Slot {
    std::byte* memory = nullptr;
    std::byte* staging = nullptr;
    std::optional<size_t> module = std::nullopt;
    std::vector<Pending> pending = {};
    std::vector<bool> added = {};  ///< of gradients: by unit, whether one was asked for
    int64_t turn = 0;              ///< when its reduction began; 0: not yet
  };

  Device& device() const { return math_.device(); }
  /// The same tensor as the device's, which the host may not reach.
  Tensor on_device(Tensor tensor) const;
  void make_slots(const FullShardingOptions& sharding);
  void make_state(const std::vector<ReplicatedParameter>& parameters, CommunicatorPtr world,
                  const OptimizerOptions& options, const Backend& backend);
  BucketReduction reduction_of(const ShardUnit& unit) const;
  /// The staging of a module's units before this one, which is where its own begins.
  int64_t staging_before(const ShardModule& module, size_t unit) const;
  static Slot* find_free(std::vector<Slot>& slots);
  Slot* find_weights(size_t module);
  Slot* find_gradients(size_t module);
  Slot& take_gradients(size_t module);
  Slot* oldest_reduction();
  /// Calls visit(unit, its memory, its staging) for the units that take part in its reduction.
  template <typename Visit>
  void for_each_added(const Slot& slot, const Visit& visit) const;
  void complete(Slot& slot);

  std::vector<ShardGroup> groups_;
  std::vector<Shape> shapes_;  ///< by parameter
  ShardPlan plan_;
  GradientCompression compression_;
  GradientMath math_;
  Buffer weights_;
  Buffer gradients_;
  Buffer weight_buffers_;
  Buffer gradient_buffers_;
  Buffer staging_;
  std::vector<Slot> weight_slots_;
  std::vector<Slot> gradient_slots_;
  std::unique_ptr<HeldState> state_;
  int64_t num_reductions_ = 0;
  bool finished_ = false;
};

}  // namespace tessera
