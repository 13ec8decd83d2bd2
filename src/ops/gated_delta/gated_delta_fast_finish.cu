// All gradients of a chunk but those of v, on tensor cores, from the states before and their
// gradients behind the chunks: a block takes a key head, whose gradients it sums over the value
// heads that read it.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/gated_delta/delta_fast.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kSquareRows = 4;  // how the warps share two squares, one below the other
constexpr int kSquareColumns = kWarps / kSquareRows;
constexpr int kGroupRows = 4;  // how they share [64, Dk]
constexpr int kGroupColumns = kWarps / kGroupRows;
constexpr int kOwnRows = kDeltaRows / kGroupRows;

/// What rows of a chunk add to gradients of G and beta, in parts that are summed in order.
struct FinishSums {
  float of_rows[kSquareColumns][2 * kDeltaRows];  // of factors exp(G_i - G_j), by rows of P and A
  float of_columns[kSquareRows][kDeltaRows];      // the same by columns
  float of_beta[kSquareColumns][kDeltaRows];      // by rows of A
  float reads_q[kGroupColumns][kDeltaRows];   // of q's gradients through the state before, times q
  float reads_k[kGroupColumns][kDeltaRows];   // the same of k, without beta
  float writes_k[kGroupColumns][kDeltaRows];  // of k's through the state behind, times k
  float of_value[kDeltaRows];                 // of beta, by v
  float of_kept[kWarps];
  float decay[kDeltaRows];
};

template <int kKeySize, int kValueSize>
struct FinishShared {
  static constexpr int kKeys = kDeltaRows * (kKeySize + kFastPadding);
  static constexpr int kValues = kDeltaRows * (kValueSize + kFastPadding);
  static constexpr int kState = kKeySize * (kValueSize + kFastPadding);
  BFloat16 q[kKeys];
  BFloat16 k[kKeys];
  BFloat16 v[kValues];
  BFloat16 grad_o[kValues];
  BFloat16 of_right[kValues];
  BFloat16 written[kValues];
  BFloat16 state[kState];
  BFloat16 state_grad[kState];
  BFloat16 of_p[kDeltaRows * kSquareStride];
  BFloat16 of_a[kDeltaRows * kSquareStride];
  DeltaCoefficients c[2];  // of a head and the next
  FinishSums sums;
};

