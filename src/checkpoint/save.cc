#include "checkpoint/checkpoint.h"
#include "checkpoint/staged_save.h"
#include "checkpoint/together.h"

namespace tessera {
namespace {

SaveResult run(StagedSave& save) {
  save.begin();
  while (!save.finished()) save.end_stage([&] { save.work(); });
  return save.result();
}

}  // namespace

SaveResult save_checkpoint(const std::filesystem::path& root, const SaveRequest& request) {
  const CommunicatorPtr alone = make_single_communicator("checkpoint");
  StagedSave save(root,
                  {.part = {.step = request.step,
                            .shard_bytes = request.shard_bytes,
                            .model = whole_tensors(request.model),
                            .optimizer = whole_tensors(request.optimizer)},
                   .state = request.state,
                   .keep_last = request.keep_last},
                  *alone);
  return run(save);
}

SaveResult save_checkpoint(const std::filesystem::path& root, const SliceSaveRequest& request,
                           Communicator& world) {
  SaveJob job;
  together(world, [&] { job = make_job(request, world); });
  StagedSave save(root, std::move(job), world);
  return run(save);
}

}  // namespace tessera
