// All gradients of a chunk but those of v, on tensor cores, from the states before and their
// gradients behind the chunks. A block takes key heads of chunks in turn, whose gradients it sums
// over the value heads that read them. One warpgroup feeds: what the next head or chunk needs
// arrives while one is worked on, 64 columns of values at a time. Of the others the first makes the
// gradients of q, the second those of k through rows of P and A and the state before, the third
// those of k through columns and the state behind.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/gated_delta/delta_finish.cuh"

namespace tessera::cuda {
namespace {

using Roles = WarpRoles<32, 160, 3>;
constexpr int kHalfSquare = kDeltaRows / 2;  // columns of a square that are made at once

/// Barriers of those that multiply; 0 is all threads'.
enum NamedBarrier : uint32_t { kWork = 1, kSquaresFree, kWrites, kKeysThere, kKeysTaken };

template <int kKeySize, int kValueSize>
class Finish {
  using Shared = FinishShared<kKeySize>;
  using Slice = FinishSlice<kKeySize>;
  using Keys = typename Shared::Keys;
  using KeyTile = GroupTile<kKeySize>;
  using SquareTile = GroupTile<kDeltaRows>;
  static constexpr int kSlices = kValueSize / kSlice;

 public:
  __device__ __forceinline__ Finish(const DeltaOperands& x, const FastDelta& scratch,
                                    const DeltaGrads& grads, Shared& shared)
      : x_(x),
        scratch_(scratch),
        grads_(grads),
        shared_(shared),
        group_(x.heads / x.key_heads),
        num_tasks_(x.num_chunks() * x.key_heads) {}

  __device__ __forceinline__ void feed() const {
    for (FinishStep step = first(); is_there(step); step = step.next(group_)) {
      if (step.member == 0) load_keys(step);
      for (int s = 0; s < kSlices; ++s) load_slice(step, s);
    }
    wait_copies<0>();
  }
  /// As the queries', the keys' or the writes' warpgroup.
  __device__ __forceinline__ void multiply(int role) const {
    role < 2 ? run_rows(role == 1) : run_writes();
  }

 private:
  static __device__ __forceinline__ FinishStep first() {
    return {static_cast<int>(blockIdx.x), 0, 0, 0};
  }
  __device__ __forceinline__ bool is_there(const FinishStep& step) const {
    return step.task < num_tasks_;
  }
  __device__ __forceinline__ bool is_last(const FinishStep& step) const {
    return step.member + 1 == group_;
  }
  __device__ __forceinline__ const DeltaFactors& factors(const FinishStep& step) const {
    return shared_.c[step.heads % 4];
  }
  __device__ __forceinline__ const Keys& q(const FinishStep& step) const {
    return shared_.q[step.tasks % 2];
  }
  __device__ __forceinline__ const Keys& k(const FinishStep& step) const {
    return shared_.k[step.tasks % 2];
  }

  __device__ __forceinline__ void load_keys(const FinishStep& step) const {
    const FastPlace at = step.place(x_, group_);
    const int buffer = step.tasks % 2;
    shared_.keys_empty[buffer].wait(step.tasks / 2 % 2 ^ 1);
    const auto load = [&](Keys& to, const void* from) {
      to.template copy_from<kWarpgroup>(bf16(from) + at.key_at(), x_.key_stride(), at.count());
    };
    load(shared_.q[buffer], x_.q);
    load(shared_.k[buffer], x_.k);
    arrive_when_copied(&shared_.keys_full[buffer]);
  }
  __device__ __forceinline__ void load_slice(const FinishStep& step, int s) const {
    const FastPlace at = step.place(x_, group_);
    const int turn = step.heads * kSlices + s;
    Slice& slice = shared_.slices[turn % 2];
    shared_.empty[turn % 2].wait(turn / 2 % 2 ^ 1);
    const auto load_values = [&](TiledMatrix<kDeltaRows, kSlice>& to, const void* from) {
      to.template copy_from<kWarpgroup>(bf16(from) + at.value_at() + s * kSlice, x_.value_stride(),
                                        at.count());
    };
    const auto load_state = [&](TiledMatrix<kKeySize, kSlice>& to, const void* from) {
      to.template copy_from<kWarpgroup>(bf16(from) + at.state_at() + s * kSlice, kValueSize,
                                        kKeySize);
    };
    load_values(slice.grad_o, grads_.o);
    load_values(slice.of_right, scratch_.of_right);
    load_values(slice.written, scratch_.written);
    load_values(slice.v, x_.v);
    load_state(slice.state, scratch_.states);
    load_state(slice.state_grad, scratch_.state_grads);
    if (s == 0) copy_factors(&shared_.c[step.heads % 4], scratch_.factors + at.task());
    arrive_when_copied(&shared_.full[turn % 2]);
  }

