// Gradients of x, B and C are passes of their own over the chunks. That of a decay's logarithm is
// a sum over the tokens from its own on, within its sequence: the state times its gradient
// grows by what a token reads and falls by what it wrote. It starts anew in each chunk, so that
// rounding errors do not grow with the sequence.
#include "ops/cuda/column_sums.cuh"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/ssd_scan/ssd_scan_kernels.h"
#include "ops/ssd_scan/ssd_steps.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// The states behind the chunks times their gradients [chunks, H]; a block takes one.
__global__ void __launch_bounds__(kThreads)
    join_chunk_ends(const float* states, const float* grads, int64_t elements, int64_t heads,
                    int chunks, float* ends) {
  wait_for_earlier();
  __shared__ float sums[kWarps];
  const int64_t chunk_head = blockIdx.x;
  const bool is_last = chunk_head / heads == chunks - 1;
  float sum = 0;
  if (!is_last) {
    const float* behind = states + (chunk_head + heads) * elements;  // before the next chunk
    const float* grad = grads + chunk_head * elements;
    for (int64_t i = threadIdx.x; i < elements; i += kThreads) sum += behind[i] * grad[i];
  }
  sum = sum_lanes(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
  for (int warp = 0; warp < kWarps; ++warp) total += sums[warp];
  ends[chunk_head] = total;
}

/// Heads' gradients of a group's vector.
struct HeadSums {
  const float* of_heads;  // [T,H,N]
  const void* vectors;    // [T,G,N]
  void* grads;            // [T,G,N]
  float* dots;            // [T,H]: of the vector and a head's gradient
  int heads;
  int groups;
  int size;
};

/// A block takes a group of a token.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_group_heads(const __grid_constant__ HeadSums p) {
  wait_for_earlier();
  const int64_t token_group = blockIdx.x;
  const int group_heads = p.heads / p.groups;
  const float* of_heads = p.of_heads + token_group * group_heads * p.size;
  const T* vector = static_cast<const T*>(p.vectors) + token_group * p.size;
  for (int head = static_cast<int>(threadIdx.x) / 32; head < group_heads; head += kWarps) {
    float dot = 0;
    for (int i = static_cast<int>(threadIdx.x) % 32; i < p.size; i += 32)
      dot += of_heads[static_cast<int64_t>(head) * p.size + i] * static_cast<float>(vector[i]);
    dot = sum_lanes(dot);
    if (threadIdx.x % 32 == 0) p.dots[token_group * group_heads + head] = dot;
  }
  T* to = static_cast<T*>(p.grads) + token_group * p.size;
  for (int i = static_cast<int>(threadIdx.x); i < p.size; i += kThreads) {
    float sum = 0;
    for (int head = 0; head < group_heads; ++head)
      sum += of_heads[static_cast<int64_t>(head) * p.size + i];
    store(to + i, Floats<1>{sum});
  }
}

/// x times the gradient of y, of each head of each token; a warp takes one.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dot_heads(const T* x, const T* grad, int64_t rows, int size, float* dots) {
  wait_for_earlier();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  float dot = 0;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < size; i += 32)
    dot += static_cast<float>(x[row * size + i]) * static_cast<float>(grad[row * size + i]);
  dot = sum_lanes(dot);
  if (threadIdx.x % 32 == 0) dots[row] = dot;
}

/// From the sums to the gradients of dt, and to what tokens add to those of A_log and dt_bias; a
/// thread takes a chunk of a head.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    finish_steps(const __grid_constant__ SsdRows x, const float* decays, SsdBackward scratch,
                 T* grad_dt) {
  wait_for_earlier();
  const int head = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
  if (head >= x.heads) return;
  const int first = static_cast<int>(blockIdx.x) * kSsdRows;
  const int last = min(first + kSsdRows, x.tokens);
  float of_log = scratch.chunk_ends[static_cast<int64_t>(blockIdx.x) * x.heads + head];
  for (int token = last - 1; token >= first; --token) {
    const int64_t at = static_cast<int64_t>(token) * x.heads + head;
    const SsdStep step = step_of<T>(x, at);
    const float written = scratch.writes[at];
    of_log = decays[at] == 0.0F ? 0.0F : of_log + (scratch.reads[at] - written);
    // A step of 0 has a slope of 0.
    const float of_step = (step.size > 0 ? written / step.size : 0.0F) + of_log * step.rate;
    const float of_dt = of_step * step.slope;
    store(grad_dt + at, Floats<1>{of_dt});
    scratch.reads[at] = of_log * step.log_decay;
    scratch.writes[at] = of_dt;
  }
}

/// The pass with the gradients of the states, [N, P] as these.
SsdPass grad_pass(const SsdRows& x, const SsdBackward& scratch, const SsdGrads& grads) {
  SsdPass pass{};
  pass.write = {.data = x.c, .count = x.groups, .size = x.state_size};
  pass.value = {.data = grads.y, .count = x.heads, .size = x.head_size};
  pass.read = {.data = x.b, .count = x.groups, .size = x.state_size};
  pass.reverse = true;
  pass.states = scratch.state_grads;
  pass.summed_stride = x.head_size;
  pass.own_stride = 1;
  return pass;
}

