#pragma once

namespace tessera {

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
  /// GPUs of one machine that address one another's memory exchange through it what NCCL does not
  /// do as well: sums of BF16, and rows whose numbers only the GPUs know.
  bool peer_memory = true;
};

}  // namespace tessera
