// What a chunk needs of its own keys, on tensor cores but for the inverse.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/tile/row_quads.cuh"
#include "ops/gated_delta/delta_fast.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;  // each warp has 16 rows of the chunk
constexpr int kMatrixStride = kDeltaRows + 4;
constexpr int kFactorWords = sizeof(DeltaFactors) / sizeof(int);

template <int kKeySize>
struct ChunkShared {
  static constexpr int kStride = kKeySize + kFastPadding;
  union {
    struct {
      BFloat16 q[kDeltaRows * kStride];
      BFloat16 k[kDeltaRows * kStride];
    };
    struct {  // when those were read
      BFloat16 inverse[kDeltaRows * kSquareStride];
      BFloat16 p[kDeltaRows * kSquareStride];
      float a[kDeltaRows * kMatrixStride];
    };
  };
  DeltaCoefficients c;
};

constexpr int kBlock = 16;

/// The inverse of I plus the block of A on the diagonal that is the warp's, in its place: each of
/// 16 lanes makes a column.
__device__ __forceinline__ void invert_blocks(float* a) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int j = static_cast<int>(threadIdx.x) % 32;
  float* block = a + warp * kBlock * (kMatrixStride + 1);
  float column[kBlock];
  if (j < kBlock) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float value = i == j ? 1 : 0;
#pragma unroll
      for (int m = 0; m < i; ++m) value -= block[i * kMatrixStride + m] * column[m];
      column[i] = value;
    }
  }
  __syncwarp();
  if (j < kBlock) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) block[i * kMatrixStride + j] = column[i];
  }
}

/// An F32 value as the sum of two that tensor cores take.
struct SplitValue {
  uint32_t high;
  uint32_t low;

  __device__ __forceinline__ explicit SplitValue(float x) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(x - __uint_as_float(high)));
  }
};

__device__ __forceinline__ void multiply_tf32(float (&sums)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// A warp's 16 by 8 sums of left times right over kDepth, nearly as exact as F32's.
template <int kDepth>
__device__ __forceinline__ void multiply_exactly(float (&sums)[4], const float* left,
                                                 const float* right) {
  const int line = static_cast<int>(threadIdx.x) % 32 / 4;
  const int step = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int k = 0; k < kDepth; k += 8) {
    uint32_t high_a[4];
    uint32_t low_a[4];
    uint32_t high_b[2];
    uint32_t low_b[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SplitValue x(left[(line + i % 2 * 8) * kMatrixStride + k + step + i / 2 * 4]);
      high_a[i] = x.high;
      low_a[i] = x.low;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const SplitValue x(right[(k + step + i * 4) * kMatrixStride + line]);
      high_b[i] = x.high;
      low_b[i] = x.low;
    }
    multiply_tf32(sums, low_a, high_b);
    multiply_tf32(sums, high_a, low_b);
    multiply_tf32(sums, high_a, high_b);
  }
}

__device__ __forceinline__ void store_sums(float* to, const float (&sums)[4], float factor) {
  to += static_cast<int>(threadIdx.x) % 32 / 4 * kMatrixStride +
        static_cast<int>(threadIdx.x) % 4 * 2;
  *reinterpret_cast<float2*>(to) = {factor * sums[0], factor * sums[1]};
  *reinterpret_cast<float2*>(to + 8 * kMatrixStride) = {factor * sums[2], factor * sums[3]};
}

/// From inverses of neighbouring blocks of kSize on the diagonal those of blocks twice as large: of
/// [[X, 0], [Y, Z]] that is [[X', 0], [-Z' Y X', Z']]. Ends with a barrier, as it begins.
template <int kSize>
__device__ __forceinline__ void join_blocks(float* a) {
  constexpr int kPairs = kDeltaRows / (2 * kSize);
  constexpr int kPairWarps = kThreads / 32 / kPairs;
  constexpr int kColumns = kSize * kSize / 16 / kPairWarps;  // of a warp, which has 16 rows
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int row = warp % kPairWarps * kColumns / kSize * 16;
  const int column = warp % kPairWarps * kColumns % kSize;
  float* upper = a + warp / kPairWarps * 2 * kSize * (kMatrixStride + 1);
  float* lower = upper + kSize * kMatrixStride;
  float* to = lower + row * kMatrixStride + column;
  float sums[kColumns / 8][4] = {};
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i)
    multiply_exactly<kSize>(sums[i], lower + row * kMatrixStride, upper + column + 8 * i);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    store_sums(to + 8 * i, sums[i], -1);
    sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i)
    multiply_exactly<kSize>(sums[i], lower + row * kMatrixStride + kSize, lower + column + 8 * i);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) store_sums(to + 8 * i, sums[i], 1);
  __syncthreads();
}

