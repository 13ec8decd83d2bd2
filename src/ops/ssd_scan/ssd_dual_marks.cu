// Steps, decays and where sequences begin, by chunks; then the products of C and B of each group,
// which all its heads share.
#include "ops/cuda/parts.cuh"
#include "ops/ssd_scan/ssd_dual.cuh"
#include "ops/ssd_scan/ssd_steps.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kHeads = 32;  // of a block
constexpr int kOwn = kSsdRows / 32;

struct MarksShared {
  float logs[kHeads][kSsdRows + 1];
  float steps[kHeads][kSsdRows + 1];
  int starts[kSsdRows];
};

/// Sums over the tokens up to each of a lane's, from the last at which a sequence begins.
__device__ __forceinline__ void sum_within_sequences(float (&values)[kOwn],
                                                     const bool (&begins)[kOwn]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum = 0;
  bool any = false;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    sum = begins[i] ? values[i] : sum + values[i];
    any = any || begins[i];
    values[i] = sum;
  }
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(~0U, sum, step);
    const bool begun = __shfl_up_sync(~0U, static_cast<int>(any), step) != 0;
    if (lane >= step && !any) {
      sum += before;
      any = begun;
    }
  }
  const float before = __shfl_up_sync(~0U, sum, 1);
  bool begun = lane == 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    begun = begun || begins[i];
    if (!begun) values[i] += before;
  }
}

/// A warp writes a head's rows of a chunk.
__device__ __forceinline__ void mark_head(const MarksShared& shared, const SsdRows& x,
                                          const SsdDual& scratch, const SsdChunk& chunk, int h,
                                          int head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sums[kOwn];
  bool begins[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int row = kOwn * lane + i;
    sums[i] = shared.logs[h][row];
    begins[i] = shared.starts[row] == chunk.begin + row;
  }
  sum_within_sequences(sums, begins);
  const float last = __shfl_sync(~0U, sums[kOwn - 1], 31);
  const int last_start = shared.starts[chunk.count - 1];
  const int64_t at = chunk.rows_at(x, head) + kOwn * lane;
  Floats<kOwn> all[5];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int row = kOwn * lane + i;
    const bool there = row < chunk.count;
    const int start = shared.starts[row];
    const float end = there && start == last_start ? exp2f(last - sums[i]) : 0.0F;
    all[0][i] = shared.steps[h][row];
    all[1][i] = sums[i];
    all[2][i] = there && start < chunk.begin ? exp2f(sums[i]) : 0.0F;
    all[3][i] = end;
    all[4][i] = end * all[0][i];
  }
  store(scratch.steps + at, all[0]);
  store(scratch.sums + at, all[1]);
  store(scratch.reads + at, all[2]);
  store(scratch.ends + at, all[3]);
  store(scratch.writes + at, all[4]);
  if (lane == 0)
    scratch.kept[static_cast<int64_t>(chunk.idx) * x.heads + head] =
        last_start < chunk.begin ? exp2f(last) : 0.0F;
}

__global__ void __launch_bounds__(kThreads)
    mark_chunks(const __grid_constant__ SsdRows x, SsdDual scratch) {
  wait_for_earlier();
  __shared__ MarksShared shared;
  const SsdChunk chunk(x, static_cast<int>(blockIdx.x));
  const int first = static_cast<int>(blockIdx.y) * kHeads;
  for (int i = static_cast<int>(threadIdx.x); i < kSsdRows * kHeads; i += kThreads) {
    const int row = i / kHeads;
    const int h = i % kHeads;
    SsdStep step{};
    if (row < chunk.count && first + h < x.heads)
      step = step_of<BFloat16>(x, static_cast<int64_t>(chunk.begin + row) * x.heads + first + h);
    shared.logs[h][row] = step.log_decay * kLog2E;
    shared.steps[h][row] = step.size;
  }
  if (threadIdx.x < kSsdRows) {
    const int row = static_cast<int>(threadIdx.x);
    const int token = chunk.begin + row;
    const int start =
        row < chunk.count ? x.bounds[find_part(x.bounds, x.num_sequences, token)] : INT32_MAX;
    shared.starts[row] = start;
    if (blockIdx.y == 0) scratch.starts[token] = start;
  }
  __syncthreads();
  for (int h = static_cast<int>(threadIdx.x) / 32; h < kHeads; h += kWarps) {
    if (first + h < x.heads) mark_head(shared, x, scratch, chunk, h, first + h);
  }
}

