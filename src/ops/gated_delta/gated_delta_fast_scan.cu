// The states from chunk to chunk, and their gradients back, on tensor cores: a block takes kColumns
// columns of values of a head of one sequence, whose state it keeps in registers in F32 and in
// shared memory in BF16. The next chunk's operands arrive while one is worked on.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/gated_delta/delta_fast.cuh"

namespace tessera::cuda {
namespace {

/// What of a chunk comes from global memory. v is the gradient of o on the way back.
template <int kKeySize, int kColumns, bool kHasQueries>
struct ScanStage {
  static constexpr int kKeys = kDeltaRows * (kKeySize + kFastPadding);
  BFloat16 k[kKeys];
  BFloat16 q[kHasQueries ? kKeys : 8];
  BFloat16 v[kDeltaRows * (kColumns + kFastPadding)];
  BFloat16 inverse[kDeltaRows * kSquareStride];
  BFloat16 p_inverse[kHasQueries ? kDeltaRows * kSquareStride : 8];
  DeltaFactors factors;

  __device__ __forceinline__ void load(const FastPlace& at, const FastDelta& scratch,
                                       const BFloat16* values, int column) {
    const DeltaOperands& x = at.x;
    const int count = at.count();
    copy_rows<kDeltaRows, kKeySize>(k, bf16(x.k) + at.key_at(), x.key_stride(), count);
    copy_rows<kDeltaRows, kColumns>(v, values + at.value_at() + column, x.value_stride(), count);
    copy_rows<kDeltaRows, kDeltaRows>(inverse, bf16(scratch.inverse) + at.square_at(), kDeltaRows,
                                      kDeltaRows);
    if constexpr (kHasQueries) {
      copy_rows<kDeltaRows, kKeySize>(q, bf16(x.q) + at.key_at(), x.key_stride(), count);
      copy_rows<kDeltaRows, kDeltaRows>(p_inverse, bf16(scratch.p_inverse) + at.square_at(),
                                        kDeltaRows, kDeltaRows);
    }
    copy_factors(&factors, scratch.factors + at.task());
  }
};

template <int kKeySize, int kColumns, bool kHasQueries>
struct ScanShared {
  ScanStage<kKeySize, kColumns, kHasQueries> stages[2];
  BFloat16 state[kKeySize * (kColumns + kFastPadding)];
  BFloat16 right[kDeltaRows * (kColumns + kFastPadding)];
  BFloat16 written[kHasQueries ? kDeltaRows * (kColumns + kFastPadding) : 8];
};

/// A warp's part of a state or its gradient.
template <int kKeySize, int kColumns>
struct StateTile {
  static constexpr int kRows = kKeySize / kRowWarps;
  static constexpr int kOwnColumns = kColumns / kColumnWarps;
  static constexpr int kStride = kColumns + kFastPadding;

  WarpTile<kRows, kOwnColumns> tile;
  int row = warp_row() * kRows;
  int column = warp_column() * kOwnColumns;

