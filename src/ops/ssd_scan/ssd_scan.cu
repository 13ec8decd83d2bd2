// The scan in three steps: each chunk's own part of the state behind it, all chunks at once; the
// states between chunks, from one to the next; then the results, all chunks at once.
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/parts.cuh"
#include "ops/cuda/vector.cuh"
#include "ops/ssd_scan/ssd_scan_kernels.h"
#include "ops/ssd_scan/ssd_steps.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    mark_steps(const __grid_constant__ SsdRows x, SsdMarks marks) {
  wait_for_earlier();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= static_cast<int64_t>(x.tokens) * x.heads) return;
  const int token = static_cast<int>(at / x.heads);
  const SsdStep step = step_of<T>(x, at);
  const bool begins = x.bounds == nullptr
                          ? token == 0 && *x.start == 0
                          : x.bounds[find_part(x.bounds, x.num_sequences, token)] == token;
  marks.steps[at] = step.size;
  marks.decays[at] = begins ? 0.0F : expf(step.log_decay);
}

constexpr int kPassed = 4;  // chunks whose states are loaded at once

/// A thread takes an element of all chunks, the last one first where kReverse.
template <bool kReverse>
__global__ void __launch_bounds__(kThreads) pass_states(const __grid_constant__ SsdStatePass p) {
  wait_for_earlier();
  const int64_t total = p.heads * p.elements;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= total) return;
  const int64_t head = at / p.elements;
  float state = p.ends == nullptr || *p.start == 0 ? 0.0F : p.ends[at];
  const auto chunk_of = [&](int i) {
    return static_cast<int64_t>(kReverse ? p.chunks - 1 - i : i);
  };
  for (int first = 0; first < p.chunks; first += kPassed) {
    float own[kPassed];
#pragma unroll
    for (int i = 0; i < kPassed; ++i) {
      if (first + i < p.chunks) own[i] = p.states[chunk_of(first + i) * total + at];
    }
#pragma unroll
    for (int i = 0; i < kPassed; ++i) {
      if (first + i >= p.chunks) break;
      const int64_t chunk = chunk_of(first + i);
      const float decay = p.chunk_decays[chunk * p.heads + head];
      p.states[chunk * total + at] = state;
      state = (decay == 0.0F ? 0.0F : decay * state) + own[i];
    }
  }
  if (p.ends != nullptr) p.ends[at] = state;
}

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>(divide_up(threads, kThreads));
}

SsdStatePass state_pass(const SsdRows& x, const SsdMarks& marks, float* states) {
  return {.chunk_decays = marks.chunk_decays,
          .states = states,
          .ends = nullptr,
          .start = x.start,
          .elements = static_cast<int64_t>(x.state_size) * x.head_size,
          .heads = x.heads,
          .chunks = static_cast<int>(num_ssd_chunks(x.tokens))};
}

void run_scan(const SsdRows& x, const SsdMarks& marks, void* y, float* ends, cudaStream_t stream) {
  find_ssd_states(x, marks, ends, stream);
  SsdPass pass = ssd_state_pass(x, marks);
  pass.read = {.data = x.c, .count = x.groups, .size = x.state_size};
  pass.output = SsdOutput::kRows;
  pass.starts_at_states = true;
  pass.out = y;
  launch_ssd_pass(x, marks.decays, pass, stream);
}

}  // namespace

SsdPass ssd_state_pass(const SsdRows& x, const SsdMarks& marks) {
  SsdPass pass{};
  pass.write = {.data = x.b, .count = x.groups, .size = x.state_size};
  pass.value = {.data = x.x, .count = x.heads, .size = x.head_size, .factor = marks.steps};
  pass.read = pass.write;
  pass.output = SsdOutput::kStates;
  pass.states = marks.states;
  pass.summed_stride = x.head_size;
  pass.own_stride = 1;
  return pass;
}

void launch_ssd_marks(const SsdRows& x, const SsdMarks& marks, cudaStream_t stream) {
  with_type(x.dtype, [&]<typename T>() {
    launch_early(mark_steps<T>, {blocks_of(static_cast<int64_t>(x.tokens) * x.heads), kThreads},
                 stream, x, marks);
  });
}

void pass_ssd_parts(const SsdStatePass& pass, bool reverse, cudaStream_t stream) {
  launch_early(reverse ? pass_states<true> : pass_states<false>,
               {blocks_of(pass.heads * pass.elements), kThreads}, stream, pass);
}

void pass_ssd_states(const SsdRows& x, const SsdMarks& marks, float* states, float* ends,
                     cudaStream_t stream) {
  SsdStatePass pass = state_pass(x, marks, states);
  pass.ends = ends;
  pass_ssd_parts(pass, false, stream);
}

void pass_ssd_state_grads(const SsdRows& x, const SsdMarks& marks, float* grads,
                          cudaStream_t stream) {
  pass_ssd_parts(state_pass(x, marks, grads), true, stream);
}

void find_ssd_states(const SsdRows& x, const SsdMarks& marks, float* ends, cudaStream_t stream) {
  launch_ssd_marks(x, marks, stream);
  SsdPass pass = ssd_state_pass(x, marks);
  pass.chunk_decays = marks.chunk_decays;
  launch_ssd_pass(x, marks.decays, pass, stream);
  pass_ssd_states(x, marks, marks.states, ends, stream);
}

void launch_ssd_scan(const SsdRows& x, const SsdMarks& marks, void* y, cudaStream_t stream) {
  if (x.tokens > 0) run_scan(x, marks, y, nullptr, stream);
}

void launch_ssd_scan_cached(const SsdRows& x, const SsdMarks& marks, void* y, float* states,
                            cudaStream_t stream) {
  if (x.tokens > 0) run_scan(x, marks, y, states, stream);
}

}  // namespace tessera::cuda
