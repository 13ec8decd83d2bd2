#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "runtime/cuda/cuda_pages.h"
#include "runtime/cuda/cuda_upload.h"

namespace tessera::cuda {

/// One GPU with a stream, in the order of which it does all its work.
class CudaDevice final : public Device, public std::enable_shared_from_this<CudaDevice> {
 public:
  /// Makes GPU `index` the calling thread's. Throws UserError where it cannot be had.
  explicit CudaDevice(int index);
  ~CudaDevice() override;

  std::string name() const override;
  bool is_host() const override { return false; }
  int index() const { return index_; }
  cudaStream_t stream() const { return stream_; }

  std::byte* allocate(int64_t num_bytes) override;
  void release(std::byte* data, int64_t num_bytes) noexcept override;
  /// Pinned memory of the host, which the GPU reads and writes over the bus.
  std::byte* allocate_shared(int64_t num_bytes) override;
  void release_shared(std::byte* data, int64_t num_bytes) noexcept override;
  int64_t page_bytes() const override { return CudaPages::kBytes; }
  std::byte* reserve(int64_t num_bytes) override { return pages_.reserve(num_bytes); }
  bool commit(std::byte* pages, int64_t num_bytes) override {
    return pages_.commit(pages, num_bytes);
  }
  void decommit(std::byte* pages, int64_t num_bytes) override { pages_.decommit(pages, num_bytes); }
  void release_reserved(std::byte* data, int64_t num_bytes) noexcept override;
  /// A tile of the grouped products.
  int64_t rows_read_behind() const override { return kRowsReadBehind; }
  static constexpr int64_t kRowsReadBehind = 256;
  void copy(void* to, const void* from, int64_t num_bytes) override;
  void upload(void* to, const void* from, int64_t num_bytes) override;
  void copy_found(void* to, const void* const* from, int64_t num_bytes) override;
  void zero(void* data, int64_t num_bytes) override;
  void synchronize() override;
  std::unique_ptr<DeviceEvent> make_event() override;
  std::unique_ptr<CopyLane> make_copy_lane() override;
  int64_t num_waits() const override { return num_waits_; }
  double waited_seconds() const override { return waited_seconds_; }
  /// CUDA graphs.
  bool begin_recording() override;
  Recording end_recording() override;
  bool is_recording() const override { return is_recording_; }
  Mark mark() override;
  void when_known(Mark begin, Mark end, std::function<void(Time, Time)> use) override;
  int64_t used_bytes() const override;
  std::string describe_memory() const override;

  /// Returns when another stream of this GPU has done its work, which while an exception unwinds is
  /// given up first if it needs other ranks: before the stream is destroyed.
  void finish(cudaStream_t stream) const noexcept;
  /// Returns when the GPU has come to the event; throws where work before it failed.
  void wait(cudaEvent_t event);

  /// A stretch of work on another stream of this GPU, whose times are wanted.
  struct Span {
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
  };
  using SpanPtr = std::shared_ptr<const Span>;
  /// A span, whose events are to be recorded by whoever gives the work. They are the device's, and
  /// are used again when nobody holds the span.
  SpanPtr make_span();
  /// Once the GPU has come to the span's end, whose recording must stand in its stream, the next
  /// synchronize() calls `use` with the times.
  void when_known(SpanPtr span, std::function<void(Time, Time)> use);

  /// Who looks after work that needs other ranks, which may have gone.
  struct Watch {
    /// Called now and then, with when the waiting began, while synchronize() waits: throws where
    /// it can no longer end. Empty for none.
    std::function<void(Time begin)> look;
    /// Ends such work, so that memory can be released while an exception unwinds. Must not throw.
    std::function<void()> give_up;
  };
  void set_watch(Watch watch) { watch_ = std::move(watch); }

 private:
  struct Interval {
    Mark begin = 0;
    Mark end = 0;
    std::function<void(Time, Time)> use;
  };
  struct SpanUse {
    SpanPtr span;
    std::function<void(Time, Time)> use;
  };
  void tell_intervals();
  /// Calls `wait`, or where there is a watch `query` again and again, and counts both as a wait.
  void wait_for(const std::function<cudaError_t()>& wait,
                const std::function<cudaError_t()>& query);
  /// Until `query` answers other than cudaErrorNotReady; looks after the watch meanwhile.
  cudaError_t wait_watched(const std::function<cudaError_t()>& query) const;
  void ensure_done(cudaError_t status) const;
  void give_up_if_unwinding() const noexcept;

  int index_;
  cudaStream_t stream_ = nullptr;
  bool is_recording_ = false;
  std::unique_ptr<UploadRing> uploads_;
  CudaPages pages_;
  int64_t num_waits_ = 0;
  double waited_seconds_ = 0;
  std::vector<cudaEvent_t> events_;  ///< of marks, used again after each synchronize()
  size_t num_marks_ = 0;
  std::vector<Interval> intervals_;
  std::vector<SpanPtr> spans_;  ///< all that were made
  std::vector<SpanUse> span_uses_;
  Watch watch_;
};

}  // namespace tessera::cuda
