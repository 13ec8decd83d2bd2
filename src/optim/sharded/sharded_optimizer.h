#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "optim/exchange/gradient_reducer.h"
#include "optim/exchange/share_gatherer.h"
#include "optim/optimizer.h"
#include "optim/replicas.h"
#include "optim/sharded/distributed_optimizer.h"
#include "optim/sharded/held_state.h"
#include "optim/sharded/step_exchanges.h"

namespace tessera {

struct ShardingOptions {
  /// Whether each replica keeps the state of its share alone (ZeRO-1); otherwise all keep all of
  /// it.
  bool shard_state = true;
  /// Gradients of one bucket, in bytes of F32; a larger parameter is a bucket of its own.
  int64_t bucket_bytes = int64_t{32} << 20;
  ReductionOptions reduction = {};
  /// Whether each bucket is updated as soon as its gradients are complete, and those of layers
  /// share memory: buckets are whole layers then. Without clipping; on several ranks with
  /// shard_state.
  bool release_gradients = false;
  /// How many layers' gradients there is memory for then. With two, one layer's are reduced while
  /// the next one's come.
  int64_t layers_at_a_time = 1;
  /// Whether the state is in the host's memory, and updated in windows of the device's, or by the
  /// host's threads.
  bool state_on_host = false;
  bool updates_on_host = false;
};

/// The optimizer over the parameters of one rank of many. Within each replica group every rank owns
/// a share of the rows, or of the matrices (`make_buckets`). A step:
///   backward:  ready(p) as gradients are completed: their sums over the replicas are reduced into
///              the owners' gradient tensors, bucket by bucket, in the background;
///   step:      the global norm, in which every element of the model counts once; clipping; the
///              update of the owned rows, of which alone this rank has m, v and master; and after
///              each bucket its weights start on their way to the other replicas;
///   forward:   wait_weights(p) before the first use of p.
/// Without shard_state the sums of the gradients go to all replicas instead (the two halves of an
/// all-reduce), and each updates everything, alike to the bit.
///
/// All numbers are the same whatever the timing. With one replica each they are Optimizer's,
/// to the bit if the world is of one rank. Not thread-safe.
class ShardedOptimizer final : public DistributedOptimizer {
 public:
  /// `parameters` in the order in which a forward pass first uses them, with `group` an index into
  /// `groups`. Every two ranks list the groups that they share in the same order, and the members
  /// of a group list its parameters alike. Memory of weights and gradients must outlive the
  /// optimizer. Throws as Optimizer; InternalError for slices that do not fit their tensors.
  ShardedOptimizer(std::vector<ReplicaGroup> groups, std::vector<ReplicatedParameter> parameters,
                   CommunicatorPtr world, const OptimizerOptions& options,
                   const ShardingOptions& sharding, const Backend& backend = optimizer_on_host());

  /// The gradient of parameter `idx` of the list is complete on this rank, which is reached at most
  /// once a step. Waits for no other rank, but the first one for weights that are still under way.
  void ready(size_t idx);
  /// Declares all other gradients ready and returns when the sums are in this rank's rows.
  void finish_gradients() override;
  void discard_gradients() override;
  StepResult step(const StepInput& input) override;

