#include "step/build/offload_tasks.h"

#include <vector>

namespace tessera {
namespace {

std::vector<const LayerOffload*> at_run(const std::multimap<int, const LayerOffload*>& offloads,
                                        int run) {
  std::vector<const LayerOffload*> found;
  for (auto [at, last] = offloads.equal_range(run); at != last; ++at) found.push_back(at->second);
  return found;
}

}  // namespace

OffloadTasks::OffloadTasks(PlanWriter& writer, std::vector<ChunkTasks>& chunks,
                           const std::vector<LayerOffload>& offloads)
    : writer_(writer), chunks_(chunks) {
  for (const LayerOffload& offload : offloads) {
    forward_.emplace(offload.forward, &offload);
    stored_.emplace(offload.stored, &offload);
    reload_.emplace(offload.reload, &offload);
    backward_.emplace(offload.backward, &offload);
  }
}

/// A reload may take over the memory of a store that ends here, and needs none of those awaited.
void OffloadTasks::before_run(int run) {
  for (const LayerOffload* offload : at_run(stored_, run)) writer_.wait_for(stores_.at(offload));
  for (const LayerOffload* offload : at_run(reload_, run))
    reloads_[offload] = writer_.start(chunks_[offload->chunk].reload(*offload));
  for (const LayerOffload* offload : at_run(backward_, run)) writer_.wait_for(reloads_.at(offload));
}

void OffloadTasks::after_run(int run) {
  for (const LayerOffload* offload : at_run(forward_, run))
    stores_[offload] = writer_.start(chunks_[offload->chunk].store(*offload));
}

}  // namespace tessera
