// A stable counting sort of assignments by expert. Every place is computed, none is taken by
// whoever comes first, so the order is that of the tokens.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/short_kernel.cuh"
#include "ops/route_map/route_assignments.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kPerWarp = kRouteRun / kWarps;
constexpr int kScanThreads = 1024;  // at least one to an expert
constexpr int kFillThreads = 256;

__global__ void __launch_bounds__(kWarps* kLanes) count_runs(const RouteCount p) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ int32_t counts[];
  const RouteAssignments& a = p.assignments;
  for (int e = threadIdx.x; e < a.num_local; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRouteRun;
  const int64_t last = min(first + kRouteRun, count_of(a));
  for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) {
    if (p.row_of_TK != nullptr) p.row_of_TK[i] = -1;
    const int expert = local_expert(a, a.expert_of[i]);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.num_local; e += blockDim.x)
    p.counts_RN[static_cast<int64_t>(blockIdx.x) * a.num_local + e] = counts[e];
}

/// Each thread's sum of the values of the threads before it; `total` is that of all.
template <typename T>
__device__ T block_exclusive_sum(T value, T& total) {
  __shared__ T sums[kScanThreads / kLanes];
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const T inclusive = warp_inclusive_sum(value, lane);
  __syncthreads();
  if (lane == kLanes - 1) sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) sums[lane] = warp_inclusive_sum(sums[lane], lane);
  __syncthreads();
  total = sums[kScanThreads / kLanes - 1];
  return inclusive - value + (warp == 0 ? 0 : sums[warp - 1]);
}

/// The first row of this thread's expert of `rows` rows, where `offset` is that without slots.
__device__ int64_t place_in_slot(const RouteOffsets& p, int64_t offset, int64_t rows) {
  __shared__ int64_t offsets[kScanThreads];
  const int e = threadIdx.x;
  offsets[e] = offset;
  __syncthreads();
  if (e >= p.num_local) return offset;
  const int slot = e / p.slot_experts;
  const int64_t in_slot = offset - offsets[slot * p.slot_experts];
  if (in_slot + rows > p.slot_rows)
    fail("route_map: a slot of experts gets more rows than it has", in_slot + rows);
  return slot * p.slot_rows + in_slot;
}

/// Places the experts' rows, thread e those of expert e, which keeps `kept` of all `assigned`.
/// Returns the rows that it keeps none for; all threads must call.
__device__ int64_t place_rows(const RouteOffsets& p, int64_t kept, int64_t assigned) {
  const int e = threadIdx.x;
  const bool is_expert = e < p.num_local;
  const int64_t unaligned = p.rows_each > 0 ? p.rows_each : kept;
  const int64_t rows = is_expert ? (unaligned + p.alignment - 1) / p.alignment * p.alignment : 0;
  int64_t num_rows = 0;
  int64_t offset = block_exclusive_sum(rows, num_rows);
  if (p.slot_experts > 0) {
    offset = place_in_slot(p, offset, rows);
    num_rows = p.num_local / p.slot_experts * p.slot_rows;
  }
  int64_t num_kept = 0;
  block_exclusive_sum(kept, num_kept);
  if (is_expert) p.offsets[e] = offset;
  if (e == 0) {
    if (num_rows > p.max_rows) fail("route_map: more rows than were expected", num_rows);
    p.offsets[p.num_local] = num_rows;
    *p.extent = num_rows;
    *p.dropped = assigned - num_kept;
  }
  return rows - kept;
}

/// Turns counts by run into sums of those before, expert by expert, and leaves the totals. Threads
/// that share an expert take stretches of runs.
__device__ __forceinline__ void place_runs_of_experts(const RoutePlaces& p, int32_t* totals) {
  constexpr int kAtOnce = 8;  // read before any is waited for
  constexpr int kMostSharers = 32;
  __shared__ int32_t stretches[kScanThreads];
  const int sharers = min(kScanThreads / p.num_local, kMostSharers);
  const int e = threadIdx.x % p.num_local;
  const int own = threadIdx.x / p.num_local;
  const int64_t stretch = (p.num_runs + sharers - 1) / sharers;
  const int64_t first = min(own * stretch, p.num_runs);
  const int64_t last = own < sharers ? min(first + stretch, p.num_runs) : first;
  int32_t* const counts = p.counts_RN + e;
  int32_t sum = 0;
#pragma unroll 8
  for (int64_t run = first; run < last; ++run) sum += counts[run * p.num_local];
  stretches[threadIdx.x] = sum;
  __syncthreads();
  if (own >= sharers) return;
  int32_t place = 0;
  for (int other = 0; other < own; ++other) place += stretches[other * p.num_local + e];
  if (own == sharers - 1) totals[e] = place + sum;
  for (int64_t begin = first; begin < last; begin += kAtOnce) {
    int32_t held[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      held[i] = begin + i < last ? counts[(begin + i) * p.num_local] : 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i < last) counts[(begin + i) * p.num_local] = place;
      place += held[i];
    }
  }
}