  /// Calls take(slice) for each slice of a head when it is there; it must have read what it needs.
  template <typename Take>
  __device__ __forceinline__ void for_each_slice(const FinishStep& step, Take take) const {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const int turn = step.heads * kSlices + s;
      shared_.full[turn % 2].wait(turn / 2 % 2);
      fence_shared_for_async();
      take(shared_.slices[turn % 2]);
      shared_.empty[turn % 2].arrive();
    }
  }
  /// Behind the squares and sums.
  static __device__ __forceinline__ void leave_squares() {
    fence_shared_for_async();
    sync_threads(kWork, kFinishWorkers);
  }

  /// From `gradients` of P or A those of the products of q and k, of k and k, into shared memory,
  /// and what G and beta get of them.
  __device__ __forceinline__ void make_square(const FinishStep& step, const SquareTile& gradients,
                                              bool of_keys) const {
    const DeltaFactors& c = factors(step);
    const typename SquareTile::template Place<kDeltaRows> place;
    const SquareRow rows[2] = {{c, SquareTile::row(0), of_keys}, {c, SquareTile::row(1), of_keys}};
    const Keys& left = of_keys ? k(step) : q(step);
    auto& square = shared_.squares[of_keys ? 1 : 0];
    float of_rows[2] = {};
    float of_beta[2] = {};
    const int warp = static_cast<int>(threadIdx.x) / 32 % kWarps;
    float* of_columns = shared_.sums.of_columns[warp + (of_keys ? kWarps : 0)];
    GroupTile<kHalfSquare> products;
#pragma unroll
    for (int j = 0; j < kDeltaRows / 8; ++j) {
      const int column = SquareTile::column(j);
      const int in_half = j % (kHalfSquare / 8);
      if (in_half == 0) {
        products = {};
        begin(products);
        products.template add<kKeySize>(along(left), along(k(step), 8 * j));
        end(products);
      }
      const SquareColumns columns(c, column);
      float of_column[2] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const SquareRow& row = rows[h];
        float of_product[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float gradient = gradients.sums[4 * j + 2 * h + e];
          const float product = products.sums[4 * in_half + 2 * h + e];
          const float factor =
              e == 0 ? row.factor(column, columns.starts.x, columns.sums.x, columns.keys.x)
                     : row.factor(column + 1, columns.starts.y, columns.sums.y, columns.keys.y);
          const float weighted = factor == 0 ? 0 : gradient * factor;
          of_product[e] = weighted * row.weight;
          of_beta[h] -= weighted * row.key * product;
          // Where the factor is 1, decays have no gradient.
          const float of_decay = column + e == row.idx ? 0 : of_product[e] * product;
          of_rows[h] += of_decay;
          of_column[e] += of_decay;
        }
        store_pair(square.values + place.at(h, j), of_product[0], of_product[1]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = sum_column_lanes(of_column[e]);
        if (threadIdx.x % 32 < 4) of_columns[column + e] = sum;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float of_row = sum_row_lanes(of_rows[h]);
      const float beta = sum_row_lanes(of_beta[h]);
      if (threadIdx.x % 4 != 0) continue;
      shared_.sums.of_rows[of_keys ? 1 : 0][rows[h].idx] = of_row;
      if (of_keys) shared_.sums.of_beta[rows[h].idx] = beta;
    }
  }

  /// Multiplies rows by factor(row); then their products with those of `keys` are summed into
  /// `sums`, and they are multiplied by weight(row).
  template <typename Factor, typename Weight>
  __device__ __forceinline__ void weigh(KeyTile& tile, const Keys& keys, float* sums, Factor factor,
                                        Weight weight) const {
    const typename KeyTile::template Place<kDeltaRows> place;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = KeyTile::row(h);
      const float of_row = factor(row);
      const float scale = of_row * weight(row);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kKeySize / 8; ++j) {
        const float2 key = load_pair(keys.values + place.at(h, j));
        float* two = tile.sums + 4 * j + 2 * h;
        sum += two[0] * key.x + two[1] * key.y;
        two[0] *= scale;
        two[1] *= scale;
      }
      sum = sum_row_lanes(sum) * of_row;
      if (threadIdx.x % 4 == 0) sums[row] = sum;
    }
  }