/// (I + A)^-1, rounded; A's place has it before.
__device__ __forceinline__ void invert(BFloat16* inverse, float* a) {
  invert_blocks(a);
  join_blocks<kBlock>(a);
  join_blocks<2 * kBlock>(a);
#pragma unroll
  for (int i = 4 * static_cast<int>(threadIdx.x); i < kDeltaSquare; i += 4 * kThreads) {
    const int row = i / kDeltaRows;
    const int column = i % kDeltaRows;
    const float4 four = *reinterpret_cast<const float4*>(a + row * kMatrixStride + column);
    *reinterpret_cast<uint2*>(inverse + row * kSquareStride + column) = {pack_pair(four.x, four.y),
                                                                         pack_pair(four.z, four.w)};
  }
}

/// A chunk's gates and where its sequences begin; the decays lie in `sums` at first.
__device__ __forceinline__ void load_gates(DeltaCoefficients& c, const FastPlace& at,
                                           const int32_t* starts) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= kDeltaRows) return;
  const bool there = i < at.count();
  const int64_t token = at.token() + (there ? i : 0);
  const int64_t gate = token * at.x.heads + at.head;
  c.sums[i] = there ? at.x.decay[gate] : 0;
  c.beta[i] = there ? at.x.beta[gate] : 0;
  c.starts[i] = there ? starts[token] : INT32_MAX;
}

template <int kKeySize>
__device__ __forceinline__ float inverse_length(const BFloat16* row) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kKeySize; i += 8) {
    const Floats<8> values = load<8>(row + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += values[j] * values[j];
  }
  return 1.0F / sqrtf(squares + kDeltaUnitEps);
}

/// The first 64 threads measure queries, the others keys; the last warp then sums decays.
template <int kKeySize>
__device__ __forceinline__ void make_factors(DeltaCoefficients& c, const FastPlace& at,
                                             const BFloat16* q, const BFloat16* k) {
  constexpr int kStride = kKeySize + kFastPadding;
  const int rows = at.count();
  const int i = static_cast<int>(threadIdx.x) % kDeltaRows;
  const bool of_queries = threadIdx.x < kDeltaRows;
  const float inverse = inverse_length<kKeySize>((of_queries ? q : k) + i * kStride);
  if (of_queries) {
    c.q_inverse[i] = i < rows ? inverse * DeltaCoefficients::query_scale(kKeySize) : 0;
  } else {
    c.k_inverse[i] = i < rows ? inverse : 0;
  }
  if (threadIdx.x >= kThreads - 32) {
    const int first = static_cast<int>(threadIdx.x) % 32 * 2;
    auto* sums = reinterpret_cast<float2*>(c.sums + first);
    *sums = sum_from_starts(*sums, *reinterpret_cast<const int2*>(c.starts + first));
  }
  __syncthreads();
  c.derive(static_cast<int>(threadIdx.x), at.chunk * kDeltaRows, rows);
}

/// From products of q and k to P, from those of k to A, for 16 rows from `first` on.
template <int kKeySize>
__device__ __forceinline__ void write_squares(ChunkShared<kKeySize>& shared,
                                              const DeltaCoefficients& c, int first,
                                              const WarpTile<16, kDeltaRows>& of_q,
                                              const WarpTile<16, kDeltaRows>& of_k) {
  const SquareRow rows[2] = {{c, first + of_q.row_of(0), false},
                             {c, first + of_q.row_of(1), false}};
#pragma unroll
  for (int part = 0; part < kDeltaRows / 8; ++part) {
    const int j = of_q.column_of(part);
    const SquareColumns columns(c, j);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const SquareRow& row = rows[r];
      const float2 factor = {row.factor(j, columns.starts.x, columns.sums.x, columns.keys.x),
                             row.factor(j + 1, columns.starts.y, columns.sums.y, columns.keys.y)};
      const float* of_p = of_q.sums[0][part] + 2 * r;
      store_pair(shared.p + row.idx * kSquareStride + j, of_p[0] * row.weight * factor.x,
                 of_p[1] * row.weight * factor.y);
      const float* of_a = of_k.sums[0][part] + 2 * r;
      const float key = c.beta[row.idx] * row.key;
      *reinterpret_cast<float2*>(shared.a + row.idx * kMatrixStride + j) = {
          row.idx == j ? 0 : of_a[0] * key * factor.x,
          row.idx == j + 1 ? 0 : of_a[1] * key * factor.y};
    }
  }
}

