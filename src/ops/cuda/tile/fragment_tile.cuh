#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ops/cuda/ptx/fragment_product.cuh"

/// Products of BF16 with sums in F32 on the tensor cores, by tiles, from the warps' registers
/// (mma.sync): for products of many small or oddly placed parts, where exact_product.cuh is too
/// slow and TMA's maps do not reach.
namespace tessera::cuda {

constexpr int kFragmentTileRows = 64;

/// An operand that is the sum of BF16 terms (mostly one), each [rows, reduction] or, where its rows
/// are contiguous, [reduction, rows]. The contiguous dim, its parts that are multiplied and all
/// addresses are multiples of 8 values. Rows beyond `rows` read as zero.
struct FragmentOperand {
  const __nv_bfloat16* data;
  int64_t rows;
  int64_t stride;     ///< of the dim that is not contiguous
  int64_t plane = 0;  ///< between terms
};

/// Whether an operand that the host describes is as FragmentOperand says.
inline bool is_whole(const FragmentOperand& operand) {
  return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && operand.stride % 8 == 0 &&
         operand.plane % 8 == 0;
}

/// How the warps of a block share a tile of kFragmentTileRows by kColumns, and how deep its stages
/// are: the fewer the columns, the more of the rows must be under way.
template <int kColumns>
struct FragmentPlan;
template <>
struct FragmentPlan<128> {
  static constexpr int kWarpRows = 2, kWarpColumns = 4, kDepth = 32;
};
template <>
struct FragmentPlan<64> {
  static constexpr int kWarpRows = 4, kWarpColumns = 2, kDepth = 64;
};
template <>
struct FragmentPlan<16> {
  static constexpr int kWarpRows = 4, kWarpColumns = 1, kDepth = 128;
};

/// A part of an operand in shared memory, its lines padded so that they begin in different banks.
template <int kTerms, bool kReductionContiguous, int kRows, int kDepth, int kThreads>
struct FragmentStage {
  static constexpr int kLength = kReductionContiguous ? kDepth : kRows;
  static constexpr int kLines = kReductionContiguous ? kRows : kDepth;
  static constexpr int kStride = kLength + 8;
  static constexpr int kPlane = kLines * kStride;
  static constexpr int kVectors = kLines * kLength / 8;

  __nv_bfloat16 values[kTerms * kPlane];

  __device__ __forceinline__ void load(const FragmentOperand& from, int64_t row, int64_t step,
                                       int64_t last) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      for (int i = threadIdx.x; i < kVectors; i += kThreads) {
        const int line = i / (kLength / 8);
        const int at = i % (kLength / 8) * 8;
        const int64_t r = row + (kReductionContiguous ? line : at);
        const int64_t k = step + (kReductionContiguous ? at : line);
        const bool there = r < from.rows && k < last;
        const int64_t offset = kReductionContiguous ? r * from.stride + k : k * from.stride + r;
        copy_vector(values + term * kPlane + line * kStride + at,
                    from.data + (there ? term * from.plane + offset : 0), there);
      }
    }
  }
  __device__ __forceinline__ const __nv_bfloat16* at(int term, int row, int k) const {
    return values + term * kPlane + (kReductionContiguous ? row * kStride + k : k * kStride + row);
  }

 private:
  static __device__ __forceinline__ void copy_vector(void* to, const void* from, bool there) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
  }
};

/// A tile of a product, its sums spread over the block's kThreads threads, which all take part in
/// every call. kColumns is 16, 64 or 128. Of terms i of a and j of b only i + j below the larger
/// number of terms are multiplied: the others are below what is kept.
template <int kTermsA, bool kAReduction, int kTermsB, bool kBReduction, int kColumns>
class FragmentTile {
  using Plan = FragmentPlan<kColumns>;
  using Value = __nv_bfloat16;

 public:
  static constexpr int kThreads = Plan::kWarpRows * Plan::kWarpColumns * 32;
  static constexpr int kResultStride = kColumns + 4;

 private:
  static constexpr int kStages = 3;
  static constexpr int kDepth = Plan::kDepth;
  static constexpr int kFragmentRows = kFragmentTileRows / Plan::kWarpRows / 16;
  static constexpr int kFragmentColumns = kColumns / Plan::kWarpColumns / 16;
  static constexpr int kTerms = kTermsA > kTermsB ? kTermsA : kTermsB;
  using StageA = FragmentStage<kTermsA, kAReduction, kFragmentTileRows, kDepth, kThreads>;
  using StageB = FragmentStage<kTermsB, kBReduction, kColumns, kDepth, kThreads>;
  struct Stage {
    alignas(128) StageA a;
    alignas(128) StageB b;
  };

