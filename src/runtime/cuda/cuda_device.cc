#include "runtime/cuda/cuda_device.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "core/memory.h"
#include "core/process/stopwatch.h"
#include "ops/cuda/check.h"
#include "runtime/cuda/cuda_copy_lane.h"
#include "runtime/cuda/cuda_found_copy.h"
#include "runtime/cuda/cuda_graph.h"
#include "runtime/cuda/cuda_pinned.h"

namespace tessera::cuda {
namespace {

/// Memory that the runtime knows, the GPU's or pinned, is copied in the stream's order.
bool is_known(const void* address) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, address));
  return attributes.type != cudaMemoryTypeUnregistered;
}

class CudaEvent final : public DeviceEvent {
 public:
  explicit CudaEvent(CudaDevice& device) : device_(device) {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  ~CudaEvent() override { cudaEventDestroy(event_); }
  void record() override {
    ensure(!device_.is_recording(), "{}: an event cannot be recorded in a graph", device_.name());
    check(cudaEventRecord(event_, device_.stream()));
  }
  void synchronize() override { device_.wait(event_); }

 private:
  CudaDevice& device_;
  cudaEvent_t event_ = nullptr;
};

}  // namespace

CudaDevice::CudaDevice(int index) : index_(index), pages_(index) {
  const cudaError_t status = cudaSetDevice(index);
  require(status == cudaSuccess, "GPU {} cannot be used: {}; `tessera doctor` lists what is there",
          index, cudaGetErrorString(status));
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

CudaDevice::~CudaDevice() {
  give_up_if_unwinding();
  uploads_.reset();
  cudaStreamSynchronize(stream_);
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
  for (const SpanPtr& span : spans_) {
    cudaEventDestroy(span->begin);
    cudaEventDestroy(span->end);
  }
  cudaStreamDestroy(stream_);
}

std::string CudaDevice::name() const {
  return fmt::format("cuda:{}", index_);
}

std::byte* CudaDevice::allocate(int64_t num_bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, num_bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // so that the next call does not report it
    return nullptr;
  }
  check(status);
  zero(data, num_bytes);
  return static_cast<std::byte*>(data);
}

void CudaDevice::give_up_if_unwinding() const noexcept {
  if (watch_.give_up && std::uncaught_exceptions() > 0) watch_.give_up();
}

// The runtime waits for all work of the GPU before it gives memory back.
void CudaDevice::release(std::byte* data, int64_t /*num_bytes*/) noexcept {
  give_up_if_unwinding();
  cudaFree(data);
}

void CudaDevice::release_reserved(std::byte* data, int64_t num_bytes) noexcept {
  give_up_if_unwinding();
  cudaDeviceSynchronize();
  pages_.release(data, num_bytes);
}

std::byte* CudaDevice::allocate_shared(int64_t num_bytes) {
  return allocate_pinned(num_bytes);
}

void CudaDevice::release_shared(std::byte* data, int64_t num_bytes) noexcept {
  give_up_if_unwinding();
  release_pinned(data, num_bytes);
}

void CudaDevice::copy(void* to, const void* from, int64_t num_bytes) {
  if (num_bytes == 0) return;
  check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream_));
  if (is_recording_)
    return;  // memory that the runtime does not know would have ended the recording
  if (!is_known(to) || !is_known(from)) synchronize();
}

// Pinned memory, too, since the host may change it.
void CudaDevice::upload(void* to, const void* from, int64_t num_bytes) {
  if (num_bytes == 0) return;
  ensure(!is_recording_, "{}: an upload cannot be recorded, since its bytes change", name());
  if (num_bytes > UploadRing::kMostBytes) {
    copy(to, from, num_bytes);
    synchronize();
    return;
  }
  if (!uploads_)
    uploads_ = std::make_unique<UploadRing>(stream_, [this](cudaEvent_t event) { wait(event); });
  uploads_->upload(to, from, num_bytes);
}

void CudaDevice::copy_found(void* to, const void* const* from, int64_t num_bytes) {
  if (num_bytes > 0) launch_found_copy(to, from, num_bytes, stream_);
}

void CudaDevice::zero(void* data, int64_t num_bytes) {
  if (num_bytes > 0) check(cudaMemsetAsync(data, 0, num_bytes, stream_));
}

cudaError_t CudaDevice::wait_watched(const std::function<cudaError_t()>& query) const {
  constexpr std::chrono::milliseconds kInterval{5};
  const Time begin = std::chrono::steady_clock::now();
  Time checked = begin;
  for (;;) {
    const cudaError_t status = query();
    if (status == cudaSuccess) return status;
    if (status != cudaErrorNotReady) {
      watch_.look(begin);  // a lost rank may be the reason
      return status;
    }
    cudaGetLastError();  // the runtime keeps it, though it is no error
    const Time now = std::chrono::steady_clock::now();
    if (now - checked < kInterval) continue;
    watch_.look(begin);
    checked = now;
  }
}