__global__ void __launch_bounds__(kScanThreads) place_runs(const RoutePlaces p) {
  wait_for_earlier();
  let_next_begin_if_short();
  __shared__ int32_t totals[kScanThreads];
  totals[threadIdx.x] = 0;
  __syncthreads();
  if (p.num_local > 0) place_runs_of_experts(p, totals);
  __syncthreads();
  int32_t total = 0;
  const int32_t start = block_exclusive_sum(totals[threadIdx.x], total);
  const int e = threadIdx.x;
  if (e < p.num_local) p.starts[e] = start;
  if (e == 0) p.starts[p.num_local] = total;
  if (p.source_R == nullptr) return;
  const int64_t padding = place_rows(p.rows, totals[e], total);
  if (e >= p.num_local) return;
  p.rows.counts_kept[e] = totals[e];
  int32_t* after = p.source_R + p.rows.offsets[e] + totals[e];
  for (int64_t i = 0; i < padding; ++i) after[i] = -1;
}

__global__ void __launch_bounds__(kWarps* kLanes) sort_runs(const RouteSort p) {
  wait_for_earlier();
  let_next_begin_if_short();
  extern __shared__ int32_t places[];  // [kWarps, N]
  const RouteAssignments& a = p.assignments;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  int32_t* own = places + warp * a.num_local;
  for (int e = threadIdx.x; e < kWarps * a.num_local; e += blockDim.x) places[e] = 0;
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRouteRun + warp * kPerWarp;
  const int64_t count = count_of(a);
  int experts[kPerWarp / kLanes];
#pragma unroll
  for (int step = 0; step < kPerWarp / kLanes; ++step) {
    const int64_t i = first + step * kLanes + lane;
    experts[step] = i < count ? local_expert(a, a.expert_of[i]) : -1;
    if (experts[step] >= 0) atomicAdd(&own[experts[step]], 1);
  }
  __syncthreads();
  // Counts of the warps become the places where each warp's begin.
  for (int e = threadIdx.x; e < a.num_local; e += blockDim.x) {
    int32_t place = static_cast<int32_t>(p.starts[e]) +
                    p.places_RN[static_cast<int64_t>(blockIdx.x) * a.num_local + e];
    for (int w = 0; w < kWarps; ++w) {
      const int32_t here = places[w * a.num_local + e];
      places[w * a.num_local + e] = place;
      place += here;
    }
  }
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kPerWarp / kLanes; ++step) {
    const int expert = experts[step];
    const unsigned alike = __match_any_sync(kAllLanes, expert);
    const int before = __popc(alike & ((1U << lane) - 1));
    const int32_t place = expert >= 0 ? own[expert] + before : 0;
    __syncwarp();
    if (expert >= 0) {
      const int64_t i = first + step * kLanes + lane;
      p.sorted[place] = static_cast<int32_t>(i);
      if (p.place_of != nullptr) p.place_of[i] = place;
      if (before == 0) own[expert] = place + __popc(alike);
    }
    __syncwarp();
  }
}

/// What a group's assignments are ranked by, best first: probability, then index.
struct Rank {
  const RouteKeep& p;

  __device__ __forceinline__ uint64_t of(int32_t assignment) const {
    uint32_t key = 0;
    if (p.by_probs) {
      float prob = p.probs[assignment];
      if (isnan(prob)) prob = -INFINITY;
      const uint32_t bits = prob == 0.0F ? 0U : __float_as_uint(prob);
      key = (bits & 0x80000000U) != 0 ? bits : ~(bits | 0x80000000U);  // the highest is least
    }
    return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(assignment);
  }
};

