// What a chunk needs of its own keys, on tensor cores but for the inverse.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/tile/row_quads.cuh"
#include "ops/gated_delta/delta_squares.cuh"

namespace tessera::cuda {
namespace {

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
  if (threadIdx.x >= kSquareThreads - 32) {
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
__global__ void __launch_bounds__(kSquareThreads, 5)
    make_chunks(const __grid_constant__ DeltaOperands x, FastDelta scratch) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<ChunkShared<kKeySize>*>(memory);
  DeltaCoefficients& c = shared.c;
  constexpr int kStride = kKeySize + kFastPadding;
  wait_for_earlier();
  const FastPlace at{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y)};
  const int count = at.count();
  copy_rows<kDeltaRows, kKeySize, kSquareThreads>(shared.q, bf16(x.q) + at.key_at(), x.key_stride(),
                                                  count);
  copy_rows<kDeltaRows, kKeySize, kSquareThreads>(shared.k, bf16(x.k) + at.key_at(), x.key_stride(),
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
  for (int i = static_cast<int>(threadIdx.x); i < kFactorWords; i += kSquareThreads)
    reinterpret_cast<int*>(scratch.factors + at.task())[i] = reinterpret_cast<const int*>(&c)[i];
  __syncthreads();
  write_inverses(scratch, at, shared.inverse, shared.p);
}

template <int kKeySize>
void launch(const DeltaOperands& x, const FastDelta& scratch, cudaStream_t stream) {
  constexpr int kBytes = sizeof(ChunkShared<kKeySize>);
  check(cudaFuncSetAttribute(make_chunks<kKeySize>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kBytes));
  const dim3 blocks(static_cast<unsigned>(num_delta_chunks(x.tokens)),
                    static_cast<unsigned>(x.heads));
  launch_early(make_chunks<kKeySize>, {blocks, kSquareThreads, kBytes}, stream, x, scratch);
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
