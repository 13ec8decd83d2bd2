#pragma once

#include <vector>

#include "model/run/training_model.h"
#include "parallel/pipeline_schedule.h"

namespace tessera {

/// The most micro-batches of each of a stage's chunks that are in flight at a time, from the
/// forward pass to the last backward one.
std::vector<int64_t> count_in_flight(const std::vector<PipelineStep>& steps, int64_t num_chunks);

/// Where a stage is in a pipeline, and the groups along it.
struct PipelinePlace {
  CommunicatorPtr activations;  ///< the ranks of the stages, in their order
  CommunicatorPtr gradients;    ///< the same ranks in a group of their own: the two kinds of
                                ///< messages between a pair of stages come in different orders
  int64_t num_chunks = 1;       ///< of each stage
};

/// Runs one stage's list of steps: hidden states go to the stage of the next chunk (and what
/// goes along with them, see ChunkRun::Messages), their gradients back, each
/// sent without waiting. One object serves all steps of a run. All ranks of the pipeline must
/// construct it. Not thread-safe.
class PipelineExecutor {
 public:
  PipelineExecutor(TrainingModel& model, PipelinePlace place, std::vector<PipelineStep> steps);

  /// All micro-batches forward and backward: `batches` and `scales` are of this rank's
  /// micro-batches of the step. Returns this rank's parts. `hooks.after_backward` is called
  /// as gradients are completed, in the last pass of the last micro-batch.
  MicroBatchResult run(const std::vector<MicroBatch>& batches, const LossScales& scales,
                       const NodeObserver& observer = {}, const PassHooks& hooks = {});
  /// The parts of run(), for whoever gives the device more before it waits: gives all of it,
  void give(const std::vector<MicroBatch>& batches, const LossScales& scales,
            const NodeObserver& observer = {}, const PassHooks& hooks = {});
  /// or, where the device repeats what was given, what the host does for it;
  void give_again(const std::vector<MicroBatch>& batches, const LossScales& scales);
  /// and the result. REQUIRES that the device has come to the end of what was given.
  MicroBatchResult collect();
  /// Where this rank's losses of what was given will be, F32 [1].
  const std::vector<Tensor>& losses() const { return losses_; }
  /// Forgets what was given, in vain.
  void forget();
  /// The summed loss of this rank's valid tokens; 0 in all stages but the last.
  double evaluate(const MicroBatch& batch, const NodeObserver& observer = {});

 private:
  /// A place of a chunk: the micro-batch that holds it, and what is still being sent from it.
  struct Place {
    int64_t micro_batch = -1;
    std::vector<Pending> sends;

    void wait_sends();
  };

  int64_t stage() const { return place_.activations->rank(); }
  int64_t num_stages() const { return place_.activations->size(); }
  bool is_first(int64_t chunk) const { return stage() == 0 && chunk == 0; }
  bool is_last(int64_t chunk) const {
    return stage() == num_stages() - 1 && chunk == place_.num_chunks - 1;
  }
  int64_t next_stage() const { return (stage() + 1) % num_stages(); }
  int64_t previous_stage() const { return (stage() + num_stages() - 1) % num_stages(); }

  RunSlot take_place(int64_t chunk, int64_t micro_batch);
  RunSlot find_place(int64_t chunk, int64_t micro_batch) const;
  Place& at(const RunSlot& slot);
  void forward(const PipelineStep& step, const MicroBatch& batch, const LossScales& scales,
               const NodeObserver& observer, const PassHooks& hooks);
  void backward(const PipelineStep& step, const NodeObserver& observer, const PassHooks& hooks);
  void finish_sends();

  TrainingModel& model_;
  PipelinePlace place_;
  std::vector<PipelineStep> steps_;
  std::vector<std::vector<Place>> places_;  // by chunk
  // Of what was given last:
  struct Loading {
    RunSlot slot;
    int64_t micro_batch = 0;
  };
  std::vector<Loading> loaded_;
  std::vector<RunSlot> finished_;
  std::vector<Tensor> losses_;
};

}  // namespace tessera
