#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace tessera::cuda {

/// Pinned memory through which the host gives a stream bytes without waiting: they are taken at
/// once, and copied when the stream comes to it. The host waits only where more are under way than
/// the ring holds.
class UploadRing {
 public:
  /// The most bytes of one upload.
  static constexpr int64_t kMostBytes = int64_t{4} << 20;

  /// `wait` returns when an event is complete.
  UploadRing(cudaStream_t stream, std::function<void(cudaEvent_t)> wait);
  ~UploadRing();
  UploadRing(const UploadRing&) = delete;
  UploadRing& operator=(const UploadRing&) = delete;

  /// REQUIRES num_bytes <= kMostBytes.
  void upload(void* to, const void* from, int64_t num_bytes);

 private:
  static constexpr size_t kParts = 4;

  std::byte* part() const { return memory_ + static_cast<int64_t>(part_) * kMostBytes; }
  void begin_next_part();

  cudaStream_t stream_;
  std::function<void(cudaEvent_t)> wait_;
  std::byte* memory_ = nullptr;
  std::array<cudaEvent_t, kParts> left_{};  ///< by part: after all copies from it
  size_t part_ = 0;
  int64_t used_ = 0;  ///< of the part
};

}  // namespace tessera::cuda
