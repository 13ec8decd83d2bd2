#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "optim/replicas.h"

namespace tessera {

enum class GradientCompression : uint8_t {
  kNone,
  /// Summands are rounded once to BF16 and summed in F32: half the bytes (MegaScale-MoE, section
  /// 5). With an inner group its sums are made in F32, and they are the summands that are rounded.
  kBf16,
};

/// How the gradients of one bucket are summed over the replicas, each rank being left with its
/// share: a reduce-scatter over the inner group leaves a part, one over the outer group this rank's
/// share of that.
///
/// `memory` has the bucket's F32 gradients in flat order. In the end the share's elements hold the
/// sum; what the others hold is of no use. Reduce-scatters work in place. With compression, BF16
/// summands take half of the memory and those of the other ranks arrive in the rest
/// (MegaScale-MoE, figure 11), so that only the sum needs staging, as much as one share.
class BucketReduction {
 public:
  BucketReduction(const ReplicaGroup& group, const Bucket& bucket, GradientCompression compression);

  int64_t staging_bytes() const;
  /// The three steps, each after the one before is complete. In a level of one rank the step is
  /// nothing.
  Pending start_inner(std::byte* memory) const;
  Pending start_outer(std::byte* memory, std::byte* staging) const;
  void finish(std::byte* memory, std::byte* staging) const;

 private:
  bool compressed() const;
  int64_t num_sent() const { return part_.count - own_.count; }
  int64_t num_received() const { return (outer_->size() - 1) * own_.count; }
  /// Whether what is received has room in `memory` behind what is sent.
  bool fits() const { return num_sent() + num_received() <= 2 * part_.count; }
  Pending start_exchange(std::byte* memory, std::byte* staging) const;
  std::byte* received(std::byte* memory, std::byte* staging) const;

  CommunicatorPtr inner_;
  CommunicatorPtr outer_;
  GradientCompression compression_;
  std::vector<int64_t> inner_rows_;  ///< elements of each inner rank's part
  std::vector<int64_t> outer_rows_;  ///< elements of each outer rank's share of this rank's part
  IndexRange part_;                  ///< flat elements
  IndexRange own_;
};

}  // namespace tessera
