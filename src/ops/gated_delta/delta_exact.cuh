#pragma once

#include "ops/cuda/tile/exact_product.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/gated_delta/delta_coefficients.cuh"

namespace tessera::cuda {

template <typename T>
using AlongRows = ExactOperand<T, true>;  // [rows, reduction]
template <typename T>
using AcrossRows = ExactOperand<T, false>;  // [reduction, rows]
template <typename A, typename B>
using DeltaTile = ExactTile<A, B, kDeltaRows>;

constexpr int kDeltaColumns = 64;  // of values that a block takes

/// Where a chunk's rows of a head and its squares lie.
template <typename T>
struct DeltaPlace {
  const DeltaOperands& x;
  int chunk;
  int head;

  __device__ int64_t token() const { return static_cast<int64_t>(chunk) * kDeltaRows; }
  __device__ const T* q() const {
    return static_cast<const T*>(x.q) + x.key_at(token(), x.key_head(head));
  }
  __device__ const T* k() const {
    return static_cast<const T*>(x.k) + x.key_at(token(), x.key_head(head));
  }
  __device__ const T* v() const { return static_cast<const T*>(x.v) + value_at(); }
  __device__ int64_t value_at() const { return x.value_at(token(), head); }
  __device__ int64_t square_at() const {
    return (static_cast<int64_t>(chunk) * x.heads + head) * kDeltaSquare;
  }
  __device__ int64_t state_size() const { return static_cast<int64_t>(x.key_size) * x.value_size; }
  /// Of states [chunks, N, Dk, Dv].
  __device__ int64_t state_at(int of_chunk) const {
    return (static_cast<int64_t>(of_chunk) * x.heads + head) * state_size();
  }
};

}  // namespace tessera::cuda
