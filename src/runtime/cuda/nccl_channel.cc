#include "runtime/cuda/nccl_channel.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "ops/cuda/check.h"

namespace tessera::cuda {

class NcclWork final : public Work {
 public:
  NcclWork(NcclChannel& channel, std::shared_ptr<NcclChannel::Event> end)
      : channel_(channel), end_(std::move(end)) {}
  ~NcclWork() override { end_->in_use = false; }

  void wait() override { check(cudaStreamWaitEvent(channel_.device_->stream(), end_->event)); }
  bool done() override {
    const cudaError_t status = cudaEventQuery(end_->event);
    if (status == cudaErrorNotReady) return false;
    check(status);
    return true;
  }
  void abandon() noexcept override { channel_.abort(); }

 private:
  NcclChannel& channel_;
  std::shared_ptr<NcclChannel::Event> end_;
};

NcclChannel::NcclChannel(std::shared_ptr<CudaDevice> device, NcclPlace place,
                         const ncclUniqueId& id, const std::function<void()>& watch)
    : nccl_(NcclLibrary::get()), device_(std::move(device)), place_(std::move(place)) {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  check(cudaEventCreateWithFlags(&before_, cudaEventDisableTiming));
  connect(id, watch);
}

void NcclChannel::connect(const ncclUniqueId& id, const std::function<void()>& watch) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  nccl_.check(nccl_.comm_init(&comm_, static_cast<int>(place_.ranks.size()), id,
                              static_cast<int>(place_.rank), &config));
  for (ncclResult_t state = ncclInProgress; state == ncclInProgress;) {
    nccl_.check(nccl_.comm_error(comm_, &state));
    nccl_.check(state);
    if (state != ncclInProgress) break;
    watch();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

NcclChannel::~NcclChannel() {
  if (comm_ != nullptr) {
    cudaStreamSynchronize(stream_);
    nccl_.comm_destroy(comm_);
  }
  for (const auto& event : events_) cudaEventDestroy(event->event);
  cudaEventDestroy(before_);
  cudaStreamDestroy(stream_);
}

void NcclChannel::abort() noexcept {
  if (comm_ == nullptr) return;
  nccl_.comm_abort(comm_);
  comm_ = nullptr;
}

std::shared_ptr<NcclChannel::Event> NcclChannel::take_event() {
  const auto is_free = [](const auto& event) { return event.use_count() == 1 && !event->in_use; };
  auto found = std::ranges::find_if(events_, is_free);
  if (found == events_.end()) {
    auto event = std::make_shared<Event>();
    check(cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming));
    events_.push_back(std::move(event));
    found = events_.end() - 1;
  }
  (*found)->in_use = true;
  return *found;
}

void NcclChannel::forget_finished() {
  while (!started_.empty() && cudaEventQuery(started_.front().end->event) == cudaSuccess)
    started_.pop_front();
}

Pending NcclChannel::start(CommKind kind, int64_t number, const std::function<void()>& issue) {
  ensure(comm_ != nullptr, "group {}: an operation after the communication had failed",
         place_.group);
  forget_finished();
  check(cudaEventRecord(before_, device_->stream()));
  check(cudaStreamWaitEvent(stream_, before_));
  issue();
  std::shared_ptr<Event> end = take_event();
  check(cudaEventRecord(end->event, stream_));
  started_.push_back({end, kind, number});
  return Pending(std::make_unique<NcclWork>(*this, std::move(end)));
}

std::string NcclChannel::failure() const {
  if (comm_ == nullptr) return "the communication was given up";
  ncclResult_t state = ncclSuccess;
  nccl_.check(nccl_.comm_error(comm_, &state));
  if (state == ncclSuccess || state == ncclInProgress) return "";
  return nccl_.get_error_string(state);
}

std::unique_ptr<FailedWait> NcclChannel::first_unfinished() {
  forget_finished();
  if (started_.empty()) return nullptr;
  auto wait = std::make_unique<FailedWait>();
  wait->rank = place_.ranks[static_cast<size_t>(place_.rank)];
  wait->kind = started_.front().kind;
  wait->number = started_.front().number;
  wait->group = place_.group;
  wait->ranks = place_.ranks;
  return wait;
}

}  // namespace tessera::cuda
