#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/dtype.h"
#include "ops/paged_attention/pages.h"

namespace tessera::cuda {

/// cache [capacity, width]: row to[t] becomes rows[t]; -1 writes nothing.
struct PageRows {
  DType dtype;
  int64_t num_rows;
  int64_t width;
  int64_t capacity;
  const void* rows;
  const int32_t* to;
  void* cache;
};
void launch_page_write(const PageRows& call, cudaStream_t stream);

/// The keys of a token are cut into runs, which blocks attend to side by side: pages of each, for
/// so many pages of a sequence.
constexpr int kMostRuns = 16;
constexpr int kLeastRunPages = 4;
constexpr int paged_run_pages(int64_t pages_per_sequence) {
  return std::max(kLeastRunPages,
                  static_cast<int>((pages_per_sequence + kMostRuns - 1) / kMostRuns));
}
constexpr int paged_runs(int64_t pages_per_sequence) {
  const int pages = paged_run_pages(pages_per_sequence);
  return static_cast<int>((pages_per_sequence + pages - 1) / pages);
}

/// With so many new tokens a sequence is read as a prompt, where a kernel for these is.
constexpr int kLeastPromptTokens = 4;

/// See PagedAttention. `partials` has, for each token, query head and run, the sum of its values;
/// `statistics` the largest score and the sum of exponentials: F32 [T, N, runs, Dv] and
/// [T, N, runs, 2].
struct PagedQueries {
  DType dtype;
  int64_t num_rows;
  int num_sequences;
  int pages_per_sequence;
  int num_pages;
  int num_heads;
  int num_kv_heads;
  int head_size;
  int head_size_v;
  float scale;
  int64_t window;
  int64_t chunk;
  const void* q;
  const void* keys;
  const void* values;
  const int32_t* cu_seqlens;
  const int32_t* lengths;
  const int32_t* page_table;
  void* o;
  float* lse;
  float* partials;
  float2* statistics;
  bool prompts_apart = false;  ///< sequences that are read as prompts are launch_paged_prompts'
};
void launch_paged_attention(const PagedQueries& call, cudaStream_t stream);

#ifdef __CUDACC__
/// The first key that the token at `position` sees.
__device__ inline int first_seen_key(int position, int64_t window, int64_t chunk) {
  if (chunk > 0) return static_cast<int>(position / chunk * chunk);
  const int64_t first = window > 0 ? position - window + 1 : 0;
  return first > 0 ? static_cast<int>(first) : 0;
}
#endif

/// The sequences of a call that are read as prompts.
void launch_paged_prompts(const PagedQueries& call, cudaStream_t stream);
/// Whether it takes the call's heads.
bool takes_prompts(const PagedQueries& call);

}  // namespace tessera::cuda