 public:
  union Shared {
    Stage stages[kStages];
    float result[kFragmentTileRows * kResultStride];
  };

  /// Adds a's rows from `row` on times b's from `column` on, over [first, last) of the reduction.
  __device__ __forceinline__ void add(Shared& shared, const FragmentOperand& a, int64_t row,
                                      const FragmentOperand& b, int64_t column, int64_t first,
                                      int64_t last) {
    const auto load = [&](int64_t step, int stage) {
      if (step < last) {
        shared.stages[stage].a.load(a, row, step, last);
        shared.stages[stage].b.load(b, column, step, last);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) load(first + stage * kDepth, stage);
    int stage = 0;
    for (int64_t step = first; step < last; step += kDepth) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();
      load(step + (kStages - 1) * kDepth, (stage + kStages - 1) % kStages);
      multiply(shared.stages[stage]);
      stage = (stage + 1) % kStages;
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
  }

  /// Leaves the sums in shared memory, row i at [i * kResultStride].
  __device__ __forceinline__ const float* finish(Shared& shared) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kFragmentRows; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kFragmentColumns; ++j) {
        float* to = shared.result + (warp_row() + i * 16 + lane / 4) * kResultStride +
                    warp_column() + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = {sums_[i][j][0], sums_[i][j][1]};
        *reinterpret_cast<float2*>(to + 8 * kResultStride) = {sums_[i][j][2], sums_[i][j][3]};
      }
    }
    __syncthreads();
    return shared.result;
  }

 private:
  static __device__ __forceinline__ int warp_row() {
    return static_cast<int>(threadIdx.x / 32) / Plan::kWarpColumns * kFragmentRows * 16;
  }
  static __device__ __forceinline__ int warp_column() {
    return static_cast<int>(threadIdx.x / 32) % Plan::kWarpColumns * kFragmentColumns * 16;
  }

  /// 16 rows by 16 of the reduction: rows first, then the reduction's second half.
  static __device__ __forceinline__ void load_a(uint32_t (&to)[4], const Stage& stage, int term,
                                                int row, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int line = lane % 8;
    const int second_rows = lane / 8 % 2 * 8;
    const int second_half = lane / 16 * 8;
    load_fragment<!kAReduction>(
        to, kAReduction ? stage.a.at(term, row + second_rows + line, k + second_half)
                        : stage.a.at(term, row + second_rows, k + second_half + line));
  }

  /// 16 columns by 16 of the reduction: both halves of it, then the second columns.
  static __device__ __forceinline__ void load_b(uint32_t (&to)[4], const Stage& stage, int term,
                                                int column, int k) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int line = lane % 8;
    const int second_half = lane / 8 % 2 * 8;
    const int second_columns = lane / 16 * 8;
    load_fragment<!kBReduction>(
        to, kBReduction ? stage.b.at(term, column + second_columns + line, k + second_half)
                        : stage.b.at(term, column + second_columns, k + second_half + line));
  }

  __device__ __forceinline__ void multiply(const Stage& stage) {
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[kTermsA][kFragmentRows][4];
#pragma unroll
      for (int term = 0; term < kTermsA; ++term) {
#pragma unroll
        for (int i = 0; i < kFragmentRows; ++i)
          load_a(a[term][i], stage, term, warp_row() + i * 16, k);
      }
#pragma unroll
      for (int j = 0; j < kFragmentColumns; ++j) {
#pragma unroll
        for (int term = 0; term < kTermsB; ++term) {
          uint32_t b[4];
          load_b(b, stage, term, warp_column() + j * 16, k);
#pragma unroll
          for (int of_a = 0; of_a < kTermsA && of_a + term < kTerms; ++of_a) {
#pragma unroll
            for (int i = 0; i < kFragmentRows; ++i) {
              fragment_product(sums_[i][2 * j], a[of_a][i], b[0], b[1]);
              fragment_product(sums_[i][2 * j + 1], a[of_a][i], b[2], b[3]);
            }
          }
        }
      }
    }
  }

  float sums_[kFragmentRows][2 * kFragmentColumns][4] = {};
};

/// Four neighbouring values.
__device__ __forceinline__ void store_four(float* to, const float4& from) {
  *reinterpret_cast<float4*>(to) = from;
}
__device__ __forceinline__ void store_four(__nv_bfloat16* to, const float4& from) {
  const __nv_bfloat162 halves[2] = {__floats2bfloat162_rn(from.x, from.y),
                                    __floats2bfloat162_rn(from.z, from.w)};
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(halves);
}

}  // namespace tessera::cuda
