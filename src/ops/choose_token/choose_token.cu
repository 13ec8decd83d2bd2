// The next token of each row: a block has a row, whose parts its warps read again for each step.
// What may be chosen is found by the largest key, an order of logits, that leaves enough of them,
// one bit in a pass. Weights are whole numbers, so that sums are the same in any order.
#include <cmath>

#include "ops/choose_token/choose_token_kernels.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/vector.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr float kWholeWeight = 0x1.0p40F;

using Word = unsigned long long;

struct Sum {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Largest {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a < b ? b : a;
  }
};

/// Over the block, the same in all threads; all threads call it.
template <typename V, typename Combine>
__device__ V reduce(V value, Combine combine) {
  __shared__ V of_warps[kWarps];
  for (int step = kWarp / 2; step > 0; step /= 2)
    value = combine(value, __shfl_xor_sync(~0U, value, step));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = of_warps[0];
  for (int warp = 1; warp < kWarps; ++warp) value = combine(value, of_warps[warp]);
  return value;
}

/// Keys of logits, in their order: those of the type's own bits.
template <typename T>
struct Keys {
  static constexpr int kBits = 8 * sizeof(T);
  static constexpr int kShift = 32 - kBits;

  static __device__ uint32_t of(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0F);  // of both zeros the same
    return (bits >> 31 != 0 ? ~bits : bits | 0x80000000U) >> kShift;
  }
  static __device__ float value(uint32_t key) {
    const uint32_t bits = key << kShift;
    return __uint_as_float(bits >> 31 != 0 ? bits & 0x7FFFFFFFU : ~bits & ~0U << kShift);
  }
};

/// A row of logits, of which a warp has a part, without gaps and in the order of ids.
template <typename T, int kWidth>
struct Row {
  const T* logits;
  int packs;
  int begin;  // the warp's
  int end;

  __device__ Row(const T* first, int size) : logits(first), packs(size / kWidth) {
    const int each = (packs + kWarps - 1) / kWarps;
    begin = min(static_cast<int>(threadIdx.x) / kWarp * each, packs);
    end = min(begin + each, packs);
  }
  /// Calls use(id, logit) for all that are this thread's.
  template <typename Use>
  __device__ void for_each(Use use) const {
    for (int pack = begin + static_cast<int>(threadIdx.x) % kWarp; pack < end; pack += kWarp) {
      const Floats<kWidth> values = load<kWidth>(logits + int64_t{pack} * kWidth);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) use(pack * kWidth + i, values[i]);
    }
  }
};

/// Weights of logits after temperature, in 2^-40 of the largest's.
struct Weights {
  float best;
  float factor;  // of the logits' differences, to powers of two

  __device__ Weights(float largest, double temperature)
      : best(largest), factor(static_cast<float>(1.4426950408889634 / temperature)) {}
  __device__ Word of(float logit) const {
    return logit == best ? static_cast<Word>(kWholeWeight)
                         : __float2ull_rn(exp2f((logit - best) * factor) * kWholeWeight);
  }
};

/// What may be chosen: keys above `key`, and the first `ties` ids that have it.
struct Cut {
  uint32_t key = 0;  // which no number has
  Word ties = 0;
};

/// The row, and the ids that may be chosen.
template <typename T, int kWidth>
struct Choice {
  using Key = Keys<T>;

  const Row<T, kWidth>& row;
  const Weights& weights;
  int limit;
  Cut cut;

