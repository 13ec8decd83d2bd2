#include "optim/replicas.h"

#include <algorithm>

#include "comm/rows.h"
#include "core/memory.h"

namespace tessera {
namespace {

int64_t elements_of_row(const Shape& shape) {
  return row_elements({.data = nullptr, .dtype = DType::kF32, .shape = shape});
}

/// The place where a row or a parameter begins that is nearest to flat element `target`.
int64_t nearest_row(const Bucket& bucket, std::span<const Shape> shapes, int64_t target) {
  const auto after = std::ranges::upper_bound(bucket.offsets, target);
  if (after == bucket.offsets.end()) return bucket.num_elements();
  const size_t k = after - bucket.offsets.begin() - 1;
  const int64_t row = elements_of_row(shapes[k]);
  const int64_t rows_before = std::min((target - bucket.offsets[k]) / row, shapes[k][0] - 1);
  const int64_t below = bucket.offsets[k] + rows_before * row;
  const int64_t above = rows_before + 1 == shapes[k][0] ? *after : below + row;
  return target - below <= above - target ? below : above;
}

}  // namespace

IndexRange Bucket::elements(int64_t first, int64_t count) const {
  const int64_t begin = bounds[first];
  return {begin, bounds[first + count] - begin};
}

Bucket make_bucket(std::span<const Shape> shapes, int64_t num_shares, int64_t alignment) {
  Bucket bucket = {.parameters = {0, std::ssize(shapes)}, .offsets = {0}, .bounds = {}};
  for (const Shape& shape : shapes)
    bucket.offsets.push_back(align_up(bucket.offsets.back() + shape.num_elements(), alignment));
  for (int64_t i = 0; i <= num_shares; ++i) {
    // The quotient and the remainder apart: the product of large counts would overflow.
    const int64_t n = bucket.num_elements();
    const int64_t target = n / num_shares * i + n % num_shares * i / num_shares;
    bucket.bounds.push_back(nearest_row(bucket, shapes, target));
  }
  return bucket;
}

std::vector<Bucket> make_buckets(std::span<const Shape> shapes, int64_t bucket_bytes,
                                 int64_t num_shares) {
  std::vector<Bucket> buckets;
  size_t end = shapes.size();
  while (end > 0) {
    size_t begin = end - 1;
    int64_t bytes = shapes[begin].num_elements() * dtype_size(DType::kF32);
    while (begin > 0) {
      bytes += shapes[begin - 1].num_elements() * dtype_size(DType::kF32);
      if (bytes > bucket_bytes) break;
      --begin;
    }
    buckets.push_back(make_bucket(shapes.subspan(begin, end - begin), num_shares));
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

}  // namespace tessera
