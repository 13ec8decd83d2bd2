// The layout of few assignments to few experts by one block: the stable counting sort of
// route_map.cu without a launch between its phases.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/route_map/route_assignments.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kLanes;
static_assert(kWarps == kLanes, "a lane takes the count of each warp");
static_assert(kThreads == kRouteRun, "threads take as many assignments each as there are runs");

struct Shared {
  /// By warp and expert, then those of the warps before. Rows begin in different banks.
  int32_t counts[kWarps][kRouteFewExperts + 1];
  int32_t totals[kRouteFewExperts];
  int32_t offsets[kRouteFewExperts + 1];
};

/// Loads the warp's assignments from `first` on, 32 at each step: their experts, or -1.
template <int kSteps>
__device__ __forceinline__ void load_experts(const RouteAssignments& a, int first,
                                             int (&experts)[kSteps]) {
  const int64_t count = count_of(a);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = first + step * kLanes;
    experts[step] = i < count ? a.expert_of[i] : -1;
  }
#pragma unroll
  for (int& expert : experts) expert = local_expert(a, expert);
}

/// Counts the warp's assignments into `counts`, zeros before; `ranks` are how many of the same
/// expert each has before it in the warp.
template <int kSteps>
__device__ __forceinline__ void count_experts(const int (&experts)[kSteps], int lane,
                                              int32_t* counts, int32_t (&ranks)[kSteps]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int expert = experts[step];
    const unsigned alike = __match_any_sync(kAllLanes, expert);
    const int before = __popc(alike & ((1U << lane) - 1));
    ranks[step] = expert >= 0 ? counts[expert] + before : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) counts[expert] = ranks[step] + __popc(alike);
    __syncwarp();
  }
}

/// By one warp: the first row of every expert, and what depends on these alone.
__device__ __forceinline__ void place_experts(const RouteOffsets& p, int lane, Shared& shared) {
  const auto alignment = static_cast<uint32_t>(p.alignment);
  int32_t num_rows = 0;
  for (int first = 0; first < p.num_local; first += kLanes) {
    const int e = first + lane;
    const int32_t kept = e < p.num_local ? shared.totals[e] : 0;
    const auto rows = static_cast<int32_t>((kept + alignment - 1) / alignment * alignment);
    const int32_t inclusive = warp_inclusive_sum(rows, lane);
    if (e < p.num_local) {
      const int32_t offset = num_rows + inclusive - rows;
      shared.offsets[e] = offset;
      p.offsets[e] = offset;
      p.counts_kept[e] = kept;
    }
    num_rows += __shfl_sync(kAllLanes, inclusive, kLanes - 1);
  }
  if (lane != 0) return;
  if (num_rows > p.max_rows) fail("route_map: more rows than were expected", num_rows);
  shared.offsets[p.num_local] = num_rows;
  p.offsets[p.num_local] = num_rows;
  *p.extent = num_rows;
  *p.dropped = 0;
}

template <int kSteps>
__global__ void __launch_bounds__(kThreads) map_few(const RouteFew p) {
  wait_for_earlier();
  let_next_begin();  // one block leaves the next kernel's all other SMs
  __shared__ Shared shared;
  const RouteAssignments& a = p.assignments;
  const int lane = threadIdx.x % kLanes;
  const int warp = threadIdx.x / kLanes;
  const int first = warp * kSteps * kLanes + lane;
  int experts[kSteps];
  int32_t ranks[kSteps];
  for (int e = lane; e < a.num_local; e += kLanes) shared.counts[warp][e] = 0;
  load_experts(a, first, experts);
  __syncwarp();
  count_experts(experts, lane, shared.counts[warp], ranks);
  __syncthreads();
  for (int e = warp; e < a.num_local; e += kWarps) {
    const int32_t here = shared.counts[lane][e];
    const int32_t inclusive = warp_inclusive_sum(here, lane);
    shared.counts[lane][e] = inclusive - here;
    if (lane == kLanes - 1) shared.totals[e] = inclusive;
  }
  __syncthreads();
  if (warp == 0) place_experts(p.rows, lane, shared);
  __syncthreads();

#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int i = first + step * kLanes;
    const int expert = experts[step];
    int32_t row = -1;
    if (expert >= 0) {
      row = shared.offsets[expert] + shared.counts[warp][expert] + ranks[step];
      p.source_R[row] = i;
    }
    if (i < count_of(a)) p.row_of_TK[i] = row;
  }
  for (int e = warp; e < a.num_local; e += kWarps) {
    const int32_t end = shared.offsets[e + 1];
    for (int32_t row = shared.offsets[e] + shared.totals[e] + lane; row < end; row += kLanes)
      p.source_R[row] = -1;
  }
}

}  // namespace

void launch_route_few(const RouteFew& few, cudaStream_t stream) {
  const auto launch = [&](auto kernel) { launch_early(kernel, {1, kThreads}, stream, few); };
  const int64_t each = route_runs(few.assignments.bound);
  if (each <= 1) return launch(map_few<1>);
  if (each <= 2) return launch(map_few<2>);
  if (each <= 4) return launch(map_few<4>);
  launch(map_few<8>);
}

}  // namespace tessera::cuda
