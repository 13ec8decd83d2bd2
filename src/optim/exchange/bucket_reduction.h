#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "optim/gradient_math.h"
#include "optim/replicas.h"

namespace tessera {

enum class GradientCompression : uint8_t {
  kNone,
  /// Summands are rounded once to BF16 and summed in F32: half the bytes (MegaScale-MoE, section
  /// 5). With an inner group its sums are made in F32, and they are the summands that are rounded.
  kBf16,
};

/// Bytes that gradients of so many have on their way between ranks.
int64_t travelling_bytes(int64_t gradient_bytes, DType dtype, GradientCompression compression);

/// How the gradients of one bucket are summed over the replicas, each rank being left with its
/// share: a reduce-scatter over the inner group leaves a part, one over the outer group this rank's
/// share of that.
///
/// `memory` has the bucket's gradients, F32 or BF16, in flat order. In the end the share's elements
/// hold the sum; what the others hold is of no use. Reduce-scatters work in place. With compression
/// on the host, BF16 summands take half of the memory and those of the other ranks arrive in the
/// rest (MegaScale-MoE, figure 11), so that only the sum needs staging, as much as one share.
///
/// Gradients in BF16 travel so as well, and their sum, made in F32, is rounded in the end. They are
/// not for an inner group, whose sums would be rounded on their way.
///
/// A large bucket can instead be exchanged in pieces, each a part of every share, through staging
/// that does not grow with the bucket. On a GPU, whose threads cannot round a range into itself,
/// that is the only way, as it is for BF16, and a bucket that is not cut is one piece. The sums are
/// the same to the bit.
class BucketReduction {
 public:
  /// `dtype` is that of the gradients. `piece_bytes`: where compression would send more than this
  /// at once, it goes in pieces of about this size; 0: never. The same on all ranks.
  BucketReduction(const ReplicaGroup& group, const Bucket& bucket, GradientCompression compression,
                  const GradientMath& math, int64_t piece_bytes = 0, DType dtype = DType::kF32);

  int64_t staging_bytes() const;
  /// The same on all ranks.
  int64_t num_pieces() const { return num_pieces_; }
  /// The three steps, each after the one before is complete, the last two for each piece; pieces
  /// may overlap where each has staging of its own. In a level of one rank the step is nothing.
  Pending start_inner(std::byte* memory) const;
  Pending start_outer(std::byte* memory, std::byte* staging, int64_t piece = 0) const;
  void finish(std::byte* memory, std::byte* staging, int64_t piece = 0) const;

 private:
  void cut(int64_t piece_bytes);
  /// The part of a share that belongs to a piece.
  IndexRange piece_of(IndexRange share, int64_t piece) const;
  /// Bytes of staging that what is sent of a piece has, and what is received.
  int64_t piece_bytes() const;
  Pending start_piece(std::byte* memory, std::byte* staging, int64_t piece) const;
  /// own += the other ranks' parts in their order, all rounded.
  void sum_up(std::byte* received, const Tensor& own) const;
  bool sends_bf16() const;
  Tensor elements(std::byte* memory, DType dtype, IndexRange range) const {
    return math_.elements(memory, dtype, range);
  }
  int64_t num_sent() const { return part_.count - own_.count; }
  int64_t num_received() const { return (outer_->size() - 1) * own_.count; }
  /// Whether what is received has room in `memory` behind what is sent.
  bool fits() const { return num_sent() + num_received() <= 2 * part_.count; }
  Pending start_exchange(std::byte* memory, std::byte* staging) const;
  std::byte* received(std::byte* memory, std::byte* staging) const;

  CommunicatorPtr inner_;
  CommunicatorPtr outer_;
  GradientCompression compression_;
  DType dtype_;
  GradientMath math_;
  std::vector<int64_t> inner_rows_;  ///< elements of each inner rank's part
  std::vector<int64_t> outer_rows_;  ///< elements of each outer rank's share of this rank's part
  std::vector<IndexRange> shares_;   ///< the same as flat elements
  IndexRange part_;                  ///< flat elements
  IndexRange own_;
  bool goes_in_pieces_ = false;
  int64_t num_pieces_ = 1;
  int64_t piece_rows_ = 0;  ///< elements of a share in a piece
};

}  // namespace tessera
