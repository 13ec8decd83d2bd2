// The gradients of B and C of each group, and those of steps. That of a decay's logarithm is what
// crosses it: what lies before the chunk and is read by this token or later, what earlier ones
// write and is read behind the chunk, both, and Z of an earlier and this or a later token.
#include "ops/ssd_scan/ssd_dual.cuh"
#include "ops/ssd_scan/ssd_steps.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSquareStride = kSsdRows + kSsdPadding;

template <int kRows>
struct GroupShared {
  static constexpr int kStride = kRows + kSsdPadding;
  BFloat16 square[kSsdRows * kSquareStride];
  BFloat16 vectors[kSsdRows * kStride];
  int starts[kSsdRows];
};

struct GroupGrads {
  SsdDual scratch;
  SsdDualBackward backward;
  SsdDualSizes sizes;
  void* b;
  void* c;
};

/// The sum of the head blocks' squares, masked and rounded; a warp makes a row of tiles.
template <int kRows>
__device__ __forceinline__ void make_square(GroupShared<kRows>& shared, const GroupGrads& p,
                                            const float* squares) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = static_cast<int>(threadIdx.x) / 32;
  for (int at = 0; at < 2 * kSsdTileRows; ++at) {
    const int j = at / 2;
    const int half = at % 2;
    float sum[4] = {};
    if (j <= tile) {
#pragma unroll 4
      for (int block = 0; block < p.sizes.head_blocks; ++block) {
        const float4 own = *reinterpret_cast<const float4*>(
            squares + static_cast<int64_t>(block) * kSsdTriangle + tile_at(tile, j, half));
        sum[0] += own.x;
        sum[1] += own.y;
        sum[2] += own.z;
        sum[3] += own.w;
      }
    }
    const int column = j * kSsdTile + half * 8 + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile * kSsdTile + 8 * h + lane / 4;
      const auto masked = [&](int to, float value) {
        return row >= to && shared.starts[row] == shared.starts[to] ? value : 0.0F;
      };
      store_pair(shared.square + row * kSquareStride + column, masked(column, sum[2 * h]),
                 masked(column + 1, sum[2 * h + 1]));
    }
  }
}

/// Adds what the head blocks have summed to a warp's rows, which go to global memory.
template <int kRows>
__device__ __forceinline__ void write_vectors(WarpTile<kSsdTile, kRows>& tile, const SsdRows& x,
                                              const GroupGrads& p, const SsdChunk& chunk, int group,
                                              const float* sums, void* to) {
  const int first = static_cast<int>(threadIdx.x) / 32 * kSsdTile;
  const SsdPart rows = group_rows(x, to, chunk, group);
  const int64_t stride = static_cast<int64_t>(p.sizes.chunks) * kSsdRows * kRows;
  tile.for_each_pair([&](int i, int j, float& a, float& b) {
    const int row = first + i;
    if (row >= rows.rows || j >= rows.columns) return;
    const float* own =
        sums +
        (static_cast<int64_t>(group) * p.sizes.head_blocks * p.sizes.chunks + chunk.idx) *
            kSsdRows * kRows +
        row * kRows + j;
#pragma unroll 4
    for (int block = 0; block < p.sizes.head_blocks; ++block) {
      const float2 two = *reinterpret_cast<const float2*>(own + block * stride);
      a += two.x;
      b += two.y;
    }
    store_pair(const_cast<BFloat16*>(rows.data) + row * rows.stride + j, a, b);
  });
}