template <int kRows>
struct ProductsShared {
  static constexpr int kStride = kRows + kSsdPadding;
  BFloat16 b[kSsdRows * kStride];
  BFloat16 c[kSsdRows * kStride];
  int starts[kSsdRows];
};

/// A warp writes a tile of products, masked, `turned` or not; `row` and `column` are of the first
/// token of each operand.
template <bool kTurned, int kRows>
__device__ __forceinline__ void write_products(const ProductsShared<kRows>& shared, int row,
                                               int column, float* to) {
  constexpr int kStride = ProductsShared<kRows>::kStride;
  const SharedMatrix b{shared.b, kStride};
  const SharedMatrix c{shared.c, kStride};
  WarpTile<kSsdTile, kSsdTile> tile;
  tile.template add<true, true, kRows>(kTurned ? b : c, row, kTurned ? c : b, column);
  const auto masked = [&](int i, int j, float value) {
    const bool is_later = kTurned ? column + j >= row + i : row + i >= column + j;
    return is_later && shared.starts[row + i] == shared.starts[column + j] ? value : 0.0F;
  };
  tile.for_each_pair([&](int i, int j, float& first, float& second) {
    first = masked(i, j, first);
    second = masked(i, j + 1, second);
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float(&own)[4] = tile.sums[0][half];
    *reinterpret_cast<float4*>(to + half * 128) = {own[0], own[1], own[2], own[3]};
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads)
    multiply_vectors(const __grid_constant__ SsdRows x, SsdDual scratch, float* turned) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<ProductsShared<kRows>*>(memory);
  wait_for_earlier();
  const SsdChunk chunk(x, static_cast<int>(blockIdx.x));
  const int group = static_cast<int>(blockIdx.y);
  constexpr int kStride = ProductsShared<kRows>::kStride;
  copy_part<kSsdRows, kRows, kStride, kThreads>(shared.b, group_rows(x, x.b, chunk, group));
  copy_part<kSsdRows, kRows, kStride, kThreads>(shared.c, group_rows(x, x.c, chunk, group));
  commit_copies();
  if (threadIdx.x < kSsdRows)
    shared.starts[threadIdx.x] = scratch.starts[chunk.begin + threadIdx.x];
  wait_copies<0>();
  __syncthreads();
  const int64_t at = (static_cast<int64_t>(chunk.idx) * x.groups + group) * kSsdTriangle;
  const int i = static_cast<int>(threadIdx.x) / 32;
  for (int j = 0; j <= i; ++j) {
    const int64_t to = at + tile_at(i, j, 0);
    write_products<false>(shared, i * kSsdTile, j * kSsdTile, scratch.products + to);
    if (turned != nullptr) write_products<true>(shared, j * kSsdTile, i * kSsdTile, turned + to);
  }
}

}  // namespace

void launch_ssd_dual_marks(const SsdRows& x, const SsdDual& scratch, float* turned,
                           cudaStream_t stream) {
  static_assert(kWarps == kSsdTileRows);
  const SsdDualSizes sizes = sizes_of(x);
  const auto chunks = static_cast<unsigned>(sizes.chunks);
  launch_early(mark_chunks,
               {dim3(chunks, static_cast<unsigned>(divide_up(x.heads, kHeads))), kThreads}, stream,
               x, scratch);
  with_state_rows(sizes, [&]<int kRows>() {
    launch_dual(multiply_vectors<kRows>, dim3(chunks, static_cast<unsigned>(x.groups)), kThreads,
                sizeof(ProductsShared<kRows>), stream, x, scratch, turned);
  });
}

}  // namespace tessera::cuda
