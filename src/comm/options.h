#pragma once

#include <cstdint>

namespace tessera {

/// How ranks that are processes of one machine exchange large tensors of the host.
enum class SharedMemory : uint8_t {
  kAuto,  ///< the receiver copies from the sender's memory, where the system lets it
  kOff,   ///< as between machines
};

/// How ranks communicate.
struct CommOptions {
  /// The longest that a rank waits for one operation. Must exceed the longest time between two
  /// ranks' arrival at it, such as one rank's writing of a checkpoint. Also the longest that ranks
  /// wait for one another when they start and when they end.
  double timeout_seconds = 600;
  /// The longest wait that a rank of a job which gets SIGTERM allows itself: then a peer is taken
  /// for lost. Less than what the launcher leaves until SIGKILL, so that the rank can say why it
  /// ends; connect_world puts half of that for 0.
  double grace_seconds = 0;
  /// GPUs of one machine that address one another's memory exchange through it what NCCL is behind
  /// with.
  bool peer_memory = true;
  SharedMemory shared_memory = SharedMemory::kAuto;
  /// Messages of at least as many bytes go through shared memory; the same on all ranks.
  int64_t shared_bytes = 8 << 10;
};

}  // namespace tessera