  /// The parts of a step, for whoever orders them; buckets are those of list_exchanges, by their
  /// places there. First ready() for the parameters of all buckets, then, in any order, that these
  /// are there;
  const std::vector<BucketExchange>& buckets() const { return exchanges_.buckets; }
  void wait_reduction(size_t bucket);
  /// after finish_gradients the norm and what follows from it, on all ranks together;
  StepResult judge(const StepInput& input);
  /// where that updates, each bucket in order, with its weights on their way behind it.
  void update(size_t bucket, const UpdateObserver& observer);
  /// In place of update() where the host updates: a bucket's gradients start on their way to it,
  /// then its update, then its weights back, as HostUpdates'. Each is waited for on the device.
  bool updates_on_host() const { return state_->optimizer().updates_on_host(); }
  void store_gradients(size_t bucket, const UpdateObserver& observer);
  void update_on_host(size_t bucket, const UpdateObserver& observer);
  void load_weights(size_t bucket);
  void wait_stored(size_t bucket);
  void wait_updated(size_t bucket);
  void wait_loaded(size_t bucket);
  /// With gradients that are released, before the first of a step's updates: what the host has
  /// prepared. Then each bucket: ready() for its parameters, wait_reduction(), update(); what
  /// start_gathering() sends comes behind judge(), which, as give_clip(), only tells what came of
  /// the step. What of a bucket this rank owns is not updated where its gradients are not finite.
  bool releases_gradients() const { return sharding_.release_gradients; }
  void give_factors() { state_->optimizer().give_factors(); }
  /// Where the state is in the host's memory, around a bucket's update; null elsewhere.
  StateWindows* windows() const;
  void start_gathering(size_t bucket);
  void wait_gathering(size_t bucket);
  /// Starts what can start by now.
  void poll();

  /// On a rank that is alone, in place of judge(), so that its device can be given all of a step
  /// before the host knows what comes of it: the host's part,
  void prepare(const StepInput& input) { state_->prepare(input); }
  /// the norm with what it and the losses make of the step, as Optimizer's;
  void give_clip(std::span<const Tensor> losses, const UpdateObserver& observer);
  /// a mark behind it, which no recording takes;
  void mark_clip() { clipped_->record(); }
  /// and, when the device has come to the mark, what came of the step. The updates, which change
  /// nothing where it is skipped, may be under way by then.
  StepResult wait_clip();

  /// Returns when this rank has the updated weights of parameter `idx`.
  void wait_weights(size_t idx);
  /// The same for all, and returns when no update is under way on the host; also before the
  /// optimizer is destroyed, since other ranks count on this one.
  void wait_all_weights();

  /// Where state is sharded, what is held of it is what is owned.
  std::vector<NamedSlice> state_slices(HeldPart part) const override {
    state_->optimizer().finish_updates();
    return state_->state_slices(part);
  }
  void change_masters(const std::function<void(const NamedSlice& master)>& change) const override {
    state_->optimizer().finish_updates();
    state_->change_masters(change);
  }
  /// All of this rank's weights, or its own rows of them. Of weights in FP8 these are the masters,
  /// and all that are held.
  std::vector<NamedSlice> weight_slices(HeldPart part) const override;
  void set_row_factors(const FillRowFactors& fill) override { state_->set_row_factors(fill); }
  std::vector<NamedSlice> gradient_slices() const override {
    return state_->gradient_slices(HeldPart::kOwned);
  }
  /// Sets BF16 weights to their masters, rounded; on all ranks, who all call it.
  void round_masters();
  /// Casts weights in FP8 from their masters, which were filled, likewise.
  void cast_weights();
  void reset_masters() const override { state_->reset_masters(); }