/// The sum over the four lanes that have a row's columns.
__device__ __forceinline__ float sum_row_lanes(float x) {
  return sum_lanes<4>(x);
}
/// The sum over the eight lanes that have a column's rows.
__device__ __forceinline__ float sum_column_lanes(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

template <int kKeySize, int kValueSize>
struct Finish {
  static constexpr int kKeyStride = kKeySize + kFastPadding;
  static constexpr int kValueStride = kValueSize + kFastPadding;
  static constexpr int kOwnColumns = kKeySize / kGroupColumns;
  using KeyTile = WarpTile<kOwnRows, kOwnColumns>;

  const DeltaOperands& x;
  const FastDelta& scratch;
  const DeltaGrads& grads;
  FinishShared<kKeySize, kValueSize>& shared;
  KeyTile of_q;
  KeyTile of_k;
  int row = static_cast<int>(threadIdx.x) / 32 / kGroupColumns * kOwnRows;
  int group = static_cast<int>(threadIdx.x) / 32 % kGroupColumns;

  __device__ int column() const { return group * kOwnColumns; }
  static __device__ int square_row() { return static_cast<int>(threadIdx.x) / 32 / kSquareColumns; }
  static __device__ int square_column() {
    return static_cast<int>(threadIdx.x) / 32 % kSquareColumns;
  }
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  __device__ void load(const FastPlace& at) {
    const int count = at.count();
    const int64_t values_at = at.value_at();
    const int64_t stride = x.value_stride();
    copy_rows<kDeltaRows, kValueSize, kThreads>(shared.grad_o, bf16(grads.o) + values_at, stride,
                                                count);
    copy_rows<kDeltaRows, kValueSize, kThreads>(shared.of_right, bf16(scratch.of_right) + values_at,
                                                stride, count);
    copy_rows<kDeltaRows, kValueSize, kThreads>(shared.written, bf16(scratch.written) + values_at,
                                                stride, count);
    copy_rows<kDeltaRows, kValueSize, kThreads>(shared.v, bf16(x.v) + values_at, stride, count);
    copy_factors(&shared.c[at.head % 2], scratch.factors + at.task());
    commit_copies();
    copy_rows<kKeySize, kValueSize, kThreads>(shared.state, bf16(scratch.states) + at.state_at(),
                                              kValueSize, kKeySize);
    copy_rows<kKeySize, kValueSize, kThreads>(
        shared.state_grad, bf16(scratch.state_grads) + at.state_at(), kValueSize, kKeySize);
    commit_copies();
  }

  /// Gradients of P and A: those of the products of q and k, of k and k, into of_p and of_a, and
  /// what G and beta get of them. Products for P stand above those for A.
  __device__ void make_squares(const DeltaCoefficients& c) {
    constexpr int kRows = 2 * kDeltaRows / kSquareRows;
    constexpr int kColumns = kDeltaRows / kSquareColumns;
    const bool of_keys = square_row() >= kSquareRows / 2;
    const int first = square_row() % (kSquareRows / 2) * kRows;
    const int first_column = square_column() * kColumns;
    WarpTile<kRows, kColumns> gradients;
    gradients.template add<true, true, kValueSize>(
        {of_keys ? shared.of_right : shared.grad_o, kValueStride}, first,
        {shared.written, kValueStride}, first_column);
    WarpTile<kRows, kColumns> products;
    products.template add<true, true, kKeySize>({of_keys ? shared.k : shared.q, kKeyStride}, first,
                                                {shared.k, kKeyStride}, first_column);
    float of_rows[kRows / 8] = {};
    float of_beta[kRows / 8] = {};
    float of_columns[kColumns / 4] = {};
    // A column's, once for all rows.
    float inverses[kColumns / 4];
    float sums[kColumns / 4];
    int starts[kColumns / 4];
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const int other = first_column + gradients.column_of(i / 2) + i % 2;
      inverses[i] = c.k_inverse[other];
      sums[i] = c.sums[other];
      starts[i] = c.starts[other];
    }
    combine_parts(gradients, products, [&](int r, int p, float2 gradient, float2 product) {
      const int at_row = first + gradients.row_of(r);
      const int at_column = first_column + gradients.column_of(p);
      const float beta = c.beta[at_row];
      const float sum = c.sums[at_row];
      const int start = c.starts[at_row];
      const float row_factor = of_keys ? -beta * c.k_inverse[at_row] : c.q_inverse[at_row];
      float of_product[2];
      const float gradient_of[2] = {gradient.x, gradient.y};
      const float product_of[2] = {product.x, product.y};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int other = at_column + e;
        const bool is_used = other <= at_row && !(of_keys && other == at_row) && at_row < c.count &&
                             starts[2 * p + e] == start;
        const float between = __expf(sum - sums[2 * p + e]) * inverses[2 * p + e];
        const float factor = is_used ? between : 0;
        of_product[e] = factor == 0 ? 0 : gradient_of[e] * factor * row_factor;
        const float of_decay = of_product[e] * product_of[e];
        if (other != at_row) {  // where the factor is 1
          of_rows[r] += of_decay;
          of_columns[2 * p + e] += of_decay;
        }
        if (of_keys && factor != 0)
          of_beta[r] -= gradient_of[e] * factor * c.k_inverse[at_row] * product_of[e];
      }
      store_pair((of_keys ? shared.of_a : shared.of_p) + at_row * kSquareStride + at_column,
                 of_product[0], of_product[1]);
    });
    keep_square_sums(of_rows, of_beta, of_columns, first, of_keys);
  }

  template <int kRowSums, int kColumnSums>
  __device__ void keep_square_sums(const float (&of_rows)[kRowSums],
                                   const float (&of_beta)[kRowSums],
                                   const float (&of_columns)[kColumnSums], int first,
                                   bool of_keys) {
#pragma unroll
    for (int r = 0; r < kRowSums; ++r) {
      const float of_row = sum_row_lanes(of_rows[r]);
      const float beta = sum_row_lanes(of_beta[r]);
      const int at_row = first + r * 8 + lane() / 4;
      if (lane() % 4 != 0) continue;
      shared.sums.of_rows[square_column()][(of_keys ? kDeltaRows : 0) + at_row] = of_row;
      if (of_keys) shared.sums.of_beta[square_column()][at_row] = beta;
    }
#pragma unroll
    for (int i = 0; i < kColumnSums; ++i) {
      const float of_column = sum_column_lanes(of_columns[i]);
      const int at_column =
          square_column() * (4 * kColumnSums) + i / 2 * 8 + lane() % 4 * 2 + i % 2;
      if (lane() < 4) shared.sums.of_columns[square_row()][at_column] = of_column;
    }
  }

  /// Sums over rows of the tile times q or k.
  __device__ void sum_along(KeyTile& tile, const BFloat16* keys, float* sums) {
    float of_rows[kOwnRows / 8] = {};
    tile.for_each_part([&](int r, int p, float& first, float& second) {
      const int element = (row + tile.row_of(r)) * kKeyStride + column() + tile.column_of(p);
      const float2 key = load_pair(keys + element);
      of_rows[r] += first * key.x + second * key.y;
    });
#pragma unroll
    for (int r = 0; r < kOwnRows / 8; ++r) {
      const float sum = sum_row_lanes(of_rows[r]);
      if (lane() % 4 == 0) sums[row + r * 8 + lane() / 4] = sum;
    }
  }

  /// Multiplies rows of a product with a state by their factors; then as sum_along().
  __device__ void weigh(KeyTile& tile, const float* factors, const float* inverses,
                        const BFloat16* keys, float* sums) {
    tile.for_each_pair([&](int i, int /*j*/, float& first, float& second) {
      const float factor = factors[row + i] * inverses[row + i];
      first *= factor;
      second *= factor;
    });
    sum_along(tile, keys, sums);
  }

  static __device__ void add(KeyTile& to, const KeyTile& from) {
#pragma unroll
    for (int i = 0; i < KeyTile::kRowParts; ++i) {
#pragma unroll
      for (int j = 0; j < KeyTile::kColumnParts; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to.sums[i][j][e] += from.sums[i][j][e];
      }
    }
  }

  /// Through the states before and behind the chunk.
  __device__ void add_of_states(const DeltaCoefficients& c) {
    FinishSums& sums = shared.sums;
    const SharedMatrix state{shared.state, kValueStride};
    KeyTile tile;
    tile.template add<true, true, kValueSize>({shared.grad_o, kValueStride}, row, state, column());
    weigh(tile, c.reads, c.q_inverse, shared.q, sums.reads_q[group]);
    add(of_q, tile);
    tile.clear();
    tile.template add<true, true, kValueSize>({shared.written, kValueStride}, row,
                                              {shared.state_grad, kValueStride}, column());
    weigh(tile, c.writes, c.k_inverse, shared.k, sums.writes_k[group]);
    add(of_k, tile);
    tile.clear();
    tile.template add<true, true, kValueSize>({shared.of_right, kValueStride}, row, state,
                                              column());
    weigh(tile, c.reads, c.k_inverse, shared.k, sums.reads_k[group]);
    tile.for_each_pair([&](int i, int /*j*/, float& first, float& second) {
      first *= -c.beta[row + i];
      second *= -c.beta[row + i];
    });
    add(of_k, tile);
  }

  /// Within the chunk.
  __device__ void add_of_squares() {
    const SharedMatrix of_p{shared.of_p, kSquareStride};
    const SharedMatrix of_a{shared.of_a, kSquareStride};
    const SharedMatrix keys{shared.k, kKeyStride};
    const SharedMatrix queries{shared.q, kKeyStride};
    of_q.template add<true, false, kDeltaRows>(of_p, row, keys, column());
    of_k.template add<false, false, kDeltaRows>(of_p, row, queries, column());
    of_k.template add<true, false, kDeltaRows>(of_a, row, keys, column());
    of_k.template add<false, false, kDeltaRows>(of_a, row, keys, column());
  }

  /// Sums by warps that need no products: of the state that is kept, and of v.
  __device__ void add_plain_sums() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    float kept = 0;
    for (int i = static_cast<int>(threadIdx.x); i < kKeySize * kValueSize / 2; i += kThreads) {
      const int element = i / (kValueSize / 2) * kValueStride + i % (kValueSize / 2) * 2;
      const float2 a = load_pair(shared.state + element);
      const float2 b = load_pair(shared.state_grad + element);
      kept += a.x * b.x + a.y * b.y;
    }
    kept = sum_lanes(kept);
    if (lane() == 0) shared.sums.of_kept[warp] = kept;
    for (int i = warp; i < kDeltaRows; i += kWarps) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kValueSize; j += 64) {
        const int element = i * kValueStride + j + 2 * lane();
        const float2 value = load_pair(shared.v + element);
        const float2 grad = load_pair(shared.of_right + element);
        sum += value.x * grad.x + value.y * grad.y;
      }
      sum = sum_lanes(sum);
      if (lane() == 0) shared.sums.of_value[i] = sum;
    }
  }

  /// Gradients of decay and beta; by all threads, REQUIRES all sums.
  __device__ void write_gates(const FastPlace& at, const DeltaCoefficients& c) {
    FinishSums& sums = shared.sums;
    const int i = static_cast<int>(threadIdx.x);
    float of_beta = 0;
    if (i < kDeltaRows) {
      float of_decay = 0;
      float reads_k = 0;
      for (int w = 0; w < kSquareColumns; ++w) {
        of_decay += sums.of_rows[w][i] + sums.of_rows[w][kDeltaRows + i];
        of_beta += sums.of_beta[w][i];
      }
      for (int w = 0; w < kSquareRows; ++w) of_decay -= sums.of_columns[w][i];
      float written = 0;
      for (int w = 0; w < kGroupColumns; ++w) {
        of_decay += sums.reads_q[w][i];
        reads_k += sums.reads_k[w][i];
        written += sums.writes_k[w][i];
      }
      if (i == c.count - 1) written = 0;  // where the factor is 1
      of_decay -= c.beta[i] * reads_k + written;
      of_beta += sums.of_value[i] - reads_k;
      sums.decay[i] = of_decay;
      sums.of_value[i] = written;
    }
    __syncthreads();
    if (i >= c.count) return;
    float sum = 0;
    for (int j = i; j < c.count; ++j)
      if (c.starts[j] == c.starts[i]) sum += sums.decay[j];
    if (c.starts[i] == c.starts[c.count - 1]) {
      for (int j = 0; j < c.count; ++j) sum += sums.of_value[j];
      float kept = 0;
      for (const float of_warp : sums.of_kept) kept += of_warp;
      if (c.kept != 0) sum += c.kept * kept;
    }
    const int64_t gate = (at.token() + i) * x.heads + at.head;
    grads.decay[gate] = sum;
    grads.beta[gate] = of_beta;
  }

  /// REQUIRES load(at); loads the next head where there is one.
  __device__ void run_head(const FastPlace& at, bool has_next) {
    const DeltaCoefficients& c = shared.c[at.head % 2];
    wait_copies<1>();
    __syncthreads();
    make_squares(c);
    wait_copies<0>();
    __syncthreads();
    add_of_states(c);
    add_plain_sums();
    __syncthreads();
    if (has_next) load({x, at.chunk, at.head + 1});
    add_of_squares();
    write_gates(at, c);
  }

  /// From the gradients of q and k as rows of given lengths, those of q and k themselves.
  __device__ void write_key_grads(const FastPlace& at) {
    FinishSums& sums = shared.sums;
    __syncthreads();
    sum_along(of_q, shared.q, sums.reads_q[group]);
    sum_along(of_k, shared.k, sums.reads_k[group]);
    __syncthreads();
    const DeltaCoefficients& c = shared.c[at.head % 2];
    write_rows_of(of_q, shared.q, sums.reads_q, c.q_inverse, static_cast<float>(kKeySize),
                  bf16(grads.q) + at.key_at(), at.count());
    write_rows_of(of_k, shared.k, sums.reads_k, c.k_inverse, 1.0F, bf16(grads.k) + at.key_at(),
                  at.count());
  }

 private:
  /// What goes along a row, whose length is given, is taken away. `inverses` squared times `scale`
  /// are one over squared lengths.
  __device__ void write_rows_of(KeyTile& tile, const BFloat16* keys,
                                const float (&sums)[kGroupColumns][kDeltaRows],
                                const float* inverses, float scale, BFloat16* to, int count) {
    tile.for_each_pair([&](int i, int j, float& first, float& second) {
      i += row;
      j += column();
      if (i >= count) return;
      float along = 0;
#pragma unroll
      for (int w = 0; w < kGroupColumns; ++w) along += sums[w][i];
      along *= inverses[i] * inverses[i] * scale;
      const float2 key = load_pair(keys + i * kKeyStride + j);
      store_pair(to + i * x.key_stride() + j, first - along * key.x, second - along * key.y);
    });
  }
};

