#pragma once

#include "ops/cuda/vector.cuh"
#include "ops/ssd_scan/ssd_scan_kernels.h"

namespace tessera::cuda {

/// A token's step and what follows from it.
struct SsdStep {
  float size;
  float log_decay;
  float rate;   ///< -exp(A_log)
  float slope;  ///< of the step by dt
};

/// `at`: of the token and head in dt.
template <typename T>
__device__ __forceinline__ SsdStep step_of(const SsdRows& x, int64_t at) {
  const int head = static_cast<int>(at % x.heads);
  const float dt = static_cast<float>(static_cast<const T*>(x.dt)[at]) + x.dt_bias[head];
  SsdStep step;
  step.size = fmaxf(dt, 0.0F) + log1pf(expf(-fabsf(dt)));
  step.slope = 1.0F / (1.0F + expf(-dt));
  if (step.size < x.min_step || (x.max_step > 0 && step.size > x.max_step)) {
    step.size = step.size < x.min_step ? x.min_step : x.max_step;
    step.slope = 0;
  }
  step.rate = -expf(x.a_log[head]);
  step.log_decay = step.rate * step.size;
  return step;
}

/// The pass over the states S [N, P]: from what chunks write alone to the states behind them.
SsdPass ssd_state_pass(const SsdRows& x, const SsdMarks& marks);

/// From what parts of the tokens, one after the other, add to states, to what lies before each.
struct SsdStatePass {
  const float* chunk_decays;  ///< [chunks, H]
  float* states;              ///< [chunks, H, elements]: each part's own, then what comes in
  float* ends;           ///< [H, elements]: before the first, then behind the last; or null for 0
  const int32_t* start;  ///< of the former, which are read unless it is 0
  int64_t elements;      ///< of a head
  int heads;
  int chunks;
};
void pass_ssd_parts(const SsdStatePass& pass, bool reverse, cudaStream_t stream);

/// From each chunk's own part of `states` [chunks,H,N,P] to what lies before the chunks. `ends`:
/// states [H,N,P] before the first chunk, which become those behind the last; or null for 0.
void pass_ssd_states(const SsdRows& x, const SsdMarks& marks, float* states, float* ends,
                     cudaStream_t stream);

/// The same from the last chunk on: to the gradients of what lies behind the chunks.
void pass_ssd_state_grads(const SsdRows& x, const SsdMarks& marks, float* grads,
                          cudaStream_t stream);

/// Fills all marks.
void find_ssd_states(const SsdRows& x, const SsdMarks& marks, float* ends, cudaStream_t stream);

}  // namespace tessera::cuda
