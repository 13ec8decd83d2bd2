#include "runtime/cuda/nccl_channel.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "comm/timed_work.h"
#include "ops/cuda/check.h"

namespace tessera::cuda {

namespace {

/// Whether the GPU has come to the event. "Not yet" is no error, though the runtime keeps it as
/// one.
bool has_passed(cudaEvent_t event) {
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status);
  return true;
}

}  // namespace

class NcclWork final : public Work, public TimedWork {
 public:
  NcclWork(NcclChannel& channel, std::shared_ptr<NcclChannel::Event> end)
      : channel_(channel), end_(std::move(end)) {}
  ~NcclWork() override { end_->in_use = false; }

  void wait() override {
    if (!end_->recorded) channel_.settle();
    check(cudaStreamWaitEvent(channel_.device_->stream(), end_->event));
  }
  bool done() override {
    if (!end_->recorded && !channel_.is_settled()) return false;
    return has_passed(end_->event);
  }
  void abandon() noexcept override { channel_.give_up_(); }
  bool when_known(Use use) override {
    if (!end_->span) return false;
    channel_.device_->when_known(end_->span, std::move(use));
    return true;
  }

 private:
  NcclChannel& channel_;
  std::shared_ptr<NcclChannel::Event> end_;
};

NcclChannel::NcclChannel(std::shared_ptr<CudaDevice> device, NcclPlace place,
                         const ncclUniqueId& id, Watch watch, GiveUp give_up)
    : nccl_(NcclLibrary::get()),
      device_(std::move(device)),
      place_(std::move(place)),
      watch_(std::move(watch)),
      give_up_(std::move(give_up)) {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  check(cudaEventCreateWithFlags(&before_, cudaEventDisableTiming));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  nccl_.check(nccl_.comm_init(&comm_, static_cast<int>(place_.ranks.size()), id,
                              static_cast<int>(place_.rank), &config));
  settle();
}

NcclChannel::~NcclChannel() {
  // Peers that are lost never complete what is under way.
  if (std::uncaught_exceptions() > 0) abort();
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

FailedWait NcclChannel::describe_wait(CommKind kind, int64_t number) const {
  return {.rank = place_.ranks[place_.rank],
          .kind = kind,
          .number = number,
          .group = place_.group,
          .ranks = place_.ranks};
}

FailedWait NcclChannel::describe_last() const {
  if (started_.empty()) return describe_wait(CommKind::kBarrier, 0);
  return describe_wait(started_.back().kind, started_.back().number);
}

void NcclChannel::mark_end() {
  if (started_.empty() || started_.back().end->recorded) return;
  Event& end = *started_.back().end;
  check(cudaEventRecord(end.event, stream_));
  if (end.span) check(cudaEventRecord(end.span->end, stream_));
  end.recorded = true;
}

bool NcclChannel::is_settled() {
  ensure(comm_ != nullptr, "group {}: an operation after the communication had failed",
         place_.group);
  ncclResult_t state = ncclSuccess;
  nccl_.check(nccl_.comm_error(comm_, &state));
  if (state == ncclInProgress) return false;
  if (state != ncclSuccess) {
    watch_(describe_last(), std::chrono::steady_clock::now());
    nccl_.check(state);
  }
  mark_end();
  return true;
}

void NcclChannel::settle() {
  const Device::Time begin = std::chrono::steady_clock::now();
  while (!is_settled()) {
    // An operation is given to the stream within this time; connections take longer.
    if (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(200)) {
      std::this_thread::yield();
      continue;
    }
    watch_(describe_last(), begin);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
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
  (*found)->recorded = false;
  (*found)->span = nullptr;
  return *found;
}

void NcclChannel::forget_finished() {
  // An error is told by whoever waits for the device, who may know of a lost rank.
  while (!started_.empty() && started_.front().end->recorded &&
         cudaEventQuery(started_.front().end->event) == cudaSuccess)
    started_.pop_front();
  cudaGetLastError();  // the runtime keeps "not yet" as an error
}

Pending NcclChannel::start(CommKind kind, int64_t number, const std::function<void()>& issue,
                           bool timed) {
  settle();
  forget_finished();
  check(cudaEventRecord(before_, device_->stream()));
  check(cudaStreamWaitEvent(stream_, before_));
  std::shared_ptr<Event> end = take_event();
  if (timed) {
    end->span = device_->make_span();
    check(cudaEventRecord(end->span->begin, stream_));
  }
  started_.push_back({end, kind, number});
  try {
    issue();
  } catch (const InternalError&) {
    watch_(describe_last(), std::chrono::steady_clock::now());
    throw;
  }
  end->recorded = false;  // `issue` may have settled what it gave before
  is_settled();
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
  return std::make_unique<FailedWait>(
      describe_wait(started_.front().kind, started_.front().number));
}

}  // namespace tessera::cuda
