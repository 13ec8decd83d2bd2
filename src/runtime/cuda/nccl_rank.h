#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/error.h"
#include "comm/options.h"
#include "runtime/cuda/cuda_device.h"
#include "runtime/cuda/cuda_ring.h"
#include "runtime/cuda/nccl_channel.h"

namespace tessera::cuda {

/// What all of a rank's groups on GPUs share.
struct NcclRank {
  World& host;
  std::shared_ptr<CudaDevice> device;
  CommOptions options;
  std::shared_ptr<CommStatistics> statistics = std::make_shared<CommStatistics>();
  std::vector<NcclChannel*> channels = {};                    ///< all that live
  std::vector<std::pair<std::string, CudaRing*>> rings = {};  ///< all that live, with their groups

  /// Why waiting since `begin` cannot end; "" while it may.
  std::string find_reason(Device::Time begin) const;
  /// Throws CommError where waiting for the GPU since `begin` cannot end.
  void watch_device(Device::Time begin);
  /// Ends what all groups have under way; nothing can be started afterwards.
  void abort_all() noexcept;
  [[noreturn]] void fail(FailedWait wait, Device::Time begin, const std::string& reason);
};

/// A channel that is watched while it lives. All members make it, and those of `host`, who may be
/// more.
class WatchedChannel {
 public:
  WatchedChannel(NcclRank& shared, const NcclPlace& place, Communicator& host);
  ~WatchedChannel();
  WatchedChannel(const WatchedChannel&) = delete;
  WatchedChannel& operator=(const WatchedChannel&) = delete;
  NcclChannel& channel() { return channel_; }

 private:
  /// The id that the place's first rank makes, over a host group whose members all call.
  static ncclUniqueId share_id(const NcclPlace& place, Communicator& host);

  NcclRank& shared_;
  NcclChannel channel_;
};

}  // namespace tessera::cuda
