#include "optim/exchange/bucket_reduction.h"

#include <algorithm>

#include "core/memory.h"

namespace tessera {
namespace {

constexpr int64_t kF32Bytes = sizeof(float);
constexpr int64_t kBf16Bytes = sizeof(Bf16);

}  // namespace

int64_t travelling_bytes(int64_t gradient_bytes, DType dtype, GradientCompression compression) {
  if (compression == GradientCompression::kNone) return gradient_bytes;
  return gradient_bytes / dtype_size(dtype) * dtype_size(DType::kBF16);
}

BucketReduction::BucketReduction(const ReplicaGroup& group, const Bucket& bucket,
                                 GradientCompression compression, const GradientMath& math,
                                 int64_t piece_bytes, DType dtype)
    : inner_(group.inner),
      outer_(group.outer),
      compression_(compression),
      dtype_(dtype),
      math_(math) {
  ensure(dtype == DType::kF32 || group.inner_size() == 1, "{} gradients of an inner group",
         dtype_name(dtype));
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
  if (!sends_bf16()) return;
  const bool only_pieces = dtype_ != DType::kF32 || !math_.is_host();
  if (piece_bytes > 0 || only_pieces) cut(piece_bytes);
  goes_in_pieces_ = num_pieces_ > 1 || only_pieces;
}

void BucketReduction::cut(int64_t piece_bytes) {
  const int64_t largest = std::ranges::max(outer_rows_);
  const int64_t wanted =
      piece_bytes > 0 ? piece_bytes / kBf16Bytes / (outer_->size() - 1) : largest;
  piece_rows_ = std::max<int64_t>(wanted, 1);
  num_pieces_ = std::max<int64_t>((largest + piece_rows_ - 1) / piece_rows_, 1);
}

IndexRange BucketReduction::piece_of(IndexRange share, int64_t piece) const {
  const int64_t skip = std::min(share.count, piece * piece_rows_);
  return {share.begin + skip, std::min(piece_rows_, share.count - skip)};
}

int64_t BucketReduction::piece_bytes() const {
  return align_up((outer_->size() - 1) * piece_rows_ * kBf16Bytes);
}

bool BucketReduction::sends_bf16() const {
  const bool in_bf16 = compression_ == GradientCompression::kBf16 || dtype_ == DType::kBF16;
  return in_bf16 && outer_->size() > 1;
}

int64_t BucketReduction::staging_bytes() const {
  if (!sends_bf16()) return 0;
  if (goes_in_pieces_) return 2 * piece_bytes();
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
  if (goes_in_pieces_) return start_piece(memory, staging, piece);
  if (sends_bf16()) return start_exchange(memory, staging);
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
  math_.copy(elements(part, DType::kF32, {before, own_.count}),
             elements(staging, DType::kF32, {0, own_.count}));
  math_.round(elements(part, DType::kF32, {0, before}), elements(part, DType::kBF16, {0, before}));
  math_.round(elements(part, DType::kF32, {before + own_.count, after}),
              elements(part, DType::kBF16, {before, after}));
  const size_t own = outer_->rank();
  std::vector<int64_t> send = outer_rows_;
  std::vector<int64_t> receive(outer_rows_.size(), own_.count);
  send[own] = receive[own] = 0;
  return outer_->all_to_all_v(
      elements(part, DType::kBF16, {0, num_sent()}),
      elements(received(memory, staging), DType::kBF16, {0, num_received()}), send, receive);
}

Pending BucketReduction::start_piece(std::byte* memory, std::byte* staging, int64_t piece) const {
  const size_t own = outer_->rank();
  std::vector<int64_t> send(shares_.size(), 0);
  std::vector<int64_t> receive(shares_.size(), piece_of(own_, piece).count);
  receive[own] = 0;
  int64_t num_sent = 0;
  for (size_t i = 0; i < shares_.size(); ++i) {
    if (i == own) continue;
    const IndexRange range = piece_of(shares_[i], piece);
    const Tensor from = elements(memory, dtype_, range);
    const Tensor to = elements(staging, DType::kBF16, {num_sent, range.count});
    dtype_ == DType::kBF16 ? math_.copy(from, to) : math_.round(from, to);
    send[i] = range.count;
    num_sent += range.count;
  }
  const int64_t num_received = (outer_->size() - 1) * receive[own == 0 ? 1 : 0];
  return outer_->all_to_all_v(elements(staging, DType::kBF16, {0, num_sent}),
                              elements(staging + piece_bytes(), DType::kBF16, {0, num_received}),
                              send, receive);
}

void BucketReduction::sum_up(std::byte* received, const Tensor& own) const {
  math_.sum_parts(elements(received, DType::kBF16, {0, (outer_->size() - 1) * own.num_elements()}),
                  outer_->size(), outer_->rank(), own);
}

void BucketReduction::finish(std::byte* memory, std::byte* staging, int64_t piece) const {
  if (!sends_bf16()) return;
  if (goes_in_pieces_)
    return sum_up(staging + piece_bytes(), elements(memory, dtype_, piece_of(own_, piece)));
  const Tensor sum = elements(staging, DType::kF32, {0, own_.count});
  sum_up(received(memory, staging), sum);
  math_.copy(sum, elements(memory, DType::kF32, own_));
}

}  // namespace tessera