  /// What this rank's optimizer has of each parameter: the rows whose state is here.
  static std::vector<Parameter> list_held(std::span<const ReplicaPlace> groups,
                                          std::span<const ReplicatedParameter> parameters,
                                          const ShardingOptions& sharding);
  /// Bytes of state that such an optimizer allocates on this rank: exact. Reads the dtype and shape
  /// of weights, and groups.
  static int64_t state_bytes(std::span<const ReplicaPlace> groups,
                             std::span<const ReplicatedParameter> parameters,
                             const ShardingOptions& sharding, const StateFormats& formats = {});
  int64_t state_bytes() const { return state_->state_bytes(); }
  /// Where that is the host's memory, the device's in which it is updated.
  static int64_t window_bytes(std::span<const ReplicaPlace> groups,
                              std::span<const ReplicatedParameter> parameters,
                              const ShardingOptions& sharding, const StateFormats& formats);
  /// And what the host has beside it where that updates.
  static int64_t host_window_bytes(std::span<const ReplicaPlace> groups,
                                   std::span<const ReplicatedParameter> parameters,
                                   const ShardingOptions& sharding);
  int64_t host_window_bytes() const;
  /// The same of the scratch memory of its updates.
  static int64_t workspace_bytes(std::span<const ReplicaPlace> groups,
                                 std::span<const ReplicatedParameter> parameters,
                                 const ShardingOptions& sharding, const OptimizerOptions& options,
                                 const Backend& backend = optimizer_on_host());
  int64_t workspace_bytes() const { return state_->workspace_bytes(); }
  /// Memory beyond weights, gradients and state, at its most.
  int64_t staging_bytes() const;
  /// What a step of such an optimizer exchanges. Of weights and gradients types and shapes are
  /// read.
  static ReplicatedExchanges list_exchanges(const std::vector<ReplicaGroup>& groups,
                                            std::span<const ReplicatedParameter> parameters,
                                            const ShardingOptions& sharding,
                                            const OptimizerOptions& options = {});
  /// The same before there is such an optimizer: exact. Of the groups only sizes and places are
  /// read, of weights and gradients addresses, which say whether they lie side by side, types and
  /// shapes.
  static int64_t count_staging(const std::vector<ReplicaGroup>& groups,
                               std::span<const ReplicatedParameter> parameters,
                               const ShardingOptions& sharding,
                               const Backend& backend = optimizer_on_host());

 private:
  /// One replica group's parameters and what moves them.
  struct Group {
    ReplicaPlace place;
    std::vector<size_t> parameters;  ///< in the list of the optimizer
    std::vector<Bucket> buckets;
    std::unique_ptr<GradientReducer> reducer;
    std::unique_ptr<ShareGatherer> gatherer;  ///< of weights, or of gradients where all is held
  };
  /// Rows of a parameter's local tensors.
  struct Rows {
    IndexRange owned;
    IndexRange held;  ///< whose state is here
  };

  /// A bucket of a group.
  struct BucketPlace {
    size_t group = 0;
    size_t bucket = 0;
  };
  enum class Phase : uint8_t { kIdle, kReducing, kReduced };

  static std::vector<Group> cut(std::span<const ReplicaPlace> places,
                                std::span<const ReplicatedParameter> parameters,
                                const ShardingOptions& sharding);
  static std::vector<Rows> find_rows(const std::vector<Group>& groups,
                                     std::span<const ReplicatedParameter> parameters,
                                     const ShardingOptions& sharding);
  /// The group's weights and gradients.
  struct Tensors {
    std::vector<Tensor> weights;
    std::vector<Tensor> scales;  ///< of weights in FP8; others have ones without elements
    std::vector<Tensor> grads;
    /// What is gathered after the update, or, where all state is held, before it.
    ShareGatherer::Tensors gathered(const ShardingOptions& sharding) const {
      if (sharding.shard_state) return {weights, scales};
      return {grads};
    }
  };
  static Tensors list_tensors(const Group& group, std::span<const ReplicatedParameter> parameters);
  void connect(Group& group, const ReplicaGroup& replicas, const Backend& backend);
  void make_state(CommunicatorPtr world, const OptimizerOptions& options, const Backend& backend);
  static std::vector<BucketPlace> order_buckets(const std::vector<Group>& groups);
  static UpdateGroups list_updates(const std::vector<Group>& groups,
                                   const ShardingOptions& sharding);
  Group& group_of(size_t idx) { return groups_[parameters_[idx].group]; }
  void begin_reducing();
  void gather_all();

  std::vector<ReplicatedParameter> parameters_;
  ShardingOptions sharding_;
  std::vector<Group> groups_;
  std::vector<Rows> rows_;            ///< by parameter
  std::vector<size_t> in_group_;      ///< each parameter's index in its group
  std::vector<BucketPlace> buckets_;  ///< in the order of the forward pass
  ReplicatedExchanges exchanges_;     ///< of the same buckets
  std::unique_ptr<HeldState> state_;
  Phase phase_ = Phase::kIdle;
  std::unique_ptr<DeviceEvent> clipped_;  ///< behind give_clip()
};

}  // namespace tessera