void CudaDevice::ensure_done(cudaError_t status) const {
  ensure(
      status == cudaSuccess,
      "{}: work that was given before failed: {}; with CUDA_LAUNCH_BLOCKING=1 in the environment "
      "the message names the operator",
      name(), cudaGetErrorString(status));
}

void CudaDevice::wait_for(const std::function<cudaError_t()>& wait,
                          const std::function<cudaError_t()>& query) {
  ++num_waits_;
  const Time begin = std::chrono::steady_clock::now();
  const cudaError_t status = watch_.look ? wait_watched(query) : wait();
  waited_seconds_ += seconds_since(begin);
  ensure_done(status);
}

void CudaDevice::wait(cudaEvent_t event) {
  wait_for([=] { return cudaEventSynchronize(event); }, [=] { return cudaEventQuery(event); });
}

std::unique_ptr<DeviceEvent> CudaDevice::make_event() {
  return std::make_unique<CudaEvent>(*this);
}

std::unique_ptr<CopyLane> CudaDevice::make_copy_lane() {
  return std::make_unique<StreamCopyLane>(shared_from_this());
}

void CudaDevice::finish(cudaStream_t stream) const noexcept {
  give_up_if_unwinding();
  cudaStreamSynchronize(stream);
}

void CudaDevice::synchronize() {
  ensure(!is_recording_, "{}: a wait of the host cannot be recorded", name());
  wait_for([this] { return cudaStreamSynchronize(stream_); },
           [this] { return cudaStreamQuery(stream_); });
  if (!intervals_.empty() || !span_uses_.empty()) tell_intervals();
  num_marks_ = 0;
}

// Other threads may do with the GPU what they like meanwhile.
bool CudaDevice::begin_recording() {
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  is_recording_ = true;
  return true;
}

Recording CudaDevice::end_recording() {
  is_recording_ = false;
  return end_stream_recording(stream_);
}

Device::Mark CudaDevice::mark() {
  if (num_marks_ == events_.size()) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event));
    events_.push_back(event);
  }
  check(cudaEventRecord(events_[num_marks_], stream_));
  return num_marks_++;
}

void CudaDevice::when_known(Mark begin, Mark end, std::function<void(Time, Time)> use) {
  intervals_.push_back({begin, end, std::move(use)});
}

CudaDevice::SpanPtr CudaDevice::make_span() {
  const auto free =
      std::ranges::find_if(spans_, [](const SpanPtr& s) { return s.use_count() == 1; });
  if (free != spans_.end()) return *free;
  Span span;
  check(cudaEventCreate(&span.begin));
  check(cudaEventCreate(&span.end));
  return spans_.emplace_back(std::make_shared<const Span>(span));
}

void CudaDevice::when_known(SpanPtr span, std::function<void(Time, Time)> use) {
  span_uses_.push_back({std::move(span), std::move(use)});
}

/// The GPU's clock is set against the host's now: the elapsed times are single floats, exact only
/// where they are short.
void CudaDevice::tell_intervals() {
  const Mark last = mark();
  check(cudaEventSynchronize(events_[last]));
  const Time now = std::chrono::steady_clock::now();
  const auto time_of = [&](cudaEvent_t event) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, event, events_[last]));
    return now - std::chrono::duration_cast<Time::duration>(
                     std::chrono::duration<float, std::milli>(milliseconds));
  };
  for (const Interval& interval : std::exchange(intervals_, {}))
    interval.use(time_of(events_[interval.begin]), time_of(events_[interval.end]));
  std::vector<SpanUse> later;  // other streams may still be at work
  for (SpanUse& next : std::exchange(span_uses_, {})) {
    const cudaError_t status = cudaEventQuery(next.span->end);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();  // the runtime keeps it, though it is no error
      later.push_back(std::move(next));
      continue;
    }
    check(status);
    next.use(time_of(next.span->begin), time_of(next.span->end));
  }
  span_uses_.insert(span_uses_.begin(), std::make_move_iterator(later.begin()),
                    std::make_move_iterator(later.end()));
}

int64_t CudaDevice::used_bytes() const {
  size_t free = 0;
  size_t total = 0;
  check(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(total - free);
}

std::string CudaDevice::describe_memory() const {
  size_t free = 0;
  size_t total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) return "";
  return fmt::format("{} of {} are free", format_bytes(static_cast<int64_t>(free)),
                     format_bytes(static_cast<int64_t>(total)));
}

}  // namespace tessera::cuda
