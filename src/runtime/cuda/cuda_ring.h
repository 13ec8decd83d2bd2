#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "ops/cuda/device_buffer.h"
#include "runtime/cuda/cuda_device.h"
#include "runtime/cuda/cuda_ring_kernels.h"

namespace tessera::cuda {

/// Memory of every rank of a group that the GPUs of all of them address directly, and the exchanges
/// that go through it (cuda_ring_kernels.h). Ranks are processes or threads of one machine, each
/// with a GPU, or several of one GPU. All members start the same exchanges in the same order, each
/// rank's in one stream. When a rank's kernel has ended, no other rank touches its memory any more.
class CudaRing {
 public:
  /// `host` is a group whose members all call. Null, on all of them, where not every rank's GPU can
  /// address the memory of every other's, or there are more than kMaxRingRanks.
  static std::unique_ptr<CudaRing> make(Communicator& host, CudaDevice& device);
  ~CudaRing();
  CudaRing(const CudaRing&) = delete;
  CudaRing& operator=(const CudaRing&) = delete;

  const RingView& view() const { return view_; }

  // Exchanges as Communicator has them (comm/communicator.h), given to `stream`.

  void all_gather(const RowMove& move, std::span<const int64_t> rows, cudaStream_t stream) const;
  void all_to_all(const RowMove& move, std::span<const int64_t> send_rows,
                  std::span<const int64_t> receive_rows, cudaStream_t stream) const;
  /// I64 [size] counts on the device.
  void all_to_all(const RowMove& move, const Tensor& send_rows, const Tensor& receive_rows,
                  cudaStream_t stream) const;
  /// Of BF16 or F32, here and below; sums are in F32, in the order of the ranks.
  void reduce_scatter(const Tensor& in, const Tensor& out, std::span<const int64_t> rows,
                      cudaStream_t stream) const;
  void all_reduce(const Tensor& in, const Tensor& out, cudaStream_t stream) const;

  /// Kernels that wait for other ranks end, with their work undone; nothing can be exchanged
  /// afterwards.
  void abort() noexcept;
  /// The place in the group of a rank that a kernel has waited for over a second; -1: none is.
  int64_t waits_for() const;

 private:
  explicit CudaRing(int num_ranks);
  /// Whether this rank can address the memory of all others.
  bool open_all(Communicator& host, const CudaDevice& device);
  void make_view(int rank);

  std::unique_ptr<DeviceBuffer> memory_;  ///< of this rank, for all
  DeviceBuffer counts_;                   ///< of this rank, for itself
  RingStatus* status_ = nullptr;
  std::vector<std::byte*> bases_;  ///< of each rank's memory, as this one addresses it
  std::vector<void*> opened_;      ///< those of other processes
  RingView view_;
};

}  // namespace tessera::cuda
