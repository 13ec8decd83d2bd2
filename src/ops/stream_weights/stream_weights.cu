// A thread has a token: few operations, and those on numbers of its own.
#include "ops/cuda/column_sums.cuh"
#include "ops/stream_weights/stream_weights_kernels.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 64;

__device__ __forceinline__ int64_t own_token() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

/// The rows of a token; null stays null.
template <typename T>
__device__ __forceinline__ T* row_of(T* rows, int64_t token, int64_t width) {
  return rows == nullptr ? nullptr : rows + token * width;
}

template <int kStreams>
__global__ void __launch_bounds__(kThreads)
    make_weights(const __grid_constant__ StreamTokens p, float* pre, float* post, float* comb) {
  wait_for_earlier();
  const int64_t t = own_token();
  if (t >= p.tokens) return;
  const TokenStreams<kStreams> token(p.rule, p.logits_TM + t * p.count, p.scale, p.base_M);
  token.write(p.rule, pre + t * kStreams, row_of(post, t, kStreams),
              row_of(comb, t, kStreams * kStreams));
}

template <int kStreams>
__global__ void __launch_bounds__(kThreads)
    make_grads(const __grid_constant__ StreamTokens p, const __grid_constant__ StreamTokenGrads g) {
  wait_for_earlier();
  using Token = TokenStreams<kStreams>;
  const int64_t t = own_token();
  if (t >= p.tokens) return;
  float grads[Token::kLogits];
  const Token token(p.rule, p.logits_TM + t * p.count, p.scale, p.base_M);
  token.write_grads(p.rule, g.pre + t * kStreams, row_of(g.post, t, kStreams),
                    row_of(g.comb, t, kStreams * kStreams), grads);
  for (int m = 0; m < p.count; ++m) {
    g.z_TM[t * p.count + m] = grads[m];
    g.logits_TM[t * p.count + m] = grads[m] * p.scale[Token::part_of(m)];
  }
}

/// What tokens add to the gradients of the bases.
struct BaseTerms {
  struct Loaded {
    float value;
  };
  int64_t count;
  const float* z_TM;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t column) const {
    return {z_TM[row * count + column]};
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<1>& sums) const {
    sums[0] += loaded.value;
  }
};

/// What logits add to the gradients of the scales: rows are n·n of each token, of which pre and
/// post have n alone.
struct ScaleTerms {
  struct Loaded {
    float value;
  };
  int64_t count;
  int64_t streams;
  const float* z_TM;
  const float* logits_TM;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t part) const {
    const int64_t of_token = streams * streams;
    const int64_t element = row % of_token;
    if (part < 2 && element >= streams) return {0};
    const int64_t at = row / of_token * count + part * streams + element;
    return {z_TM[at] * logits_TM[at]};
  }
  __device__ __forceinline__ void add(const Loaded& loaded, Floats<1>& sums) const {
    sums[0] += loaded.value;
  }
};

}  // namespace

void launch_stream_weights(const StreamTokens& call, float* pre, float* post, float* comb,
                           cudaStream_t stream) {
  if (call.tokens == 0) return;
  const auto blocks = static_cast<unsigned>(divide_up(call.tokens, kThreads));
  with_streams(call.streams, [&]<int kStreams>() {
    launch_early(make_weights<kStreams>, {blocks, kThreads}, stream, call, pre, post, comb);
  });
}

void launch_stream_weights_backward(const StreamTokens& call, const StreamTokenGrads& grads,
                                    cudaStream_t stream) {
  if (call.tokens == 0) return;
  const auto blocks = static_cast<unsigned>(divide_up(call.tokens, kThreads));
  with_streams(call.streams, [&]<int kStreams>() {
    launch_early(make_grads<kStreams>, {blocks, kThreads}, stream, call, grads);
  });
  if (grads.base.sums != nullptr) {
    launch_sum_columns<1>(BaseTerms{call.count, grads.z_TM}, {.bound = call.tokens}, call.count,
                          grads.base, grads.partials, grads.num_sms, stream);
  }
  if (grads.scale.sums != nullptr) {
    launch_sum_columns<1>(ScaleTerms{call.count, call.streams, grads.z_TM, call.logits_TM},
                          {.bound = call.tokens * call.streams * call.streams},
                          call.rule.collapses ? 1 : 3, grads.scale, grads.partials, grads.num_sms,
                          stream);
  }
}

}  // namespace tessera::cuda
