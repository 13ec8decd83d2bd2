#include "optim/bucket_reduction.h"

#include <algorithm>
#include <cstring>

#include "core/memory.h"
#include "optim/bf16_sum.h"

namespace tessera {
namespace {

constexpr int64_t kF32Bytes = sizeof(float);
constexpr int64_t kBf16Bytes = sizeof(Bf16);

Tensor elements(std::byte* memory, DType dtype, IndexRange range) {
  return {memory + range.begin * dtype_size(dtype), dtype, {range.count}};
}

}  // namespace

BucketReduction::BucketReduction(const ReplicaGroup& group, const Bucket& bucket,
                                 GradientCompression compression, int64_t piece_bytes)
    : inner_(group.inner), outer_(group.outer), compression_(compression) {
  const int64_t width = outer_->size();
  const int64_t first = group.rank() / width * width;
  for (int64_t i = 0; i < group.inner_size(); ++i)
    inner_rows_.push_back(bucket.elements(i * width, width).count);
  for (int64_t i = 0; i < width; ++i) {
    shares_.push_back(bucket.elements(first + i));
    outer_rows_.push_back(shares_.back().count);
  }
  part_ = bucket.elements(first, width);
  own_ = bucket.elements(group.rank());
  if (piece_bytes > 0 && compressed()) cut(piece_bytes);
}

void BucketReduction::cut(int64_t piece_bytes) {
  const int64_t largest = std::ranges::max(outer_rows_);
  piece_rows_ = std::max<int64_t>(piece_bytes / kBf16Bytes / (outer_->size() - 1), 1);
  num_pieces_ = std::max<int64_t>((largest + piece_rows_ - 1) / piece_rows_, 1);
}

IndexRange BucketReduction::piece_of(IndexRange share, int64_t piece) const {
  const int64_t skip = std::min(share.count, piece * piece_rows_);
  return {share.begin + skip, std::min(piece_rows_, share.count - skip)};
}

int64_t BucketReduction::piece_bytes() const {
  return align_up((outer_->size() - 1) * piece_rows_ * kBf16Bytes);
}

bool BucketReduction::compressed() const {
  return compression_ == GradientCompression::kBf16 && outer_->size() > 1;
}

int64_t BucketReduction::staging_bytes() const {
  if (!compressed()) return 0;
  if (num_pieces_ > 1) return 2 * piece_bytes();
  return align_up(own_.count * kF32Bytes) + (fits() ? 0 : align_up(num_received() * kBf16Bytes));
}

Pending BucketReduction::start_inner(std::byte* memory) const {
  if (!inner_ || inner_->size() == 1) return {};
  int64_t total = 0;
  for (const int64_t rows : inner_rows_) total += rows;
  return inner_->reduce_scatter_v(elements(memory, DType::kF32, {0, total}),
                                  elements(memory, DType::kF32, part_), inner_rows_);
}

Pending BucketReduction::start_outer(std::byte* memory, std::byte* staging, int64_t piece) const {
  if (outer_->size() == 1) return {};
  if (num_pieces_ > 1) return start_piece(memory, staging, piece);
  if (compressed()) return start_exchange(memory, staging);
  return outer_->reduce_scatter_v(elements(memory, DType::kF32, part_),
                                  elements(memory, DType::kF32, own_), outer_rows_);
}

std::byte* BucketReduction::received(std::byte* memory, std::byte* staging) const {
  if (!fits()) return staging + align_up(own_.count * kF32Bytes);
  return memory + part_.begin * kF32Bytes + num_sent() * kBf16Bytes;
}

Pending BucketReduction::start_exchange(std::byte* memory, std::byte* staging) const {
  std::byte* const part = memory + part_.begin * kF32Bytes;
  const int64_t before = own_.begin - part_.begin;
  const int64_t after = num_sent() - before;
  round_as_bf16(part + before * kF32Bytes,
                {reinterpret_cast<float*>(staging), static_cast<size_t>(own_.count)});
  round_to_bf16(part, before, part);
  round_to_bf16(part + (before + own_.count) * kF32Bytes, after, part + before * kBf16Bytes);
  const auto own = static_cast<size_t>(outer_->rank());
  std::vector<int64_t> send = outer_rows_;
  std::vector<int64_t> receive(outer_rows_.size(), own_.count);
  send[own] = receive[own] = 0;
  return outer_->all_to_all_v(
      elements(part, DType::kBF16, {0, num_sent()}),
      elements(received(memory, staging), DType::kBF16, {0, num_received()}), send, receive);
}

Pending BucketReduction::start_piece(std::byte* memory, std::byte* staging, int64_t piece) const {
  const auto own = static_cast<size_t>(outer_->rank());
  std::vector<int64_t> send(shares_.size(), 0);
  std::vector<int64_t> receive(shares_.size(), piece_of(own_, piece).count);
  receive[own] = 0;
  int64_t num_sent = 0;
  for (size_t i = 0; i < shares_.size(); ++i) {
    if (i == own) continue;
    const IndexRange range = piece_of(shares_[i], piece);
    round_to_bf16(memory + range.begin * kF32Bytes, range.count, staging + num_sent * kBf16Bytes);
    send[i] = range.count;
    num_sent += range.count;
  }
  const int64_t num_received = (outer_->size() - 1) * receive[own == 0 ? 1 : 0];
  return outer_->all_to_all_v(elements(staging, DType::kBF16, {0, num_sent}),
                              elements(staging + piece_bytes(), DType::kBF16, {0, num_received}),
                              send, receive);
}

void BucketReduction::finish_piece(std::byte* memory, std::byte* staging, int64_t piece) const {
  const IndexRange range = piece_of(own_, piece);
  std::byte* const own = memory + range.begin * kF32Bytes;
  const std::span<float> sum(reinterpret_cast<float*>(own), static_cast<size_t>(range.count));
  round_as_bf16(own, sum);
  sum_bf16_parts(staging + piece_bytes(), outer_->size(), outer_->rank(), sum);
}

void BucketReduction::finish(std::byte* memory, std::byte* staging, int64_t piece) const {
  if (!compressed()) return;
  if (num_pieces_ > 1) return finish_piece(memory, staging, piece);
  sum_bf16_parts(received(memory, staging), outer_->size(), outer_->rank(),
                 {reinterpret_cast<float*>(staging), static_cast<size_t>(own_.count)});
  if (own_.count > 0)
    std::memcpy(memory + own_.begin * kF32Bytes, staging,
                static_cast<size_t>(own_.count * kF32Bytes));
}

}  // namespace tessera
