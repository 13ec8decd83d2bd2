#pragma once

#include <map>
#include <vector>

#include "step/build/chunk_tasks.h"

namespace tessera {

/// Writes the copies of what is offloaded between a step's runs. All references must outlive it.
class OffloadTasks {
 public:
  OffloadTasks(PlanWriter& writer, std::vector<ChunkTasks>& chunks,
               const std::vector<LayerOffload>& offloads);

  /// What ends, or begins, in front of a run.
  void before_run(int run);
  /// The store of what the run made.
  void after_run(int run);

 private:
  using ByRun = std::multimap<int, const LayerOffload*>;

  PlanWriter& writer_;
  std::vector<ChunkTasks>& chunks_;
  ByRun forward_, stored_, reload_, backward_;
  std::map<const LayerOffload*, TaskId> stores_, reloads_;
};

}  // namespace tessera