  __device__ __forceinline__ void scale(float factor) {
    tile.for_each_pair([&](int /*i*/, int /*j*/, float& first, float& second) {
      first *= factor;
      second *= factor;
    });
  }
  __device__ __forceinline__ void round_to(BFloat16* shared) {
    tile.for_each_pair([&](int i, int j, float& first, float& second) {
      store_pair(shared + (row + i) * kStride + column + j, first, second);
    });
  }
  /// From and to F32 [Dk, Dv].
  __device__ __forceinline__ void read(const float* from, int64_t stride) {
    tile.for_each_pair([&](int i, int j, float& first, float& second) {
      const float2 two = *reinterpret_cast<const float2*>(from + (row + i) * stride + column + j);
      first = two.x;
      second = two.y;
    });
  }
  __device__ __forceinline__ void write(float* to, int64_t stride) {
    tile.for_each_pair([&](int i, int j, float& first, float& second) {
      *reinterpret_cast<float2*>(to + (row + i) * stride + column + j) = {first, second};
    });
  }
};

/// The first `rows` of a warp's tile, to global memory.
template <int kRows, int kColumns>
__device__ __forceinline__ void write_tile(WarpTile<kRows, kColumns>& tile, BFloat16* to,
                                           int64_t stride, int rows) {
#pragma unroll
  for (int r = 0; r < kRows / 8; ++r) {
    const int i = tile.row_of(r);
    if (i >= rows) continue;
    BFloat16* line = to + i * stride + tile.column_of(0);
#pragma unroll
    for (int p = 0; p < kColumns / 8; ++p)
      store_pair(line + 8 * p, tile.sums[r / 2][p][r % 2 * 2], tile.sums[r / 2][p][r % 2 * 2 + 1]);
  }
}

/// kKeeps: for the backward pass, states and what tokens write are kept and nothing is read by
/// queries. Otherwise the products of q stand below those of k, so that they run side by side.
template <int kKeySize, int kColumns, bool kKeeps>
__global__ void __launch_bounds__(kFastThreads, 1)
    scan_states(const __grid_constant__ DeltaOperands x, FastDelta scratch, BFloat16* o,
                float* states) {
  using Shared = ScanShared<kKeySize, kColumns, !kKeeps>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  wait_for_earlier();
  const DeltaSequence sequence(x, static_cast<int>(blockIdx.x));
  if (sequence.begin >= sequence.end) return;
  const int last = sequence.last_chunk();
  FastPlace at{x, sequence.first_chunk(), static_cast<int>(blockIdx.y)};
  if (at.chunk == last && !sequence.has_first(last)) return;
  constexpr int kKeyStride = kKeySize + kFastPadding;
  constexpr int kStride = kColumns + kFastPadding;
  constexpr int kRows = kKeeps ? kDeltaRows / kRowWarps : 2 * kDeltaRows / kRowWarps;
  const int first_column = static_cast<int>(blockIdx.z) * kColumns;
  const bool of_queries = !kKeeps && warp_row() >= kRowWarps / 2;
  const int row = kKeeps ? warp_row() * kRows : warp_row() % (kRowWarps / 2) * kRows;
  StateTile<kKeySize, kColumns> state;
  const int column = state.column;
  const int64_t state_at = static_cast<int64_t>(at.head) * kKeySize * x.value_size + first_column;
  if (states != nullptr && *x.start != 0) state.read(states + state_at, x.value_size);
  state.round_to(shared.state);

  shared.stages[at.chunk % 2].load(at, scratch, bf16(x.v), first_column);
  commit_copies();
  for (; at.chunk <= last; ++at.chunk) {
    auto& stage = shared.stages[at.chunk % 2];
    const DeltaFactors& factors = stage.factors;
    const bool is_own = sequence.has_first(at.chunk);
    const int64_t values_at = at.value_at() + first_column;
    const int count = at.count();
    wait_copies<0>();
    __syncthreads();
    if (at.chunk < last) {
      shared.stages[(at.chunk + 1) % 2].load({x, at.chunk + 1, at.head}, scratch, bf16(x.v),
                                             first_column);
      commit_copies();
    }
    if (kKeeps && is_own)
      write_rows<kKeySize, kColumns>(bf16(scratch.states) + at.state_at() + first_column,
                                     x.value_size, shared.state);

    WarpTile<kRows, kColumns / kColumnWarps> tile;
    tile.template add<true, false, kKeySize>({of_queries ? stage.q : stage.k, kKeyStride}, row,
                                             {shared.state, kStride}, column);
    if (of_queries) {
      tile.scale_rows([&](int i) { return factors.reads[row + i] * factors.q_inverse[row + i]; });
    } else {
      tile.scale_rows([&](int i) {
        return -factors.beta[row + i] * factors.reads[row + i] * factors.k_inverse[row + i];
      });
      tile.for_each_pair([&](int i, int j, float& first, float& second) {
        const int element = (row + i) * kStride + column + j;
        const float2 value = load_pair(stage.v + element);
        const float beta = factors.beta[row + i];
        store_pair(shared.right + element, beta * value.x + first, beta * value.y + second);
      });
      tile.clear();
    }
    __syncthreads();

    tile.template add<true, false, kDeltaRows>(
        {of_queries ? stage.p_inverse : stage.inverse, kSquareStride}, row, {shared.right, kStride},
        column);
    // Without queries the right side is read by all before what is written takes its place.
    BFloat16* written = kKeeps ? shared.right : shared.written;
    if (kKeeps) __syncthreads();
    BFloat16* to = (kKeeps ? bf16(scratch.written) : o) + values_at;
    if ((kKeeps || of_queries) && is_own)
      write_tile(tile, to + row * x.value_stride() + column, x.value_stride(), count - row);
    if (!of_queries) {
      tile.scale_rows([&](int i) { return factors.writes[row + i] * factors.k_inverse[row + i]; });
      tile.for_each_pair([&](int i, int j, float& first, float& second) {
        store_pair(written + (row + i) * kStride + column + j, first, second);
      });
    }
    __syncthreads();

    state.scale(factors.kept);
    state.tile.template add<false, false, kDeltaRows>({stage.k, kKeyStride}, state.row,
                                                      {written, kStride}, column);
    state.round_to(shared.state);
  }
  if (states != nullptr) state.write(states + state_at, x.value_size);
}

/// The gradients of the states behind the chunks, from the last to the first, and with them those
/// of what tokens write.
template <int kKeySize, int kColumns>
__global__ void __launch_bounds__(kFastThreads, 1)
    scan_states_back(const __grid_constant__ DeltaOperands x, FastDelta scratch,
                     const BFloat16* grad_o, BFloat16* grad_v) {
  using Shared = ScanShared<kKeySize, kColumns, true>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  wait_for_earlier();
  const DeltaSequence sequence(x, static_cast<int>(blockIdx.x));
  if (sequence.begin >= sequence.end) return;
  const int first_chunk = sequence.first_chunk();
  FastPlace at{x, sequence.last_chunk(), static_cast<int>(blockIdx.y)};
  if (at.chunk == first_chunk && !sequence.has_last(at.chunk, x.tokens)) return;
  constexpr int kKeyStride = kKeySize + kFastPadding;
  constexpr int kStride = kColumns + kFastPadding;
  constexpr int kRows = kDeltaRows / kRowWarps;
  const int first_column = static_cast<int>(blockIdx.z) * kColumns;
  const int row = warp_row() * kRows;
  StateTile<kKeySize, kColumns> state;
  const int column = state.column;
  state.round_to(shared.state);

  shared.stages[at.chunk % 2].load(at, scratch, grad_o, first_column);
  commit_copies();
  for (; at.chunk >= first_chunk; --at.chunk) {
    auto& stage = shared.stages[at.chunk % 2];
    const DeltaFactors& factors = stage.factors;
    const bool is_own = sequence.has_last(at.chunk, x.tokens);
    const int64_t values_at = at.value_at() + first_column;
    const int count = at.count();
    wait_copies<0>();
    __syncthreads();
    if (at.chunk > first_chunk) {
      shared.stages[(at.chunk + 1) % 2].load({x, at.chunk - 1, at.head}, scratch, grad_o,
                                             first_column);
      commit_copies();
    }
    if (is_own)
      write_rows<kKeySize, kColumns>(bf16(scratch.state_grads) + at.state_at() + first_column,
                                     x.value_size, shared.state);

    WarpTile<kRows, kColumns / kColumnWarps> tile;
    tile.template add<true, false, kKeySize>({stage.k, kKeyStride}, row, {shared.state, kStride},
                                             column);
    tile.for_each_pair([&](int i, int j, float& first, float& second) {
      const float write = factors.writes[row + i] * factors.k_inverse[row + i];
      store_pair(shared.right + (row + i) * kStride + column + j, first * write, second * write);
    });
    tile.clear();
    tile.template add<false, false, kDeltaRows>({stage.p_inverse, kSquareStride}, row,
                                                {stage.v, kStride}, column);
    __syncthreads();
    tile.template add<false, false, kDeltaRows>({stage.inverse, kSquareStride}, row,
                                                {shared.right, kStride}, column);
    const int64_t to = values_at + row * x.value_stride() + column;
    if (is_own) write_tile(tile, bf16(scratch.of_right) + to, x.value_stride(), count - row);
    tile.scale_rows([&](int i) { return factors.beta[row + i]; });
    if (is_own) write_tile(tile, grad_v + to, x.value_stride(), count - row);
    // Towards the state before: in place of the gradient of o, that is another factor of it.
    tile.scale_rows([&](int i) { return -factors.reads[row + i] * factors.k_inverse[row + i]; });
    tile.for_each_pair([&](int i, int j, float& first, float& second) {
      store_pair(shared.written + (row + i) * kStride + column + j, first, second);
    });
    __syncthreads();
    tile.for_each_pair([&](int i, int j, float& /*first*/, float& /*second*/) {
      BFloat16* pair = stage.v + (row + i) * kStride + column + j;
      const float query = factors.reads[row + i] * factors.q_inverse[row + i];
      const float2 of_o = load_pair(pair);
      store_pair(pair, query * of_o.x, query * of_o.y);
    });
    __syncthreads();

    state.scale(factors.kept);
    state.tile.template add<false, false, kDeltaRows>({stage.q, kKeyStride}, state.row,
                                                      {stage.v, kStride}, column);
    state.tile.template add<false, false, kDeltaRows>({stage.k, kKeyStride}, state.row,
                                                      {shared.written, kStride}, column);
    state.round_to(shared.state);
  }
}

/// Columns of a block: the fewer tasks there are, the more blocks share each.
int choose_columns(const DeltaOperands& x, int num_sms) {
  const int64_t tasks = static_cast<int64_t>(x.heads) * std::max(x.num_sequences, 1);
  int columns = x.value_size;
  while (columns > 32 && tasks * (x.value_size / columns) * 4 < 3 * int64_t{num_sms}) columns /= 2;
  return columns;
}

/// Calls run.operator()<kKeySize, kColumns>().
template <typename Run>
void with_sizes(const DeltaOperands& x, int columns, Run run) {
  const auto with_columns = [&]<int kKeySize>() {
    if (columns == 128) return run.template operator()<kKeySize, 128>();
    if (columns == 64) return run.template operator()<kKeySize, 64>();
    run.template operator()<kKeySize, 32>();
  };
  x.key_size == 64 ? with_columns.template operator()<64>()
                   : with_columns.template operator()<128>();
}

template <typename Kernel, typename... Args>
void launch_scan(Kernel kernel, int shared_bytes, const DeltaOperands& x, int columns,
                 cudaStream_t stream, const Args&... args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  const dim3 blocks(static_cast<unsigned>(std::max(x.num_sequences, 1)),
                    static_cast<unsigned>(x.heads), static_cast<unsigned>(x.value_size / columns));
  launch_early(kernel, {blocks, kFastThreads, static_cast<size_t>(shared_bytes)}, stream, x,
               args...);
}

template <bool kKeeps>
void launch_forward(const DeltaOperands& x, const FastDelta& scratch,
                    const FastDeltaForward& forward, cudaStream_t stream) {
  const int columns = choose_columns(x, forward.num_sms);
  with_sizes(x, columns, [&]<int kKeySize, int kColumns>() {
    launch_scan(scan_states<kKeySize, kColumns, kKeeps>,
                sizeof(ScanShared<kKeySize, kColumns, !kKeeps>), x, columns, stream, scratch,
                static_cast<BFloat16*>(forward.o), forward.states);
  });
}

}  // namespace

void launch_fast_delta(const DeltaOperands& x, const FastDelta& scratch,
                       const FastDeltaForward& forward, cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_fast_delta_chunks(x, scratch, stream);
  launch_forward<false>(x, scratch, forward, stream);
}

void launch_fast_delta_backward(const DeltaOperands& x, const FastDelta& scratch,
                                const DeltaGrads& grads, int num_sms, cudaStream_t stream) {
  if (x.tokens == 0) return;
  launch_fast_delta_chunks(x, scratch, stream);
  launch_forward<true>(x, scratch, {.num_sms = num_sms}, stream);
  const int columns = choose_columns(x, num_sms);
  with_sizes(x, columns, [&]<int kKeySize, int kColumns>() {
    launch_scan(scan_states_back<kKeySize, kColumns>, sizeof(ScanShared<kKeySize, kColumns, true>),
                x, columns, stream, scratch, static_cast<const BFloat16*>(grads.o),
                static_cast<BFloat16*>(grads.v));
  });
  launch_fast_delta_finish(x, scratch, grads, stream);
}

}  // namespace tessera::cuda