/// The gradients of C or, by the other half of the blocks, of B: the square times B, or turned
/// times C.
template <int kRows>
__global__ void __launch_bounds__(kThreads, 2)
    finish_vectors(const __grid_constant__ SsdRows x, const __grid_constant__ GroupGrads p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<GroupShared<kRows>*>(memory);
  constexpr int kStride = GroupShared<kRows>::kStride;
  wait_for_earlier();
  const SsdChunk chunk(x, static_cast<int>(blockIdx.x));
  const int group = static_cast<int>(blockIdx.y);
  const bool is_of_b = blockIdx.z == 1;
  copy_part<kSsdRows, kRows, kStride, kThreads>(shared.vectors,
                                                group_rows(x, is_of_b ? x.c : x.b, chunk, group));
  commit_copies();
  if (threadIdx.x < kSsdRows)
    shared.starts[threadIdx.x] = p.scratch.starts[chunk.begin + threadIdx.x];
  __syncthreads();
  make_square(shared, p,
              p.backward.squares + (static_cast<int64_t>(chunk.idx) * p.sizes.all_blocks +
                                    group * p.sizes.head_blocks) *
                                       kSsdTriangle);
  wait_copies<0>();
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x) / 32 * kSsdTile;
  const SharedMatrix square{shared.square, kSquareStride};
  const SharedMatrix vectors{shared.vectors, kStride};
  WarpTile<kSsdTile, kRows> tile;
  if (is_of_b) {
    tile.template add<false, false, kSsdRows>(square, row, vectors, 0);
  } else {
    tile.template add<true, false, kSsdRows>(square, row, vectors, 0);
  }
  write_vectors(tile, x, p, chunk, group, is_of_b ? p.backward.of_b : p.backward.of_c,
                is_of_b ? p.b : p.c);
}

constexpr int kOwn = kSsdRows / 32;  // tokens of a lane

__device__ __forceinline__ float sum_of(const Floats<kOwn>& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += x[i];
  return sum;
}

/// The sum of the lanes before, or, `reverse`, of those behind.
__device__ __forceinline__ float sum_others(float x, bool reverse) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum = x;
  for (int step = 1; step < 32; step *= 2) {
    const float other = reverse ? __shfl_down_sync(~0U, sum, step) : __shfl_up_sync(~0U, sum, step);
    if (reverse ? lane + step < 32 : lane >= step) sum += other;
  }
  const float other = reverse ? __shfl_down_sync(~0U, sum, 1) : __shfl_up_sync(~0U, sum, 1);
  return lane == (reverse ? 31 : 0) ? 0.0F : other;
}

/// The gradients of the decays' logarithms of a lane's tokens of a head.
__device__ __forceinline__ Floats<kOwn> decay_grads(const SsdDualBackward& backward,
                                                    const SsdDualSizes& sizes, int64_t chunk_head,
                                                    const Floats<kOwn>& writes,
                                                    const Floats<kOwn>& columns) {
  const int64_t at = chunk_head * kSsdRows + kOwn * (static_cast<int>(threadIdx.x) % 32);
  const Floats<kOwn> reads = load<kOwn>(backward.read_dots + at);
  const Floats<kOwn> rows = load<kOwn>(backward.row_sums + at);
  Floats<kOwn> crossing;  // what a token adds to all later ones
#pragma unroll
  for (int i = 0; i < kOwn; ++i) crossing[i] = writes[i] + (columns[i] - rows[i]);
  float sum = sum_others(sum_of(crossing), false);
  float joined = 0;
  for (int part = 0; part < sizes.head_slices; ++part)
    joined += backward.joined[chunk_head * sizes.head_slices + part];
  Floats<kOwn> result;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    result[i] = sum;
    sum += crossing[i];
  }
  float behind = sum_others(sum_of(reads), true) + joined;
#pragma unroll
  for (int i = kOwn - 1; i >= 0; --i) {
    behind += reads[i];
    result[i] += behind;
  }
  return result;
}