void find_state_grads(const SsdRows& x, const SsdMarks& marks, const SsdBackward& scratch,
                      const SsdGrads& grads, cudaStream_t stream) {
  SsdPass pass = grad_pass(x, scratch, grads);
  pass.output = SsdOutput::kStates;
  launch_ssd_pass(x, marks.decays, pass, stream);
  pass_ssd_state_grads(x, marks, scratch.state_grads, stream);
  const auto chunks = static_cast<int>(num_ssd_chunks(x.tokens));
  launch_early(join_chunk_ends, {static_cast<unsigned>(chunks * x.heads), kThreads}, stream,
               static_cast<const float*>(marks.states),
               static_cast<const float*>(scratch.state_grads),
               static_cast<int64_t>(x.state_size) * x.head_size, static_cast<int64_t>(x.heads),
               chunks, scratch.chunk_ends);
}

void find_grad_x(const SsdRows& x, const SsdMarks& marks, const SsdBackward& scratch,
                 const SsdGrads& grads, cudaStream_t stream) {
  SsdPass pass = grad_pass(x, scratch, grads);
  pass.starts_at_states = true;
  pass.output = SsdOutput::kRows;
  pass.out = grads.x;
  pass.out_factor = marks.steps;
  launch_ssd_pass(x, marks.decays, pass, stream);
}

/// The same matrices turned: sums over a head's elements give vectors of groups.
SsdPass turned(const SsdPass& pass, const SsdVectors& read, float* sums) {
  SsdPass other = pass;
  other.write = pass.value;
  other.value = pass.write;
  other.read = read;
  other.summed_stride = 1;
  other.own_stride = pass.summed_stride;
  other.starts_at_states = true;
  other.output = SsdOutput::kSums;
  other.out = sums;
  return other;
}

void sum_of_heads(const SsdRows& x, const SsdBackward& scratch, const void* vectors, void* grads,
                  float* dots, cudaStream_t stream) {
  const HeadSums sums = {.of_heads = scratch.of_heads,
                         .vectors = vectors,
                         .grads = grads,
                         .dots = dots,
                         .heads = x.heads,
                         .groups = x.groups,
                         .size = x.state_size};
  with_type(x.dtype, [&]<typename T>() {
    launch_early(sum_group_heads<T>, {static_cast<unsigned>(x.tokens * x.groups), kThreads}, stream,
                 sums);
  });
}

void find_grads_of_groups(const SsdRows& x, const SsdMarks& marks, const SsdBackward& scratch,
                          const SsdGrads& grads, cudaStream_t stream) {
  const SsdVectors of_y = {.data = grads.y, .count = x.heads, .size = x.head_size};
  const SsdVectors written = {
      .data = x.x, .count = x.heads, .size = x.head_size, .factor = marks.steps};
  launch_ssd_pass(x, marks.decays, turned(ssd_state_pass(x, marks), of_y, scratch.of_heads),
                  stream);
  sum_of_heads(x, scratch, x.c, grads.c, scratch.reads, stream);
  launch_ssd_pass(x, marks.decays, turned(grad_pass(x, scratch, grads), written, scratch.of_heads),
                  stream);
  sum_of_heads(x, scratch, x.b, grads.b, scratch.writes, stream);
}

template <typename T>
void finish(const SsdRows& x, const SsdMarks& marks, const SsdBackward& scratch,
            const SsdGrads& grads, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(x.tokens) * x.heads;
  launch_early(dot_heads<T>, {static_cast<unsigned>(divide_up(rows, kWarps)), kThreads}, stream,
               static_cast<const T*>(x.x), static_cast<const T*>(grads.y), rows, x.head_size,
               scratch.skips);
  const dim3 blocks(static_cast<unsigned>(num_ssd_chunks(x.tokens)),
                    static_cast<unsigned>(divide_up(x.heads, kThreads)));
  launch_early(finish_steps<T>, {blocks, kThreads}, stream, x,
               static_cast<const float*>(marks.decays), scratch, static_cast<T*>(grads.dt));
}

}  // namespace

void launch_ssd_scan_backward(const SsdRows& x, const SsdMarks& marks, const SsdBackward& scratch,
                              const SsdGrads& grads, cudaStream_t stream) {
  if (x.tokens == 0) return;
  find_ssd_states(x, marks, nullptr, stream);
  find_state_grads(x, marks, scratch, grads, stream);
  find_grad_x(x, marks, scratch, grads, stream);
  find_grads_of_groups(x, marks, scratch, grads, stream);
  with_type(x.dtype, [&]<typename T>() { finish<T>(x, marks, scratch, grads, stream); });
  const auto add_to = [&](const Accumulator& accumulator, const float* terms) {
    if (accumulator.sums == nullptr) return;
    launch_column_sums({.dtype = DType::kF32,
                        .rows = {.bound = x.tokens},
                        .cols = x.heads,
                        .x = terms,
                        .accumulator = accumulator,
                        .partials = scratch.partials,
                        .num_sms = grads.num_sms},
                       stream);
  };
  add_to(grads.a_log, scratch.reads);
  add_to(grads.skip, scratch.skips);
  add_to(grads.dt_bias, scratch.writes);
}

}  // namespace tessera::cuda
