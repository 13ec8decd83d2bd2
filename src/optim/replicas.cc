#include "optim/replicas.h"

#include <algorithm>
#include <cmath>

#include "comm/rows.h"
#include "core/memory.h"
#include "ops/quantize/quantize_blocks.h"

namespace tessera {
namespace {

int64_t elements_of_row(const Shape& shape) {
  return row_elements({.data = nullptr, .dtype = DType::kF32, .shape = shape});
}

/// The matrix that a row is of, or the row alone where it may be cut off.
IndexRange find_piece(const CutTensor& tensor, int64_t row) {
  if (tensor.matrix_rows.empty()) {
    const int64_t begin = row / tensor.unit_rows * tensor.unit_rows;
    return {begin, std::min(tensor.unit_rows, tensor.shape[0] - begin)};
  }
  IndexRange piece;
  for (const int64_t rows : tensor.matrix_rows) {
    piece = {piece.end(), rows};
    if (row < piece.end()) break;
  }
  return piece;
}

/// The place where a bucket may be cut, or a parameter begins, that is nearest to flat element
/// `target`.
int64_t nearest_cut(const Bucket& bucket, std::span<const CutTensor> tensors, int64_t target) {
  const auto after = std::ranges::upper_bound(bucket.offsets, target);
  if (after == bucket.offsets.end()) return bucket.num_elements();
  const size_t k = after - bucket.offsets.begin() - 1;
  const int64_t row = elements_of_row(tensors[k].shape);
  const int64_t num_rows = tensors[k].shape[0];
  const int64_t rows_before = std::min((target - bucket.offsets[k]) / row, num_rows - 1);
  const IndexRange piece = find_piece(tensors[k], rows_before);
  const int64_t below = bucket.offsets[k] + piece.begin * row;
  const int64_t above = piece.end() == num_rows ? *after : bucket.offsets[k] + piece.end() * row;
  return target - below <= above - target ? below : above;
}

bool has_matrices(std::span<const CutTensor> tensors) {
  return std::ranges::any_of(tensors, [](const CutTensor& t) { return !t.matrix_rows.empty(); });
}

/// The flat elements at which shares would end if rows could be cut anywhere: N·i/num_shares.
std::vector<int64_t> even_targets(int64_t n, int64_t num_shares) {
  std::vector<int64_t> targets(num_shares + 1);
  // The quotient and the remainder apart: the product of large counts would overflow. What the
  // remainder adds is counted on from share to share, for a search cuts buckets by the million.
  const int64_t quotient = n / num_shares;
  const int64_t remainder = n % num_shares;
  int64_t rest = 0;
  for (int64_t i = 1; i <= num_shares; ++i) {
    rest += remainder;
    targets[i] = targets[i - 1] + quotient;
    if (rest >= num_shares) {
      rest -= num_shares;
      ++targets[i];
    }
  }
  return targets;
}

/// The same so that shares with these loads would end with equal ones, or as near as they can.
std::vector<int64_t> balancing_targets(int64_t n, const ShareLoads& loads) {
  double total = static_cast<double>(n);
  for (const int64_t load : loads) total += static_cast<double>(load);
  const double even = total / static_cast<double>(loads.size());
  std::vector<double> ends = {0};
  for (const int64_t load : loads)
    ends.push_back(ends.back() + std::max(even - static_cast<double>(load), 0.0));
  std::vector<int64_t> targets;
  for (const double end : ends) {
    const double target = ends.back() > 0 ? static_cast<double>(n) * (end / ends.back()) : 0.0;
    targets.push_back(std::min<int64_t>(n, std::llround(target)));
  }
  targets.back() = n;
  return targets;
}

}  // namespace

IndexRange Bucket::elements(int64_t first, int64_t count) const {
  const int64_t begin = bounds[first];
  return {begin, bounds[first + count] - begin};
}

CutTensor cut_tensor(const Parameter& parameter) {
  CutTensor tensor = {parameter.weight.shape, parameter.matrix_rows};
  // So that no block of a scale is cut.
  if (parameter.is_fp8()) tensor.unit_rows = QuantizeBlocks::kBlock;
  return tensor;
}

Bucket make_bucket(std::span<const CutTensor> tensors, int64_t num_shares, int64_t alignment,
                   ShareLoads& loads) {
  Bucket bucket = {.parameters = {0, std::ssize(tensors)}, .offsets = {0}, .bounds = {}};
  for (const CutTensor& tensor : tensors)
    bucket.offsets.push_back(
        align_up(bucket.offsets.back() + tensor.shape.num_elements(), alignment));
  loads.resize(num_shares);
  const bool whole_matrices = has_matrices(tensors);
  const auto targets = whole_matrices ? balancing_targets(bucket.num_elements(), loads)
                                      : even_targets(bucket.num_elements(), num_shares);
  bucket.bounds.reserve(targets.size());
  for (const int64_t target : targets)
    bucket.bounds.push_back(nearest_cut(bucket, tensors, target));
  for (int64_t i = 0; whole_matrices && i < num_shares; ++i) loads[i] += bucket.elements(i).count;
  return bucket;
}

std::vector<Bucket> make_buckets(std::span<const CutTensor> tensors, int64_t bucket_bytes,
                                 int64_t num_shares) {
  std::vector<Bucket> buckets;
  ShareLoads loads;
  size_t end = tensors.size();
  while (end > 0) {
    size_t begin = end - 1;
    int64_t bytes = tensors[begin].shape.num_elements() * dtype_size(DType::kF32);
    while (begin > 0 && tensors[begin - 1].part == tensors[begin].part) {
      bytes += tensors[begin - 1].shape.num_elements() * dtype_size(DType::kF32);
      if (bytes > bucket_bytes) break;
      --begin;
    }
    buckets.push_back(make_bucket(tensors.subspan(begin, end - begin), num_shares, 1, loads));
    buckets.back().parameters.begin = static_cast<int64_t>(begin);
    end = begin;
  }
  return buckets;
}

IndexRange share_rows(const Bucket& bucket, size_t k, const Shape& shape, int64_t share) {
  const int64_t row = elements_of_row(shape);
  if (row == 0) return {0, share == 0 ? shape[0] : 0};
  const IndexRange elements = bucket.elements(share);
  const int64_t begin = std::max(elements.begin, bucket.offsets[k]);
  const int64_t end = std::min(elements.end(), bucket.offsets[k] + shape.num_elements());
  if (begin >= end) return {0, 0};
  return {(begin - bucket.offsets[k]) / row, (end - begin) / row};
}

Tensor take_rows(const Tensor& tensor, IndexRange rows) {
  Tensor part = tensor;
  part.shape[0] = rows.count;
  if (tensor.data != nullptr) part.data = row_data(tensor, rows.begin);
  return part;
}

std::vector<int64_t> take_matrices(std::span<const int64_t> matrix_rows, IndexRange rows) {
  std::vector<int64_t> taken;
  IndexRange matrix;
  for (const int64_t count : matrix_rows) {
    matrix = {matrix.end(), count};
    if (matrix.begin >= rows.begin && matrix.end() <= rows.end() && count > 0)
      taken.push_back(count);
  }
  return taken;
}

IndexRange blocks_of(IndexRange rows) {
  constexpr int64_t kBlock = QuantizeBlocks::kBlock;
  ensure(rows.begin % kBlock == 0 && rows.count % kBlock == 0, "rows {} to {} cut blocks of scales",
         rows.begin, rows.end());
  return {rows.begin / kBlock, rows.count / kBlock};
}

Parameter take_rows(const Parameter& parameter, IndexRange rows) {
  Parameter part = parameter;
  part.weight = take_rows(parameter.weight, rows);
  part.grad = take_rows(parameter.grad, rows);
  part.matrix_rows = take_matrices(parameter.matrix_rows, rows);
  if (parameter.is_fp8()) part.scales = take_rows(parameter.scales, blocks_of(rows));
  return part;
}

}  // namespace tessera