/// A warp takes a head of a chunk.
__global__ void __launch_bounds__(kThreads)
    finish_chunk_steps(const __grid_constant__ SsdRows x, SsdDual scratch,
                       const __grid_constant__ SsdDualBackward backward, SsdDualSizes sizes,
                       BFloat16* grad_dt) {
  wait_for_earlier();
  const SsdChunk chunk(x, static_cast<int>(blockIdx.x));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (head >= x.heads) return;
  const int64_t chunk_head = static_cast<int64_t>(chunk.idx) * x.heads + head;
  const int64_t at = chunk_head * kSsdRows + kOwn * lane;
  const Floats<kOwn> writes = load<kOwn>(backward.write_dots + at);
  const Floats<kOwn> columns = load<kOwn>(backward.column_sums + at);
  const Floats<kOwn> of_logs = decay_grads(backward, sizes, chunk_head, writes, columns);
  float of_rate = 0;
  float of_bias = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int row = kOwn * lane + i;
    if (row >= chunk.count) continue;
    const int token = chunk.begin + row;
    const int64_t dt_at = static_cast<int64_t>(token) * x.heads + head;
    const SsdStep step = step_of<BFloat16>(x, dt_at);
    const float of_log = scratch.starts[token] == token ? 0.0F : of_logs[i];
    const float written = writes[i] + columns[i];
    // A step of 0 has a slope of 0.
    const float of_step = (step.size > 0 ? written / step.size : 0.0F) + of_log * step.rate;
    const float of_dt = of_step * step.slope;
    store(grad_dt + dt_at, Floats<1>{of_dt});
    of_rate += of_log * step.log_decay;
    of_bias += of_dt;
  }
  of_rate = sum_lanes(of_rate);
  of_bias = sum_lanes(of_bias);
  const float of_skip = sum_lanes(sum_of(load<kOwn>(backward.skips + at)));
  if (lane != 0) return;
  backward.of_a_log[chunk_head] = of_rate;
  backward.of_bias[chunk_head] = of_bias;
  backward.of_skip[chunk_head] = of_skip;
}

}  // namespace

void launch_ssd_dual_finish(const SsdRows& x, const SsdDual& scratch,
                            const SsdDualBackward& backward, const SsdGrads& grads,
                            cudaStream_t stream) {
  const SsdDualSizes sizes = sizes_of(x);
  const auto chunks = static_cast<unsigned>(sizes.chunks);
  const GroupGrads of_groups = {
      .scratch = scratch, .backward = backward, .sizes = sizes, .b = grads.b, .c = grads.c};
  with_state_rows(sizes, [&]<int kRows>() {
    launch_dual(finish_vectors<kRows>, dim3(chunks, static_cast<unsigned>(x.groups), 2), kThreads,
                sizeof(GroupShared<kRows>), stream, x, of_groups);
  });
  launch_early(finish_chunk_steps,
               {dim3(chunks, static_cast<unsigned>(divide_up(x.heads, kWarps))), kThreads}, stream,
               x, scratch, backward, sizes, static_cast<BFloat16*>(grads.dt));
  const auto add_to = [&](const Accumulator& accumulator, const float* terms) {
    if (accumulator.sums == nullptr) return;
    launch_column_sums({.dtype = DType::kF32,
                        .rows = {.bound = sizes.chunks},
                        .cols = x.heads,
                        .x = terms,
                        .accumulator = accumulator,
                        .partials = backward.partials,
                        .num_sms = grads.num_sms},
                       stream);
  };
  add_to(grads.a_log, backward.of_a_log);
  add_to(grads.skip, backward.of_skip);
  add_to(grads.dt_bias, backward.of_bias);
}

void launch_ssd_dual(const SsdRows& x, const SsdDual& scratch, void* y, cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_ssd_dual_marks(x, scratch, nullptr, stream);
  launch_ssd_dual_states(x, scratch, stream);
  launch_ssd_dual_rows(x, scratch, nullptr, nullptr, y, stream);
}

void launch_ssd_dual_backward(const SsdRows& x, const SsdDual& scratch,
                              const SsdDualBackward& backward, const SsdGrads& grads,
                              cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_ssd_dual_marks(x, scratch, backward.turned, stream);
  launch_ssd_dual_states(x, scratch, stream);
  launch_ssd_dual_state_grads(x, scratch, backward, grads.y, stream);
  launch_ssd_dual_rows(x, scratch, &backward, grads.y, grads.x, stream);
  launch_ssd_dual_vectors(x, scratch, backward, grads.y, stream);
  launch_ssd_dual_squares(x, scratch, backward, grads.y, stream);
  launch_ssd_dual_finish(x, scratch, backward, grads, stream);
}

}  // namespace tessera::cuda