template <int kKeySize>
__global__ void __launch_bounds__(kThreads, 5)
    make_chunks(const __grid_constant__ DeltaOperands x, FastDelta scratch) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<ChunkShared<kKeySize>*>(memory);
  DeltaCoefficients& c = shared.c;
  constexpr int kStride = kKeySize + kFastPadding;
  wait_for_earlier();
  const FastPlace at{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)};
  const int count = at.count();
  copy_rows<kDeltaRows, kKeySize, kThreads>(shared.q, bf16(x.q) + at.key_at(), x.key_stride(),
                                            count);
  copy_rows<kDeltaRows, kKeySize, kThreads>(shared.k, bf16(x.k) + at.key_at(), x.key_stride(),
                                            count);
  commit_copies();
  load_gates(c, at, scratch.starts);
  wait_copies<0>();
  __syncthreads();
  make_factors<kKeySize>(c, at, shared.q, shared.k);
  __syncthreads();

  const int row = static_cast<int>(threadIdx.x) / 32 * 16;
  const SharedMatrix k{shared.k, kStride};
  WarpTile<16, kDeltaRows> of_q;
  of_q.add<true, true, kKeySize>({shared.q, kStride}, row, k, 0);
  WarpTile<16, kDeltaRows> tile;
  tile.add<true, true, kKeySize>(k, row, k, 0);
  __syncthreads();
  write_squares(shared, c, row, of_q, tile);
  __syncthreads();
  invert(shared.inverse, shared.a);
  for (int i = static_cast<int>(threadIdx.x); i < kFactorWords; i += kThreads)
    reinterpret_cast<int*>(scratch.factors + at.task())[i] = reinterpret_cast<const int*>(&c)[i];
  __syncthreads();
  write_rows<kDeltaRows, kDeltaRows, kThreads>(bf16(scratch.inverse) + at.square_at(), kDeltaRows,
                                               shared.inverse);
  tile.clear();
  tile.add<true, false, kDeltaRows>({shared.p, kSquareStride}, row, {shared.inverse, kSquareStride},
                                    0);
  BFloat16* to = bf16(scratch.p_inverse) + at.square_at();
  tile.for_each_pair([&](int i, int j, float& first, float& second) {
    store_pair(to + (row + i) * kDeltaRows + j, first, second);
  });
}

template <int kKeySize>
void launch(const DeltaOperands& x, const FastDelta& scratch, cudaStream_t stream) {
  constexpr int kBytes = sizeof(ChunkShared<kKeySize>);
  check(cudaFuncSetAttribute(make_chunks<kKeySize>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kBytes));
  const dim3 blocks(static_cast<unsigned>(num_delta_chunks(x.tokens)),
                    static_cast<unsigned>(x.heads));
  launch_early(make_chunks<kKeySize>, {blocks, kThreads, kBytes}, stream, x, scratch);
}

}  // namespace

bool takes_fast_delta(DType dtype, int64_t key_size, int64_t value_size) {
  const auto fits = [](int64_t size) { return size == 64 || size == 128; };
  return dtype == DType::kBF16 && fits(key_size) && fits(value_size);
}

void launch_fast_delta_chunks(const DeltaOperands& x, const FastDelta& scratch,
                              cudaStream_t stream) {
  launch_delta_starts(x, scratch.starts, stream);
  x.key_size == 64 ? launch<64>(x, scratch, stream) : launch<128>(x, scratch, stream);
}

}  // namespace tessera::cuda
