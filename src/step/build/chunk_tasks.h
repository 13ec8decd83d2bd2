#pragma once

#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "model/run/chunk_streams.h"
#include "model/run/saved_placement.h"
#include "parallel/stage_groups.h"
#include "step/build/step_runs.h"
#include "step/plan_writer.h"

namespace tessera {

/// Writes the tasks of one chunk for its micro-batches, with the buffers of their activations.
class ChunkTasks {
 public:
  /// All references must outlive it. Without `placement`, slabs have memory of their own.
  ChunkTasks(PlanWriter& writer, const StagePrograms& programs, const SavedPlacement* placement,
             int64_t chunk);

  /// The run's task, with the activations that it touches; parameters are left out.
  Task run(const StepRun& run);
  Task load(const StepPass& pass);
  Task publish(const StepPass& pass);
  /// Reads the results of a micro-batch that were published.
  BufferId results(int64_t micro_batch);

  /// Of a layer's run that is offloaded behind, or reloaded in front: the start of the copy.
  Task store(const LayerOffload& offload);
  Task reload(const LayerOffload& offload);

  /// Where one balance loss spans the model: the sums of this chunk's layers.
  Task sum_balance(const StepPass& pass);

  /// The messages that a pass is given, or leaves: one for each stream.
  struct Message {
    std::string what;  ///< "hidden states 0"
    BufferId buffer = {};
    int64_t bytes = 0;
  };
  std::vector<Message> messages_in(const StepPass& pass);
  std::vector<Message> messages_out(const StepPass& pass);

 private:
  /// Of a micro-batch in a place.
  struct Holder {
    int64_t micro_batch = 0;
    int64_t place = 0;
  };

  BufferId make(const std::string& what, const Holder& holder, const std::string& storage,
                int64_t bytes, Purpose purpose, Home home = Home::kDevice,
                std::optional<int64_t> offset = std::nullopt);
  BufferId make_saved(const std::string& what, const StepRun& run, int64_t bytes,
                      std::vector<int64_t> SavedOffsets::*offsets);
  BufferId stream(const std::string& what, int64_t storage, const Holder& holder);
  BufferId hidden(int64_t idx, const Holder& holder);
  BufferId gradient(int64_t idx, const Holder& holder);
  BufferId outside_gradient(int64_t depth, const Holder& holder);
  BufferId embedded(int64_t mtp, const Holder& holder);
  BufferId embedded_gradient(int64_t mtp, const Holder& holder);
  BufferId inputs(const Holder& holder);
  BufferId results(const Holder& holder);
  BufferId balance_sums(const Holder& holder);
  BufferId balance_gradients(const Holder& holder);
  BufferId saved(const StepRun& run);
  BufferId kept(const StepRun& run);
  /// The part that may wait in the host's memory, before and after it does, and what waits there.
  BufferId offloaded(int64_t layer, const Holder& holder, bool reloaded);
  BufferId host_copy(int64_t layer, const Holder& holder);
  void add_offloaded(const StepRun& run, Task& task);
  /// The pages that a layer's runs take, or give back.
  void add_stash(const StepRun& run, Task& task);
  Task copy(const LayerOffload& offload, bool stores);

  bool is_mtp(int64_t layer) const { return layer >= streams_.decoder; }
  void add_layer(const StepRun& run, Task& task);
  void add_layer_backward(const StepRun& run, Task& task);
  void add_head(const StepRun& run, Task& task);
  void add_embedding(const StepRun& run, Task& task);
  /// What the runs of a program, or of a part of it, have in common.
  struct ProgramCost {
    Cost cost;
    std::vector<InnerExchanges> inside;
  };
  const ProgramCost& cost_of(const Executable& executable, const RunPart& part);
  BufferId working(const StepRun& run, const std::string& name);
  std::vector<Message> forward_messages(const Holder& holder, bool in);
  std::vector<Message> backward_messages(const Holder& holder, bool in);

  PlanWriter& writer_;
  const StagePrograms& programs_;
  const SavedPlacement* placement_;
  const PipelineChunk& chunk_;
  int64_t idx_;
  ChunkStreams streams_;
  bool balances_model_;
  std::map<std::tuple<const Executable*, int, int>, ProgramCost> costs_;
  std::set<std::pair<int64_t, int64_t>> offloads_;  // layers of the chunk with their micro-batches
};

}  // namespace tessera
