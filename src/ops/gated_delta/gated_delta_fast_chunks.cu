// What a chunk needs of its own keys, on tensor cores but for the inverse.
#include "ops/cuda/dependent_launch.cuh"
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

/// sums += row [kSize] times columns of `right`.
template <int kSize, int kColumns>
__device__ __forceinline__ void add_row_product(float (&sums)[kColumns], const float* row,
                                                const float* right) {
#pragma unroll 4
  for (int k = 0; k < kSize; ++k) {
    const float factor = row[k];
#pragma unroll
    for (int c = 0; c < kColumns; c += 4) {
      const float4 four = *reinterpret_cast<const float4*>(right + k * kMatrixStride + c);
      sums[c] += factor * four.x;
      sums[c + 1] += factor * four.y;
      sums[c + 2] += factor * four.z;
      sums[c + 3] += factor * four.w;
    }
  }
}

/// From inverses of neighbouring blocks of kSize on the diagonal those of blocks twice as large: of
/// [[X, 0], [Y, Z]] that is [[X', 0], [-Z' Y X', Z']]. Ends with a barrier, as it begins.
template <int kSize>
__device__ __forceinline__ void join_blocks(float* a) {
  constexpr int kOwners = kThreads * kSize * 2 / kDeltaRows;  // threads of a pair of blocks
  constexpr int kColumns = kSize * kSize / kOwners;
  const int pair = static_cast<int>(threadIdx.x) / kOwners;
  const int own = static_cast<int>(threadIdx.x) % kOwners;
  const int row = own / (kSize / kColumns);
  const int column = own % (kSize / kColumns) * kColumns;
  float* upper = a + pair * 2 * kSize * (kMatrixStride + 1);
  float* lower = upper + kSize * kMatrixStride;
  float* to = lower + row * kMatrixStride + column;
  float product[kColumns] = {};
  __syncthreads();
  add_row_product<kSize>(product, lower + row * kMatrixStride, upper + column);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) to[c] = -product[c];
  __syncthreads();
  float result[kColumns] = {};
  add_row_product<kSize>(result, lower + row * kMatrixStride + kSize, lower + column);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) to[c] = result[c];
  __syncthreads();
}

/// (I + A)^-1, rounded; A's place has it before.
__device__ __forceinline__ void invert(BFloat16* inverse, float* a) {
  invert_blocks(a);
  join_blocks<kBlock>(a);
  join_blocks<2 * kBlock>(a);
  for (int i = 2 * static_cast<int>(threadIdx.x); i < kDeltaSquare; i += 2 * kThreads) {
    const int row = i / kDeltaRows;
    const int column = i % kDeltaRows;
    const float2 two = *reinterpret_cast<const float2*>(a + row * kMatrixStride + column);
    store_pair(inverse + row * kSquareStride + column, two.x, two.y);
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

/// The first 64 threads sum decays and measure queries, the others measure keys.
template <int kKeySize>
__device__ __forceinline__ void make_factors(DeltaCoefficients& c, const FastPlace& at,
                                             const BFloat16* q, const BFloat16* k) {
  constexpr int kStride = kKeySize + kFastPadding;
  const int rows = at.count();
  const int i = static_cast<int>(threadIdx.x) % kDeltaRows;
  const bool is_first_half = threadIdx.x < kDeltaRows;
  float sum = 0;
  if (is_first_half) {
    const float inverse = inverse_length<kKeySize>(q + i * kStride);
    c.q_inverse[i] = i < rows ? inverse * DeltaCoefficients::query_scale(kKeySize) : 0;
    const int start = c.starts[i];
#pragma unroll 16
    for (int j = 0; j < kDeltaRows; ++j)
      if (j <= i && c.starts[j] == start) sum += c.sums[j];
  } else {
    const float inverse = inverse_length<kKeySize>(k + i * kStride);
    c.k_inverse[i] = i < rows ? inverse : 0;
  }
  __syncthreads();
  if (is_first_half) c.sums[i] = sum;
  __syncthreads();
  c.derive(static_cast<int>(threadIdx.x), at.chunk * kDeltaRows, rows);
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
  // From products of q and k to P, from those of k to A.
  combine_parts(of_q, tile, [&](int r, int part, float2 of_p, float2 of_a) {
    const int i = row + tile.row_of(r);
    const int j = tile.column_of(part);
    const float2 between = {c.between_fast(i, j), c.between_fast(i, j + 1)};
    const float2 factor = {c.k_inverse[j] * between.x, c.k_inverse[j + 1] * between.y};
    const float query = c.q_inverse[i];
    store_pair(shared.p + i * kSquareStride + j, of_p.x * query * factor.x,
               of_p.y * query * factor.y);
    const float key = c.beta[i] * c.k_inverse[i];
    *reinterpret_cast<float2*>(shared.a + i * kMatrixStride + j) = {
        i == j ? 0 : of_a.x * key * factor.x, i == j + 1 ? 0 : of_a.y * key * factor.y};
  });
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
