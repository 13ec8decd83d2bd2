#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/dispatch_plan/dispatch_plan_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// The gathered counts, by the coordinates of the rank that has the rows.
struct Counts {
  const DispatchPlanning& p;

  __device__ __forceinline__ int64_t of(int ep_rank, int etp_rank, int expert) const {
    const int64_t rank = static_cast<int64_t>(ep_rank) * p.etp_size + etp_rank;
    const int64_t count = p.counts[rank * p.first_experts[p.ep_size] + expert];
    if (count < 0) fail("dispatch_plan: a count is negative", count);
    return count;
  }
  /// The rows of one rank for the experts of EP coordinate `target`.
  __device__ __forceinline__ int64_t between(int ep_rank, int etp_rank, int target) const {
    int64_t sum = 0;
    for (int e = p.first_experts[target]; e < p.first_experts[target + 1]; ++e)
      sum += of(ep_rank, etp_rank, e);
    return sum;
  }
};

__global__ void __launch_bounds__(kThreads)
    plan_exchange(const __grid_constant__ DispatchPlanning p) {
  wait_for_earlier();
  const Counts counts{p};
  for (int peer = threadIdx.x; peer < p.ep_size; peer += kThreads) {
    p.send_rows[peer] = counts.between(p.ep_rank, p.etp_rank, peer);
    p.receive_rows[peer] = counts.between(peer, p.etp_rank, p.ep_rank);
  }
  for (int etp_rank = threadIdx.x; etp_rank < p.etp_size; etp_rank += kThreads) {
    int64_t rows = 0;
    for (int source = 0; source < p.ep_size; ++source)
      rows += counts.between(source, etp_rank, p.ep_rank);
    p.gather_rows[etp_rank] = rows;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int64_t received = 0;
  for (int peer = 0; peer < p.ep_size; ++peer) received += p.receive_rows[peer];
  int64_t gathered = 0;
  for (int etp_rank = 0; etp_rank < p.etp_size; ++etp_rank) gathered += p.gather_rows[etp_rank];
  if (received > p.max_received) fail("dispatch_plan: more rows arrive than expected", received);
  if (gathered > p.max_gathered)
    fail("dispatch_plan: more rows are gathered than expected", gathered);
  *p.received = received;
  *p.gathered = gathered;
}

/// A *run* is one source rank's rows for one local expert, in the order in which they stand. One
/// warp adds their lengths up.
__global__ void __launch_bounds__(32) place_runs(const __grid_constant__ DispatchPlanning p) {
  wait_for_earlier();
  const Counts counts{p};
  const int lane = threadIdx.x;
  const int first_local = p.first_experts[p.ep_rank];
  const int num_local = p.first_experts[p.ep_rank + 1] - first_local;
  const int num_runs = p.etp_size * p.ep_size * num_local;
  int64_t before = 0;
  for (int first = 0; first < num_runs; first += 32) {
    const int run = first + lane;
    int64_t length = 0;
    if (run < num_runs) {
      const int source = run / num_local;
      length = counts.of(source % p.ep_size, source / p.ep_size, first_local + run % num_local);
    }
    int64_t end = length;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(kAllLanes, end, step);
      if (lane >= step) end += other;
    }
    if (run < num_runs) p.run_starts[run] = before + end - length;
    before += __shfl_sync(kAllLanes, end, 31);
  }
  if (lane == 0) p.run_starts[num_runs] = before;
}

__global__ void __launch_bounds__(kThreads)
    write_experts(const __grid_constant__ DispatchPlanning p) {
  wait_for_earlier();
  const int num_local = p.first_experts[p.ep_rank + 1] - p.first_experts[p.ep_rank];
  const int num_runs = p.etp_size * p.ep_size * num_local;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= p.run_starts[num_runs]) return;
  int low = 0;  // the last run that begins at or before the row
  int high = num_runs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.run_starts[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  p.expert_idx[row] = low % num_local;
}

}  // namespace

void launch_dispatch_plan(const DispatchPlanning& plan, cudaStream_t stream) {
  launch_early(plan_exchange, {1, kThreads}, stream, plan);
  launch_early(place_runs, {1, 32}, stream, plan);
  const int64_t blocks = (plan.max_gathered + kThreads - 1) / kThreads;
  if (blocks > 0)
    launch_early(write_experts, {static_cast<unsigned>(blocks), kThreads}, stream, plan);
}

}  // namespace tessera::cuda
