// A thread finds one row of one token.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/paged_attention/kept_rows.cuh"
#include "ops/window_choice/window_choice_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

__device__ int32_t entry_of(const WindowChoices& call, const KeptToken& own, int64_t token,
                            int idx) {
  if (idx >= call.entries) return -1;
  if (call.chosen != nullptr) {
    const int32_t row = call.chosen[token * call.entries + idx];
    return row < 0 ? -1 : static_cast<int32_t>(call.first_entry + row);
  }
  if (idx >= (own.position + 1) / call.rate) return -1;
  return static_cast<int32_t>(call.first_entry + own.entry_row(call.tokens, token, idx, call.rate));
}

__global__ void __launch_bounds__(kThreads)
    choose_rows(const __grid_constant__ WindowChoices call) {
  wait_for_earlier();
  const int64_t width = call.window + call.entries;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t token = i / width;
  if (token >= call.num_tokens) return;
  const KeptToken own = KeptToken::find(call.tokens, token);
  if (own.sequence < 0) {
    call.rows[i] = -1;
    return;
  }
  if (call.chosen == nullptr && (own.position + 1) / call.rate > call.entries)
    fail("the entries of window_choice's tokens", (own.position + 1) / call.rate);
  const int idx = static_cast<int>(i % width);
  const int seen = min(own.position + 1, call.window);
  call.rows[i] =
      idx < seen ? static_cast<int32_t>(own.row(call.tokens, token, own.position - seen + 1 + idx))
                 : entry_of(call, own, token, idx - seen);
}

}  // namespace

void launch_window_choice(const WindowChoices& call, cudaStream_t stream) {
  const int64_t count = call.num_tokens * (call.window + call.entries);
  if (count == 0) return;
  launch_early(choose_rows, {static_cast<unsigned>(divide_up(count, kThreads)), kThreads}, stream,
               call);
}

}  // namespace tessera::cuda
