#pragma once

#include <cstdint>

/// F32 accumulators of the tensor cores (WarpgroupProduct) to a matrix in global memory, written or
/// added to as whole lines of the cache: half as many requests as the accumulators' order would
/// make. From registers, so that what follows begins at once.
namespace tessera::cuda::lines {

constexpr int kLineColumns = 32;  // of a line of the cache, which 8 lanes hold
constexpr int kOwnLines = 4;      // of 32 columns of 64 rows, in which a thread holds four columns

/// Where a thread's values of 64 rows go: the first one, and how many columns there are from it on
/// in each of its lines, none beyond the matrix.
struct Place {
  float* to;
  int64_t stride;
  int num_columns[kOwnLines];
};

/// A thread's lines follow one another by pairs of rows, the second pair 8 rows after the first.
__device__ __forceinline__ int row_of_line(int line) {
  return line / 2 * 8 + line % 2;
}

/// The 64 rows begin at `first`; num_rows and num_columns of the matrix are left from there on.
__device__ __forceinline__ Place find_place(float* first, int64_t stride, int num_rows,
                                            int num_columns) {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 8 * 2;
  const int column = lane % 8 / 4 * 16 + lane % 2 * 8 + lane % 4 / 2 * 4;
  Place place{first + row * stride + column, stride, {}};
#pragma unroll
  for (int line = 0; line < kOwnLines; ++line)
    place.num_columns[line] = row + row_of_line(line) < num_rows ? num_columns - column : 0;
  return place;
}

__device__ __forceinline__ float4* address(const Place& place, int line, int column) {
  return reinterpret_cast<float4*>(place.to + column + row_of_line(line) * place.stride);
}

__device__ __forceinline__ float4 exchange(float4 value, int lanes) {
  return {__shfl_xor_sync(~0u, value.x, lanes), __shfl_xor_sync(~0u, value.y, lanes),
          __shfl_xor_sync(~0u, value.z, lanes), __shfl_xor_sync(~0u, value.w, lanes)};
}

/// Four columns of one of two blocks of 8, of each of which this thread has two: neighbouring lanes
/// exchange halves.
__device__ __forceinline__ float4 join(const float* a, const float* b) {
  const bool is_odd = threadIdx.x % 2 == 1;
  const float2 keep = is_odd ? make_float2(b[0], b[1]) : make_float2(a[0], a[1]);
  const float2 give = is_odd ? make_float2(a[0], a[1]) : make_float2(b[0], b[1]);
  const float2 got = {__shfl_xor_sync(~0u, give.x, 1), __shfl_xor_sync(~0u, give.y, 1)};
  return is_odd ? make_float4(got.x, got.y, keep.x, keep.y)
                : make_float4(keep.x, keep.y, got.x, got.y);
}

/// A group of 32 columns from accumulators' order (see WarpgroupProduct) to lines: lanes of two
/// neighbouring rows exchange halves, so that 8 lanes have all of one.
__device__ __forceinline__ void make_lines(const float* d, float4 (&lines)[kOwnLines]) {
  const bool is_second = threadIdx.x / 4 % 2 == 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 left = join(d + 2 * half, d + 4 + 2 * half);
    const float4 right = join(d + 8 + 2 * half, d + 12 + 2 * half);
    const float4 got = exchange(is_second ? left : right, 4);
    lines[2 * half] = is_second ? got : left;
    lines[2 * half + 1] = is_second ? right : got;
  }
}

/// What a group is added to; from the L2 cache, as no line is read twice.
__device__ __forceinline__ void load(const Place& place, int group, float4 (&lines)[kOwnLines]) {
  const int column = group * kLineColumns;
#pragma unroll
  for (int line = 0; line < kOwnLines; ++line) {
    if (column < place.num_columns[line]) lines[line] = __ldcg(address(place, line, column));
  }
}

/// What a tile's first groups are added to, to be read while its last products run.
template <int kGroups>
using Before = float4[kGroups][kOwnLines];

template <int kGroups>
__device__ __forceinline__ void load_first(const Place& place,
                                           float4 (&before)[kGroups][kOwnLines]) {
#pragma unroll
  for (int i = 0; i < kGroups; ++i) load(place, i, before[i]);
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

/// Adds in the L2 cache. Unlike float4's sum it takes subnormal values for zero.
__device__ __forceinline__ void add_there(float4* to, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

/// Calls finish(group, lines) for 32 columns after the other, and write(place, four values) for
/// each thread's values of them.
template <int kColumns, typename Finish, typename Write>
__device__ __forceinline__ void store(const Place& place, const float (&d)[kColumns / 2],
                                      const Finish& finish, const Write& write) {
#pragma unroll
  for (int i = 0; i < kColumns / kLineColumns; ++i) {
    float4 lines[kOwnLines];
    make_lines(d + i * 16, lines);
    finish(i, lines);
#pragma unroll
    for (int line = 0; line < kOwnLines; ++line) {
      const int column = i * kLineColumns;
      if (column < place.num_columns[line]) write(address(place, line, column), lines[line]);
    }
  }
}

/// Adds to what load_first has read, and to the rest.
template <int kColumns, int kGroups>
__device__ __forceinline__ void add_and_store(const Place& place, const float (&d)[kColumns / 2],
                                              float4 (&before)[kGroups][kOwnLines]) {
  const auto add_before = [&](int i, float4(&lines)[kOwnLines]) __attribute__((always_inline)) {
#pragma unroll
    for (int line = 0; line < kOwnLines; ++line)
      lines[line] = add(lines[line], before[i % kGroups][line]);
    if (i + kGroups < kColumns / kLineColumns) load(place, i + kGroups, before[i % kGroups]);
  };
  store<kColumns>(place, d, add_before, [](float4* to, float4 value) { *to = value; });
}

/// Writes, or adds in the L2 cache.
template <int kColumns, bool kAdd>
__device__ __forceinline__ void store_there(const Place& place, const float (&d)[kColumns / 2]) {
  store<kColumns>(
      place, d, [](int, float4(&)[kOwnLines]) {},
      [](float4* to, float4 value) { kAdd ? add_there(to, value) : void(*to = value); });
}

}  // namespace tessera::cuda::lines
