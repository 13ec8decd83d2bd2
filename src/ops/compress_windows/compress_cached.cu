// A block has a token, which mostly ends no window, and some elements of its entry. What is kept
// moves on in a kernel of its own, when nobody reads it.
#include "ops/compress_windows/compress_cached_kernels.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fail.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/paged_attention/kept_rows.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 128;

// The row of the state for a position of a token's sequence.
__device__ int64_t state_row(const CachedWindows& call, const KeptToken& own, int position) {
  const int slot = call.slots == nullptr ? 0 : call.slots[own.sequence];
  if (slot < 0 || slot >= call.num_slots) fail("a slot of compress_windows", slot);
  return static_cast<int64_t>(slot) * 2 * call.rate + position % (2 * call.rate);
}

struct TermPair {
  float logit;
  float value;
};

// The term of a position, of element `at` of kv and gate.
template <typename T>
__device__ __forceinline__ TermPair term_of(const CachedWindows& call, const KeptToken& own,
                                            int64_t token, int position, int slot_of_bias,
                                            int64_t at) {
  const int64_t row = token - (own.position - position);
  const T* kv = static_cast<const T*>(call.kv) + row * call.width + at;
  const T* gate = static_cast<const T*>(call.gate) + row * call.width + at;
  if (row < own.first_in_hand) {
    kv = static_cast<const T*>(call.state) + state_row(call, own, position) * 2 * call.width + at;
    gate = kv + call.width;
  }
  return {load<1>(gate)[0] + call.bias[slot_of_bias * call.width + at], load<1>(kv)[0]};
}

// Calls visit(term) for all terms of element c of the entry that a token ends.
template <typename T, typename Visit>
__device__ __forceinline__ void for_each_term(const CachedWindows& call, const KeptToken& own,
                                              int64_t token, int64_t c, const Visit& visit) {
  const int first = own.position - call.rate + 1;
  if (call.overlaps && first > 0) {
    for (int j = 0; j < call.rate; ++j)
      visit(term_of<T>(call, own, token, first - call.rate + j, j, c));
  }
  for (int j = 0; j < call.rate; ++j)
    visit(term_of<T>(call, own, token, first + j, j, call.width - call.size + c));
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    compress_kept(const __grid_constant__ CachedWindows call,
                  const __grid_constant__ CachedEntries to) {
  wait_for_earlier();
  const int64_t token = blockIdx.x;
  const int64_t c = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const KeptToken own = KeptToken::find(call.tokens, token);
  const bool ends = own.sequence >= 0 && own.position % call.rate == call.rate - 1;
  if (c == 0) {
    const int entry = own.position / call.rate;
    to.positions[token] = ends ? entry * call.rate : 0;
    to.rows[token] =
        ends ? static_cast<int32_t>(call.first_entry + own.row(call.tokens, token, entry)) : -1;
  }
  if (c >= call.size) return;
  float value = 0;
  if (ends) {
    float max = -INFINITY;
    for_each_term<T>(call, own, token, c, [&](TermPair term) { max = fmaxf(max, term.logit); });
    float weights = 0;
    for_each_term<T>(call, own, token, c, [&](TermPair term) {
      const float weight = expf(term.logit - max);
      weights += weight;
      value = fmaf(weight, term.value, value);
    });
    value /= weights;
  }
  store(static_cast<T*>(to.entries) + token * call.size + c, Floats<1>{{value}});
}

// Of a sequence's tokens in hand the last ones alone: each row has one writer.
template <typename T>
__global__ void __launch_bounds__(kThreads) keep_last(const __grid_constant__ CachedWindows call) {
  wait_for_earlier();
  const int64_t token = blockIdx.x;
  const KeptToken own = KeptToken::find(call.tokens, token);
  if (own.sequence < 0) return;
  const int64_t end = call.tokens.cu_seqlens == nullptr ? call.num_tokens
                                                        : call.tokens.cu_seqlens[own.sequence + 1];
  if (token + 2 * call.rate < end) return;
  T* const row = static_cast<T*>(call.state) + state_row(call, own, own.position) * 2 * call.width;
  for (int64_t at = threadIdx.x; at < call.width; at += kThreads) {
    row[at] = static_cast<const T*>(call.kv)[token * call.width + at];
    row[call.width + at] = static_cast<const T*>(call.gate)[token * call.width + at];
  }
}

}  // namespace

void launch_compress_windows_cached(const CachedWindows& call, const CachedEntries& to,
                                    cudaStream_t stream) {
  if (call.num_tokens == 0) return;
  const auto tokens = static_cast<unsigned>(call.num_tokens);
  const dim3 blocks{tokens, static_cast<unsigned>(divide_up(call.size, kThreads))};
  with_type(call.dtype, [&]<typename T>() {
    launch_early(compress_kept<T>, {blocks, kThreads}, stream, call, to);
    launch_early(keep_last<T>, {tokens, kThreads}, stream, call);
  });
}

}  // namespace tessera::cuda
