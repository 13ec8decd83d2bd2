#pragma once

#include <span>

#include "comm/statistics.h"
#include "sim/hardware.h"
#include "step/link_queues.h"

namespace tessera {

/// How long exchanges take, once all ranks have come to them. Ranks are numbered node by node.
class LinkTimes {
 public:
  explicit LinkTimes(const Hardware& hardware) : hardware_(hardware) {}

  /// Of a group of these ranks, of which each sends `sent` bytes, as CommCount counts them. Rings
  /// pass through each node once, so ranks of a node share what its devices send; an all-to-all
  /// sends to each rank its part directly, within and between nodes side by side.
  double exchange_seconds(CommKind kind, std::span<const int64_t> ranks, double sent) const;
  /// What limits such an exchange, where others are under way.
  LinkKind link_of(std::span<const int64_t> ranks) const;
  double message_seconds(int64_t from, int64_t to, double bytes) const;
  int64_t node_of(int64_t rank) const { return rank / hardware_.node_devices; }

 private:
  const Hardware& hardware_;
};

/// Bytes that a rank sends of an exchange whose input has so many, as CommCount counts them.
double sent_bytes(CommKind kind, int64_t num_ranks, double input_bytes);

}  // namespace tessera
