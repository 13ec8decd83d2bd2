// A thread finds one row of one token.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/window_choice/window_choice_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

__device__ int32_t entry_of(const WindowChoices& call, int64_t token, int32_t position, int idx) {
  if (idx >= call.entries) return -1;
  if (call.chosen != nullptr) {
    const int32_t row = call.chosen[token * call.entries + idx];
    return row < 0 ? -1 : static_cast<int32_t>(call.num_tokens) + row;
  }
  if (idx >= (position + 1) / call.rate) return -1;
  return static_cast<int32_t>(call.num_tokens + (token - position) / call.rate + idx);
}

__global__ void __launch_bounds__(kThreads)
    choose_rows(const __grid_constant__ WindowChoices call) {
  wait_for_earlier();
  const int64_t width = call.window + call.entries;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t token = i / width;
  if (token >= call.num_tokens) return;
  const int32_t position = call.positions[token];
  if (position < 0 || position > token) fail("a position of window_choice", position);
  if (call.chosen == nullptr && (position + 1) / call.rate > call.entries)
    fail("the entries of window_choice's tokens", (position + 1) / call.rate);
  const int idx = static_cast<int>(i % width);
  const int seen = min(position + 1, call.window);
  call.rows[i] = idx < seen ? static_cast<int32_t>(token - seen + 1 + idx)
                            : entry_of(call, token, position, idx - seen);
}

}  // namespace

void launch_window_choice(const WindowChoices& call, cudaStream_t stream) {
  const int64_t count = call.num_tokens * (call.window + call.entries);
  if (count == 0) return;
  launch_early(choose_rows, {static_cast<unsigned>(divide_up(count, kThreads)), kThreads}, stream,
               call);
}

}  // namespace tessera::cuda