/// The `wanted`-th least rank (from 1) of n assignments, found digit by digit.
__device__ uint64_t find_rank(const Rank& rank, const int32_t* assignments, int64_t n,
                              int64_t wanted) {
  __shared__ int32_t digits[256];
  __shared__ uint64_t found_prefix;
  __shared__ int64_t found_wanted;
  uint64_t prefix = 0;
  for (int shift = rank.p.by_probs ? 56 : 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) digits[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t first = 0; first < n; first += kScanThreads) {
      const int64_t i = first + threadIdx.x;
      const uint64_t value = i < n ? rank.of(assignments[i]) : 0;
      const bool counts = i < n && (shift == 56 || value >> (shift + 8) == prefix);
      // Ranks are much alike, so a warp's are counted together.
      const int digit = counts ? static_cast<int>(value >> shift & 0xFF) : -1;
      const unsigned alike = __match_any_sync(kAllLanes, digit);
      if (counts && __ffs(static_cast<int>(alike)) - 1 == static_cast<int>(threadIdx.x % kLanes))
        atomicAdd(&digits[digit], __popc(alike));
    }
    __syncthreads();
    const int32_t here = threadIdx.x < 256 ? digits[threadIdx.x] : 0;
    int32_t total = 0;
    const int32_t before = block_exclusive_sum(here, total);
    if (before < wanted && wanted <= before + here) {
      found_prefix = prefix << 8 | threadIdx.x;
      found_wanted = wanted - before;
    }
    __syncthreads();
    prefix = found_prefix;
    wanted = found_wanted;
  }
  return prefix;
}

/// Moves those of an expert's n assignments that rank up to `last` to its front, in their order;
/// returns how many they are.
__device__ int64_t compact(const Rank& rank, int32_t* assignments, int64_t n, uint64_t last) {
  int64_t kept = 0;
  for (int64_t first = 0; first < n; first += kScanThreads) {
    const int64_t i = first + threadIdx.x;
    const int32_t assignment = i < n ? assignments[i] : 0;
    const int keep = i < n && rank.of(assignment) <= last ? 1 : 0;
    int total = 0;
    const int before = block_exclusive_sum(keep, total);  // all have read before any writes
    if (keep != 0) assignments[kept + before] = assignment;
    kept += total;
  }
  return kept;
}

__global__ void __launch_bounds__(kScanThreads) keep_best(const RouteKeep p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int first = blockIdx.x * p.group_size;
  const int last = first + p.group_size;
  int32_t* assignments = p.sorted + p.starts[first];
  const int64_t n = p.starts[last] - p.starts[first];
  if (p.rows_limit > 0 && n > p.rows_limit) {
    if (threadIdx.x == 0)
      fail("route_map: experts that share a capacity get more rows than their limit", n);
    return;
  }
  if (n <= p.capacity) {
    for (int e = first + threadIdx.x; e < last; e += kScanThreads)
      p.counts_kept[e] = p.starts[e + 1] - p.starts[e];
    return;
  }
  const Rank rank{p};
  const uint64_t last_rank = find_rank(rank, assignments, n, p.capacity);
  for (int e = first; e < last; ++e) {
    __syncthreads();
    const int64_t kept =
        compact(rank, p.sorted + p.starts[e], p.starts[e + 1] - p.starts[e], last_rank);
    if (threadIdx.x == 0) p.counts_kept[e] = kept;
  }
}

__global__ void __launch_bounds__(kScanThreads) place_experts(const RouteOffsets p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int e = threadIdx.x;
  place_rows(p, e < p.num_local ? p.counts_kept[e] : 0, p.starts[p.num_local]);
}

/// Blocks (x) share the rows of an expert (y).
__global__ void __launch_bounds__(kFillThreads) write_rows(const RouteRows p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int e = blockIdx.y;
  const int32_t* sorted = p.sorted + p.starts[e];
  const int64_t first = p.offsets[e];
  const int64_t num_rows = p.offsets[e + 1] - first;
  const int64_t kept = p.counts_kept[e];
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x; i < num_rows;
       i += static_cast<int64_t>(gridDim.x) * kFillThreads) {
    const int32_t assignment = i < kept ? sorted[i] : -1;
    p.source_R[first + i] = assignment;
    if (assignment >= 0) p.row_of_TK[assignment] = static_cast<int32_t>(first + i);
  }
}

__global__ void __launch_bounds__(kFillThreads) clear_rows(const CapacityOrder p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
  if (t < p.num_tokens) p.row_of_T[t] = -1;
}