  /// Gradients of decay and beta, by one warp, each lane two rows. REQUIRES all sums.
  __device__ __forceinline__ void write_gates(const FinishStep& step) const {
    const FinishSums& sums = shared_.sums;
    const DeltaFactors& c = factors(step);
    const int first_row = static_cast<int>(threadIdx.x) % 32 * 2;
    float of_decay[2];
    float of_writes = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = first_row + e;
      const float written = i == c.count - 1 ? 0 : sums.writes_k[i];  // where the factor is 1
      of_writes += written;
      of_decay[e] = sums.of_rows[0][i] + sums.of_rows[1][i];
#pragma unroll
      for (int w = 0; w < 2 * kWarps; ++w) of_decay[e] -= sums.of_columns[w][i];
      of_decay[e] += sums.reads_q[i] - c.beta[i] * sums.reads_k[i] - written;
    }
    const int2 starts = {c.starts[first_row], c.starts[first_row + 1]};
    const float2 to_ends = sum_to_ends({of_decay[0], of_decay[1]}, starts);
    float behind = sum_lanes(of_writes);  // of what the state behind has
    float kept = 0;
#pragma unroll
    for (const float of_warp : sums.of_kept) kept += of_warp;
    if (c.kept != 0) behind += c.kept * kept;
    const FastPlace at = step.place(x_, group_);
    const int last_start = c.starts[c.count - 1];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = first_row + e;
      if (i >= c.count) continue;
      const int64_t gate = (at.token() + i) * x_.heads + at.head;
      const float own = e == 0 ? to_ends.x : to_ends.y;
      grads_.decay[gate] = own + (c.starts[i] == last_start ? behind : 0);
      grads_.beta[gate] = sums.of_beta[i] + sums.of_value[i] - sums.reads_k[i];
    }
  }

  /// From the gradients of rows of given lengths those of the rows themselves: what goes along a
  /// row is taken away. `inverses` squared times `scale` are one over squared lengths.
  __device__ __forceinline__ void write_key_grads(KeyTile& total, const Keys& keys,
                                                  const float* inverses, float scale, void* to,
                                                  const FastPlace& at) const {
    const typename KeyTile::template Place<kDeltaRows> place;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = KeyTile::row(h);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kKeySize / 8; ++j) {
        const float2 key = load_pair(keys.values + place.at(h, j));
        sum += total.sums[4 * j + 2 * h] * key.x + total.sums[4 * j + 2 * h + 1] * key.y;
      }
      const float along_row = sum_row_lanes(sum) * inverses[row] * inverses[row] * scale;
