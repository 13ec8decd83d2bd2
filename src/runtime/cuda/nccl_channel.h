#pragma once

#include <cuda_runtime.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/error.h"
#include "runtime/cuda/cuda_device.h"
#include "runtime/cuda/nccl_library.h"

namespace tessera::cuda {

/// The ranks that one of NCCL's communicators joins, and what it is for.
struct NcclPlace {
  std::string group;
  std::vector<int64_t> ranks;  ///< of the world
  int64_t rank = 0;            ///< this one's place
};

/// One of NCCL's communicators with a stream of its own. Operations begin after the work that the
/// device was given before, run beside what it is given then, and are in order among themselves.
class NcclChannel {
 public:
  /// All members construct it with rank 0's id; returns when all have come. `watch` is called while
  /// it waits, and throws where that is in vain.
  NcclChannel(std::shared_ptr<CudaDevice> device, NcclPlace place, const ncclUniqueId& id,
              const std::function<void()>& watch);
  ~NcclChannel();
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  /// Starts what `issue` gives the stream. Waiting for it makes the device's later work follow it;
  /// the host does not wait.
  Pending start(CommKind kind, int64_t number, const std::function<void()>& issue);
  /// What NCCL says is wrong; "" while nothing is.
  std::string failure() const;
  /// The first operation that is not complete on the GPU; null where there is none.
  std::unique_ptr<FailedWait> first_unfinished();
  /// Ends all operations; nothing can be started afterwards.
  void abort() noexcept;

 private:
  friend class NcclWork;
  struct Event {
    cudaEvent_t event = nullptr;
    bool in_use = false;  ///< by a Pending
  };
  struct Started {
    std::shared_ptr<Event> end;
    CommKind kind = CommKind::kBarrier;
    int64_t number = 0;
  };

  void connect(const ncclUniqueId& id, const std::function<void()>& watch);
  std::shared_ptr<Event> take_event();
  void forget_finished();

  const NcclLibrary& nccl_;
  std::shared_ptr<CudaDevice> device_;
  NcclPlace place_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t before_ = nullptr;
  std::vector<std::shared_ptr<Event>> events_;
  std::deque<Started> started_;  ///< in their order, as far as not seen to be finished
};

}  // namespace tessera::cuda