  /// The sum over the ids of keys from `least` on that may be chosen, those of the cut's key apart.
  template <typename Of>
  __device__ Word sum_above(uint32_t least, Of of) const {
    Word sum = 0;
    row.for_each([&](int id, float logit) {
      const uint32_t key = Key::of(logit);
      if (key >= least && key > cut.key && id < limit) sum += of(logit);
    });
    return reduce(sum, Sum());
  }
  /// Keeps the fewest of the largest whose sum comes to `goal`.
  template <typename Of>
  __device__ void cut_where(Word goal, Of of) {
    const Word at_cut = cut.ties == 0 ? 0 : cut.ties * of(Key::value(cut.key));
    uint32_t least = 0;
    for (uint32_t bit = 1U << (Key::kBits - 1); bit != 0; bit >>= 1) {
      const uint32_t tried = least | bit;
      const Word reached = sum_above(tried, of) + (tried <= cut.key ? at_cut : 0);
      if (reached >= goal) least = tried;
    }
    const Word above = sum_above(least + 1, of);
    const Word each = of(Key::value(least));
    cut = {least, (goal - above + each - 1) / each};
  }
  __device__ void cut_to_count(int count) {
    cut_where(count, [](float) { return Word{1}; });
  }
  __device__ void cut_to_share(double share) {
    const auto of = [this](float logit) { return weights.of(logit); };
    const Word all = sum_above(0, of) + (cut.ties == 0 ? 0 : cut.ties * of(Key::value(cut.key)));
    const Word goal = __double2ull_ru(share * __ull2double_rn(all));
    cut_where(max(Word{1}, min(goal, all)), of);
  }
};

/// What a part of the row weighs, and how many of its ids have the cut's key.
struct Part {
  Word weight = 0;
  Word ties = 0;
};

/// By one warp: the id in whose weight `place` lies; `ties` more of the cut's key are kept.
template <typename T, int kWidth>
__device__ int find_in_part(const Choice<T, kWidth>& choice, Word place, Word ties) {
  using Key = Keys<T>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int first = choice.row.begin; first < choice.row.end; first += kWarp) {
    const int pack = first + lane;
    Floats<kWidth> values{};
    Word own[kWidth] = {};
    Word own_ties = 0;
    if (pack < choice.row.end) {
      values = load<kWidth>(choice.row.logits + int64_t{pack} * kWidth);
#pragma unroll
      for (int i = 0; i < kWidth; ++i)
        own_ties += pack * kWidth + i < choice.limit && Key::of(values[i]) == choice.cut.key;
    }
    Word ties_before = own_ties;
    for (int step = 1; step < kWarp; step *= 2) {
      const Word below = __shfl_up_sync(~0U, ties_before, step);
      if (lane >= step) ties_before += below;
    }
    const Word all_ties = __shfl_sync(~0U, ties_before, kWarp - 1);
    ties_before -= own_ties;
    Word weight = 0;
    if (pack < choice.row.end) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const uint32_t key = Key::of(values[i]);
        const bool tie = key == choice.cut.key;
        if (pack * kWidth + i < choice.limit &&
            (key > choice.cut.key || (tie && ties_before < ties)))
          own[i] = choice.weights.of(values[i]);
        if (tie) ++ties_before;
        weight += own[i];
      }
    }
    Word before = weight;
    for (int step = 1; step < kWarp; step *= 2) {
      const Word below = __shfl_up_sync(~0U, before, step);
      if (lane >= step) before += below;
    }
    const Word all = __shfl_sync(~0U, before, kWarp - 1);
    before -= weight;
    if (place < all) {
      int found = -1;
      if (place >= before && place < before + weight) {
        Word left = place - before;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (found < 0 && left < own[i]) found = pack * kWidth + i;
          if (found < 0) left -= own[i];
        }
      }
      return __reduce_max_sync(~0U, found);
    }
    place -= all;
    ties -= min(ties, all_ties);
  }
  return -1;
}

/// By the block; the id, in one thread at least, and −1 in the others.
template <typename T, int kWidth>
__device__ int draw(const Choice<T, kWidth>& choice, Word uniform) {
  __shared__ Part parts[kWarps];
  Part own;
  choice.row.for_each([&](int id, float logit) {
    if (id >= choice.limit) return;
    const uint32_t key = Keys<T>::of(logit);
    if (key > choice.cut.key) own.weight += choice.weights.of(logit);
    own.ties += key == choice.cut.key;
  });
  for (int step = kWarp / 2; step > 0; step /= 2) {
    own.weight += __shfl_xor_sync(~0U, own.weight, step);
    own.ties += __shfl_xor_sync(~0U, own.ties, step);
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) parts[warp] = own;
  __syncthreads();
  const Word of_tie = choice.cut.ties == 0 ? 0 : choice.weights.of(Keys<T>::value(choice.cut.key));
  Word total = 0;
  Word ties = choice.cut.ties;
  Word before = 0;
  Word ties_left = 0;
  Word weight = 0;
  for (int i = 0; i < kWarps; ++i) {
    const Word kept = min(ties, parts[i].ties);
    const Word all = parts[i].weight + kept * of_tie;
    if (i == warp) {
      before = total;
      ties_left = ties;
      weight = all;
    }
    total += all;
    ties -= kept;
  }
  const Word place = __umul64hi(uniform << 11, total);
  if (place < before || place >= before + weight) return -1;
  return find_in_part(choice, place - before, ties_left);
}

