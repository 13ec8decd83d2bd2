#include "checkpoint/background_save.h"

#include <sys/resource.h>

#include <chrono>
#include <system_error>
#include <utility>

#include "checkpoint/together.h"
#include "core/process/stopwatch.h"

namespace tessera {
namespace {

/// The threads that compute go first. Of Linux: the priority is one of the calling thread.
void lower_priority() {
  constexpr int kNice = 10;
  ::setpriority(PRIO_PROCESS, 0, kNice);
}

SaveJob copy_job(const SliceSaveRequest& request, Snapshot& snapshot, Communicator& world) {
  SaveJob job;
  together(world, [&] {
    snapshot.take(request.model, request.optimizer);
    SliceSaveRequest copied = request;
    copied.model = snapshot.model();
    copied.optimizer = snapshot.optimizer();
    job = make_job(copied, world);
  });
  return job;
}

}  // namespace

BackgroundSave::BackgroundSave(const std::filesystem::path& root, const SliceSaveRequest& request,
                               Snapshot& snapshot, Communicator& world,
                               std::function<void()> before_work)
    : world_(world),
      snapshot_(snapshot),
      before_work_(std::move(before_work)),
      save_(root, copy_job(request, snapshot, world), world) {
  save_.begin();
  if (snapshot_.done()) start();
}

void BackgroundSave::start() {
  snapshot_.wait();
  launch();
}

void BackgroundSave::launch() {
  const auto work = [this] {
    const auto start = std::chrono::steady_clock::now();
    if (before_work_) before_work_();
    save_.work();
    work_seconds_ += seconds_since(start);
  };
  try {
    work_ = std::async(std::launch::async, [work] {
      lower_priority();
      work();
    });
  } catch (const std::system_error&) {  // no thread to be had: by whoever waits
    work_ = std::async(std::launch::deferred, work);
  }
}

bool BackgroundSave::ready() {
  if (!work_.valid() && snapshot_.done()) start();
  const bool busy =
      !work_.valid() || work_.wait_for(std::chrono::seconds(0)) == std::future_status::timeout;
  int64_t most = busy ? 1 : 0;
  const Tensor tensor = view(std::span(&most, 1), {1});
  world_.all_reduce(tensor, tensor, ReduceOp::kMax).wait();
  return most == 0;
}

bool BackgroundSave::advance() {
  save_.end_stage([&] {
    if (!work_.valid()) start();
    work_.get();
  });
  if (save_.finished()) return true;
  launch();
  return false;
}

void BackgroundSave::wait() {
  while (!advance()) {
  }
}

}  // namespace tessera