template <int kKeySize, int kValueSize>
__global__ void __launch_bounds__(kThreads, 1)
    finish_chunks(const __grid_constant__ DeltaOperands x, FastDelta scratch, DeltaGrads grads) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<FinishShared<kKeySize, kValueSize>*>(memory);
  wait_for_earlier();
  const int group = x.heads / x.key_heads;
  FastPlace at{x, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y) * group};
  copy_rows<kDeltaRows, kKeySize, kThreads>(shared.q, bf16(x.q) + at.key_at(), x.key_stride(),
                                            at.count());
  copy_rows<kDeltaRows, kKeySize, kThreads>(shared.k, bf16(x.k) + at.key_at(), x.key_stride(),
                                            at.count());
  commit_copies();
  Finish<kKeySize, kValueSize> finish{x, scratch, grads, shared};
  const int end = at.head + group;
  finish.load(at);
  for (; at.head < end; ++at.head) finish.run_head(at, at.head + 1 < end);
  at.head = end - 1;
  finish.write_key_grads(at);
}

template <int kKeySize, int kValueSize>
void launch(const DeltaOperands& x, const FastDelta& scratch, const DeltaGrads& grads,
            cudaStream_t stream) {
  constexpr int kBytes = sizeof(FinishShared<kKeySize, kValueSize>);
  const auto kernel = finish_chunks<kKeySize, kValueSize>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 blocks(static_cast<unsigned>(num_delta_chunks(x.tokens)),
                    static_cast<unsigned>(x.key_heads));
  launch_early(kernel, {blocks, kThreads, kBytes}, stream, x, scratch, grads);
}

}  // namespace

void launch_fast_delta_finish(const DeltaOperands& x, const FastDelta& scratch,
                              const DeltaGrads& grads, cudaStream_t stream) {
  if (x.key_size == 64) {
    x.value_size == 64 ? launch<64, 64>(x, scratch, grads, stream)
                       : launch<64, 128>(x, scratch, grads, stream);
  } else {
    x.value_size == 64 ? launch<128, 64>(x, scratch, grads, stream)
                       : launch<128, 128>(x, scratch, grads, stream);
  }
}

}  // namespace tessera::cuda