__global__ void __launch_bounds__(kFillThreads) put_in_order(const CapacityOrder p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
  if (row >= p.num_tokens) return;
  const int64_t token = p.positions[row];
  if (token < 0 || token >= p.num_tokens ||
      atomicExch(&p.row_of_T[token], static_cast<int32_t>(row)) != -1)
    fail("capacity_limit: the positions are no permutation of the tokens; wrong or double", token);
  for (int k = 0; k < p.top_k; ++k) {
    p.ordered_idx_TK[token * p.top_k + k] = p.expert_idx_TK[row * p.top_k + k];
    p.ordered_probs_TK[token * p.top_k + k] = p.probs_TK[row * p.top_k + k];
  }
}

/// Starts with all dropped.
__global__ void __launch_bounds__(kScanThreads) drop_own(const CapacityOwn p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int32_t* idx = p.expert_idx_TK + p.begin * p.top_k;
  int64_t assigned = 0;
  for (int64_t i = threadIdx.x; i < p.count * p.top_k; i += kScanThreads) {
    p.own_idx[i] = -1;
    assigned += idx[i] >= 0 ? 1 : 0;
  }
  int64_t total = 0;
  block_exclusive_sum(assigned, total);
  if (threadIdx.x == 0) *p.dropped = total;
}

__global__ void __launch_bounds__(kFillThreads) keep_own(const CapacityOwn p) {
  wait_for_earlier();
  let_next_begin_if_short();
  const int e = blockIdx.y;
  const int32_t* sorted = p.sorted + p.starts[e];
  const int64_t kept = p.counts_kept[e];
  int own = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x; i < kept;
       i += static_cast<int64_t>(gridDim.x) * kFillThreads) {
    const int64_t token = sorted[i] / p.top_k;
    const int64_t row = (p.row_of_T == nullptr ? token : p.row_of_T[token]) - p.begin;
    if (row < 0 || row >= p.count) continue;
    p.own_idx[row * p.top_k + sorted[i] % p.top_k] = e;
    ++own;
  }
  own = __reduce_add_sync(kAllLanes, own);
  if (threadIdx.x % kLanes == 0 && own > 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(p.dropped),
              static_cast<unsigned long long>(-static_cast<long long>(own)));
}

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>((count + kFillThreads - 1) / kFillThreads);
}

/// Blocks that share one expert's rows: rows are many where experts are few.
dim3 expert_grid(int num_experts) {
  const int each = (512 + num_experts - 1) / num_experts;
  return {static_cast<unsigned>(each), static_cast<unsigned>(num_experts)};
}

}  // namespace

void launch_route_count(const RouteCount& count, cudaStream_t stream) {
  const auto runs = static_cast<unsigned>(route_runs(count.assignments.bound));
  if (runs == 0) return;
  const size_t num_bytes = static_cast<size_t>(count.assignments.num_local) * sizeof(int32_t);
  launch_early(count_runs, {runs, kWarps * kLanes, num_bytes}, stream, count);
}

void launch_route_places(const RoutePlaces& places, cudaStream_t stream) {
  launch_early(place_runs, {1, kScanThreads}, stream, places);
}

void launch_route_sort(const RouteSort& sort, cudaStream_t stream) {
  const auto runs = static_cast<unsigned>(route_runs(sort.assignments.bound));
  if (runs == 0) return;
  const size_t num_bytes =
      kWarps * static_cast<size_t>(sort.assignments.num_local) * sizeof(int32_t);
  launch_early(sort_runs, {runs, kWarps * kLanes, num_bytes}, stream, sort);
}

void launch_route_keep(const RouteKeep& keep, cudaStream_t stream) {
  launch_early(keep_best, {static_cast<unsigned>(keep.num_groups), kScanThreads}, stream, keep);
}

void launch_route_offsets(const RouteOffsets& offsets, cudaStream_t stream) {
  launch_early(place_experts, {1, kScanThreads}, stream, offsets);
}

void launch_route_rows(const RouteRows& rows, cudaStream_t stream) {
  launch_early(write_rows, {expert_grid(rows.num_local), kFillThreads}, stream, rows);
}

void launch_capacity_order(const CapacityOrder& order, cudaStream_t stream) {
  if (order.num_tokens == 0) return;
  launch_early(clear_rows, {blocks_for(order.num_tokens), kFillThreads}, stream, order);
  launch_early(put_in_order, {blocks_for(order.num_tokens), kFillThreads}, stream, order);
}

void launch_capacity_own(const CapacityOwn& own, cudaStream_t stream) {
  launch_early(drop_own, {1, kScanThreads}, stream, own);
  launch_early(keep_own, {expert_grid(own.num_experts), kFillThreads}, stream, own);
}

}  // namespace tessera::cuda