#pragma unroll
      for (int j = 0; j < kKeySize / 8; ++j) {
        const float2 key = load_pair(keys.values + place.at(h, j));
        total.sums[4 * j + 2 * h] -= along_row * key.x;
        total.sums[4 * j + 2 * h + 1] -= along_row * key.y;
      }
    }
    total.write(bf16(to) + at.key_at(), x_.key_stride(), at.count());
  }

  /// Hands the third warpgroup's sums to the second, 64 columns at a time.
  template <bool kGives>
  __device__ __forceinline__ void pass_keys(KeyTile& total) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
    for (int first = 0; first < kKeySize / 2; first += kTileColumns / 2) {
#pragma unroll
      for (int i = 0; kGives && i < kTileColumns / 2; ++i)
        shared_.passed()[i * kWarpgroup + thread] = total.sums[first + i];
      sync_threads(kKeysThere, 2 * kWarpgroup);
#pragma unroll
      for (int i = 0; !kGives && i < kTileColumns / 2; ++i)
        total.sums[first + i] += shared_.passed()[i * kWarpgroup + thread];
      sync_threads(kKeysTaken, 2 * kWarpgroup);
    }
  }

  __device__ __forceinline__ void leave_keys(const FinishStep& step) const {
    shared_.keys_empty[step.tasks % 2].arrive();
  }

  /// Of q's gradients, or of k's through rows of A and the state before.
  __device__ __forceinline__ void run_rows(bool of_keys) const {
    for (FinishStep step = first(); is_there(step); step = step.next(group_)) {
      KeyTile tile;
      {
        SquareTile gradients;
        for_each_slice(step, [&](const Slice& slice) {
          const auto& rows = of_keys ? slice.of_right : slice.grad_o;
          begin(gradients, tile);
          gradients.template add<kSlice>(along(rows), along(slice.written));
          tile.template add<kSlice>(along(rows), along(slice.state));
          end(gradients, tile);
        });
        shared_.keys_full[step.tasks % 2].wait(step.tasks / 2 % 2);
        fence_shared_for_async();
        sync_threads(kSquaresFree, kFinishWorkers);
        make_square(step, gradients, of_keys);
      }
      const DeltaFactors& c = factors(step);
      const Keys& keys = of_keys ? k(step) : q(step);
      const float* inverses = of_keys ? c.k_inverse : c.q_inverse;
      weigh(
          tile, keys, of_keys ? shared_.sums.reads_k : shared_.sums.reads_q,
          [&](int row) { return c.reads[row] * inverses[row]; },
          [&](int row) { return of_keys ? -c.beta[row] : 1.0F; });
      const FinishTotals<kKeySize> totals(scratch_.totals, of_keys ? 1 : 0, step.member > 0);
      leave_squares();
      begin(tile);
      tile.template add<kDeltaRows>(along(shared_.squares[of_keys ? 1 : 0]), across(k(step)));
      end(tile);
      totals.add_to(tile, !is_last(step));
      if (!is_last(step)) continue;
      sync_threads(kWork, kFinishWorkers);
      if (of_keys) pass_keys<false>(tile);
      write_key_grads(tile, keys, inverses, of_keys ? 1.0F : static_cast<float>(kKeySize),
                      of_keys ? grads_.k : grads_.q, step.place(x_, group_));
      leave_keys(step);
    }
  }

  __device__ __forceinline__ void run_writes() const {
    for (FinishStep step = first(); is_there(step); step = step.next(group_)) {
      arrive_threads(kSquaresFree, kFinishWorkers);
      KeyTile tile;
      FinishPlainSums<kKeySize> plain;
      for_each_slice(step, [&](const Slice& slice) {
        begin(tile);
        tile.template add<kSlice>(along(slice.written), along(slice.state_grad));
        end(tile);
        plain.add(slice);
      });
      shared_.keys_full[step.tasks % 2].wait(step.tasks / 2 % 2);
      fence_shared_for_async();
      sync_threads(kWrites, kWarpgroup);  // what the gates of the head before read is replaced
      const DeltaFactors& c = factors(step);
      weigh(
          tile, k(step), shared_.sums.writes_k,
          [&](int row) { return c.writes[row] * c.k_inverse[row]; }, [](int) { return 1.0F; });
      plain.leave(shared_.sums);
      const FinishTotals<kKeySize> totals(scratch_.totals, 2, step.member > 0);
      leave_squares();
      begin(tile);
      tile.template add<kDeltaRows>(across(shared_.squares[0]), across(q(step)));
      tile.template add<kDeltaRows>(across(shared_.squares[1]), across(k(step)));
      end(tile);
      if (threadIdx.x % kWarpgroup < 32) write_gates(step);
      totals.add_to(tile, !is_last(step));
      if (!is_last(step)) continue;
      sync_threads(kWork, kFinishWorkers);
      leave_keys(step);
      pass_keys<true>(tile);
    }
  }

  const DeltaOperands& x_;
  const FastDelta& scratch_;
  const DeltaGrads& grads_;
  Shared& shared_;
  int group_;
  int num_tasks_;
};

template <int kKeySize, int kValueSize>
__global__ void __launch_bounds__(Roles::kThreads, 1)
    finish_chunks(const __grid_constant__ DeltaOperands x,
                  const __grid_constant__ FastDelta scratch,
                  const __grid_constant__ DeltaGrads grads) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<FinishShared<kKeySize>*>(memory);
  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  wait_for_earlier();
  const Finish<kKeySize, kValueSize> finish(x, scratch, grads, shared);
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    Roles::begin_feeding();
    finish.feed();
  } else {
    Roles::begin_multiplying();
    finish.multiply(warpgroup - 1);
  }
}

template <int kKeySize, int kValueSize>
void launch(const DeltaOperands& x, const FastDelta& scratch, const DeltaGrads& grads, int num_sms,
            cudaStream_t stream) {
  constexpr int kBytes = sizeof(FinishShared<kKeySize>);
  static_assert(kBytes <= kMaxShared);
  const auto kernel = finish_chunks<kKeySize, kValueSize>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int64_t tasks = num_delta_chunks(x.tokens) * x.key_heads;
  const int64_t most = std::min(num_sms, kDeltaFinishBlocks);
  const auto blocks = static_cast<unsigned>(std::min(tasks, most));
  launch_early(kernel, {blocks, Roles::kThreads, kBytes}, stream, x, scratch, grads);
}

}  // namespace

void launch_fast_delta_finish(const DeltaOperands& x, const FastDelta& scratch,
                              const DeltaGrads& grads, int num_sms, cudaStream_t stream) {
  if (x.key_size == 64) {
    x.value_size == 64 ? launch<64, 64>(x, scratch, grads, num_sms, stream)
                       : launch<64, 128>(x, scratch, grads, num_sms, stream);
  } else {
    x.value_size == 64 ? launch<128, 64>(x, scratch, grads, num_sms, stream)
                       : launch<128, 128>(x, scratch, grads, num_sms, stream);
  }
}

}  // namespace tessera::cuda
