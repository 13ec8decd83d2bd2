#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/adamw/adamw.h"
#include "ops/cpu_dispatch.h"

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

void update(const AdamWFactors f, float scale, const Slice& slice, int64_t n) {
  const float* __restrict grad = slice.grad;
  float* __restrict master = slice.master;
  float* __restrict m = slice.m;
  float* __restrict v = slice.v;
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * scale;
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

void update_slice(const AdamWFactors& factors, float scale, const Slice& all, int64_t n) {
  const int64_t num_chunks = (n + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static) if (num_chunks > 1)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t first = chunk * kChunk;
    const int64_t length = std::min(kChunk, n - first);
    const Slice slice = advance(all, first);
    update(factors, scale, slice, length);
    if (slice.weight != nullptr) round_to_weight(slice.master, slice.weight, length);
  }
}

void adamw(const AdamW& op, const KernelArgs& args) {
  const size_t num_slices = args.inputs.size() - AdamW::kNumTrailing;
  const float* grad_scale = args.in(num_slices + AdamW::kGradScale).as<float>();
  if (grad_scale[1] != 0) return;
  AdamWFactors factors{};
  std::memcpy(&factors, args.in(num_slices + AdamW::kFactors).as<float>(), sizeof(factors));
  for (size_t i = 0; i < num_slices; ++i) {
    const auto out = args.outputs.subspan(i * op.num_outputs(), op.num_outputs());
    update_slice(factors, grad_scale[0],
                 {args.in(i).as<float>(), out[0].as<float>(), out[1].as<float>(),
                  out[2].as<float>(), op.spec().bf16_weight ? out[3].as<Bf16>() : nullptr},
                 args.in(i).num_elements());
  }
}

}  // namespace

TESSERA_CPU_KERNELS(add_adamw_cpu, table) {
  add_kernel<AdamW>(table, adamw);
}

}  // namespace tessera
