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
///
/// An operation that is the first of its kind connects the ranks, for which all must have come to
/// it. The host does not stand still for that when it starts one, but only before the next
/// operation or wait: ranks may be at other work, which others need, before they come.
class NcclChannel {
 public:
  /// Called while the host waits; throws where it can no longer end. Is told what is waited for and
  /// since when.
  using Watch = std::function<void(const FailedWait& wait, Device::Time begin)>;
  /// Ends the operations of all channels, this one's too, by abort().
  using GiveUp = std::function<void()>;

  /// All members construct it with rank 0's id; returns when all have come.
  NcclChannel(std::shared_ptr<CudaDevice> device, NcclPlace place, const ncclUniqueId& id,
              Watch watch, GiveUp give_up);
  ~NcclChannel();
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  /// Starts what `issue` gives the stream. Waiting for it makes the device's later work follow it;
  /// the host does not wait. Where it is `timed`, the Pending's work tells when the GPU did it.
  Pending start(CommKind kind, int64_t number, const std::function<void()>& issue,
                bool timed = false);
  /// Returns when the stream has all that was given to NCCL, so that other work may follow it.
  void settle();
  /// What NCCL says is wrong; "" while nothing is.
  std::string failure() const;
  /// The first operation that is not complete on the GPU; null where there is none.
  std::unique_ptr<FailedWait> first_unfinished();
  /// Ends all operations; nothing can be started afterwards. Returns only when the GPU has nothing
  /// to do any more, whoever gave it: other channels that wait for lost ranks must be ended
  /// meanwhile.
  void abort() noexcept;

 private:
  friend class NcclWork;
  struct Event {
    cudaEvent_t event = nullptr;
    bool recorded = false;
    bool in_use = false;                 ///< by a Pending
    CudaDevice::SpanPtr span = nullptr;  ///< where the operation is timed
  };
  struct Started {
    std::shared_ptr<Event> end;
    CommKind kind = CommKind::kBarrier;
    int64_t number = 0;
  };

  /// Whether the stream has all that was given to NCCL; then the last operation's end is marked.
  /// Where NCCL says that something is wrong, as where a peer's process has ended, the watch
  /// throws.
  bool is_settled();
  /// What the host waits for while NCCL is at work: the last operation, or that the ranks connect.
  FailedWait describe_last() const;
  void mark_end();
  FailedWait describe_wait(CommKind kind, int64_t number) const;
  std::shared_ptr<Event> take_event();
  void forget_finished();

  const NcclLibrary& nccl_;
  std::shared_ptr<CudaDevice> device_;
  NcclPlace place_;
  Watch watch_;
  GiveUp give_up_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t before_ = nullptr;
  std::vector<std::shared_ptr<Event>> events_;
  std::deque<Started> started_;  ///< in their order, as far as not seen to be finished
};

}  // namespace tessera::cuda