/// What a row's first reading finds.
struct Extremes {
  float largest = -INFINITY;
  bool is_nan = false;
  Word first = 0;  // of the ids below a limit, the largest's key and, inverted, its lowest id

  template <typename T, int kWidth>
  __device__ Extremes(const Row<T, kWidth>& row, int limit) {
    row.for_each([&](int id, float logit) {
      largest = fmaxf(largest, logit);
      is_nan |= isnan(logit);
      const Word order = Word{Keys<T>::of(logit)} << 32 | (~0U - static_cast<uint32_t>(id));
      if (id < limit) first = max(first, order);
    });
    largest = reduce(largest, Largest());
    is_nan = __syncthreads_or(is_nan) != 0;
    first = reduce(first, Largest());
  }
  __device__ int best_id() const { return static_cast<int>(~0U - static_cast<uint32_t>(first)); }
  __device__ uint32_t best_key() const { return static_cast<uint32_t>(first >> 32); }
};

template <typename T, int kWidth>
__device__ int choose(const Row<T, kWidth>& row, int limit, const Extremes& extremes,
                      const TokenRule& rule) {
  if (rule.temperature == 0) return extremes.best_id();
  const Weights weights(Keys<T>::value(extremes.best_key()), rule.temperature);
  Choice<T, kWidth> choice{row, weights, limit, {}};
  if (rule.top_k > 0 && rule.top_k < limit) choice.cut_to_count(rule.top_k);
  if (rule.top_p < 1) choice.cut_to_share(rule.top_p);
  return reduce(draw(choice, rule.uniform), Largest());
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) choose_kernel(const RowsToChoose p) {
  wait_for_earlier();
  let_next_begin();
  const TokenRule& rule = p.rules[blockIdx.x];
  int32_t& token = p.tokens[blockIdx.x];
  double& log_probability = p.log_probabilities[blockIdx.x];
  if (rule.given == TokenRule::kNothing) {
    token = -1;
    log_probability = 0;
    return;
  }
  const T* const logits = static_cast<const T*>(p.logits) + int64_t{blockIdx.x} * p.vocab_size;
  const Row<T, kWidth> row(logits, p.vocab_size);
  const int limit = rule.vocab_size > 0 ? min(rule.vocab_size, p.vocab_size) : p.vocab_size;
  const Extremes extremes(row, limit);
  if (extremes.is_nan || !isfinite(extremes.largest)) {
    token = -1;
    log_probability = NAN;
    return;
  }
  float sum = 0;
  row.for_each([&](int, float logit) { sum += expf(logit - extremes.largest); });
  const double normaliser = extremes.largest + log(reduce(static_cast<double>(sum), Sum()));
  const int chosen = rule.given >= 0 ? rule.given : choose(row, limit, extremes, rule);
  if (threadIdx.x != 0) return;
  token = chosen;
  log_probability = static_cast<double>(load<1>(logits + chosen)[0]) - normaliser;
}

}  // namespace

void launch_choose_token(const RowsToChoose& call, cudaStream_t stream) {
  if (call.rows == 0) return;
  const bool vectors = are_whole_vectors(call.dtype, call.vocab_size) && are_aligned(call.logits);
  with_vectors(call.dtype, vectors, [&]<typename T, int kWidth>() {
    launch_early(choose_kernel<T, kWidth>, {static_cast<unsigned>(call.rows), kThreads}, stream,
                 call);
  });
}

}  // namespace tessera::cuda
