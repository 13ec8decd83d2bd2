#include <algorithm>
#include <cmath>

#include "ops/adamw/adamw.h"

namespace tessera {
namespace {

constexpr int64_t kChunk = 16384;

struct Slice {
  const float* grad;
  float* master;
  float* m;
  float* v;
  Bf16* weight;  // null where there is none
};

/// What one step multiplies by, worked out in double from the step's parameters.
struct Factors {
  float grad_scale;
  float decay;
  float new_m;
  float old_v;
  float new_v;
  float sqrt_bias2;
  float eps;
  float step_size;
};

Factors make_factors(const AdamWSpec& spec, const float* step_params) {
  const double lr = step_params[0];
  return {.grad_scale = step_params[3],
          .decay = static_cast<float>(1.0 - lr * spec.weight_decay),
          .new_m = static_cast<float>(1.0 - spec.beta1),
          .old_v = static_cast<float>(spec.beta2),
          .new_v = static_cast<float>(1.0 - spec.beta2),
          .sqrt_bias2 = static_cast<float>(std::sqrt(static_cast<double>(step_params[2]))),
          .eps = static_cast<float>(spec.eps),
          .step_size = static_cast<float>(lr / step_params[1])};
}

void update(const Factors f, const Slice& slice, int64_t n) {
  const float* __restrict grad = slice.grad;
  float* __restrict master = slice.master;
  float* __restrict m = slice.m;
  float* __restrict v = slice.v;
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * f.grad_scale;
    m[i] += (g - m[i]) * f.new_m;
    v[i] = v[i] * f.old_v + f.new_v * g * g;
    const float denominator = std::sqrt(v[i]) / f.sqrt_bias2 + f.eps;
    master[i] = master[i] * f.decay - f.step_size * (m[i] / denominator);
  }
}

void round_to_weight(const float* __restrict master, Bf16* __restrict weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) weight[i] = Bf16(master[i]);
}

Slice advance(const Slice& slice, int64_t first) {
  return {slice.grad + first, slice.master + first, slice.m + first, slice.v + first,
          slice.weight == nullptr ? nullptr : slice.weight + first};
}

void adamw(const Operator& op, const KernelArgs& args) {
  const AdamWSpec& spec = static_cast<const AdamW&>(op).spec();
  const Factors factors = make_factors(spec, args.in(1).as<float>());
  const Slice all = {args.in(0).as<float>(), args.out(0).as<float>(), args.out(1).as<float>(),
                     args.out(2).as<float>(), spec.bf16_weight ? args.out(3).as<Bf16>() : nullptr};
  const int64_t n = args.in(0).num_elements();
  const int64_t num_chunks = (n + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static) if (num_chunks > 1)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t first = chunk * kChunk;
    const int64_t length = std::min(kChunk, n - first);
    const Slice slice = advance(all, first);
    update(factors, slice, length);
    if (slice.weight != nullptr) round_to_weight(slice.master, slice.weight, length);
  }
}

}  // namespace

void add_adamw_cpu(KernelTable& table) {
  table["adamw"] = adamw;
}

}  // namespace tessera
