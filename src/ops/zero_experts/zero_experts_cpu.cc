#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/storage.h"
#include "ops/zero_experts/zero_experts.h"

namespace tessera {
namespace {

/// The choices of one token.
struct Choices {
  const float* probs;
  const int32_t* experts;
  int64_t top_k;
  int64_t num_experts;

  template <typename Op>
  static Choices of(const Args<Op>& args, int64_t num_experts, int64_t token) {
    const int64_t top_k = args.in(Op::kExpertIdx).shape[1];
    return {args.in(Op::kProbs).template as<float>() + token * top_k,
            args.in(Op::kExpertIdx).template as<int32_t>() + token * top_k, top_k, num_experts};
  }
  float weight() const {
    float sum = 0;
    for (int64_t k = 0; k < top_k; ++k) sum += experts[k] >= num_experts ? probs[k] : 0.0F;
    return sum;
  }
};

void zero_experts(const ZeroExperts& op, const Args<ZeroExperts>& args) {
  using Op = ZeroExperts;
  const int64_t num_experts = op.spec().num_experts;
  const Shape& shape = args.in(Op::kX).shape;
  const int64_t width = shape[1];
  with_storage(args.in(Op::kX).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* const x = args.in(Op::kX).as<T>();
    T* const y = args.out(Op::kY).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < shape[0]; ++token) {
      const Choices choices = Choices::of(args, num_experts, token);
      int32_t* const routed = args.out(Op::kRoutedIdx).as<int32_t>() + token * choices.top_k;
      for (int64_t k = 0; k < choices.top_k; ++k)
        routed[k] = choices.experts[k] < num_experts ? choices.experts[k] : -1;
      const float weight = choices.weight();
      const int64_t at = token * width;
      simd::for_each_vector(width, [&](int64_t i, auto lanes) {
        simd::store(y + at + i, simd::load(x + at + i, lanes) * weight, lanes);
      });
    }
  });
}

void zero_experts_backward(const ZeroExpertsBackward& op, const Args<ZeroExpertsBackward>& args) {
  using Op = ZeroExpertsBackward;
  const Shape& shape = args.in(Op::kX).shape;
  const int64_t width = shape[1];
  with_storage(args.in(Op::kX).dtype, [&](auto storage) {
    using T = decltype(storage);
    const T* const x = args.in(Op::kX).as<T>();
    const T* const grad = args.in(Op::kGrad).as<T>();
    T* const grad_x = args.out(Op::kGradX).as<T>();
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < shape[0]; ++token) {
      const Choices choices = Choices::of(args, op.spec().num_experts, token);
      const float weight = choices.weight();
      const int64_t at = token * width;
      simd::Vec dots{};
      simd::for_each_vector(width, [&](int64_t i, auto lanes) {
        const simd::Vec g = simd::load(grad + at + i, lanes);
        dots += g * simd::load(x + at + i, lanes);
        simd::store(grad_x + at + i, g * weight, lanes);
      });
      const float dot = simd::sum(dots);
      float* const grad_probs = args.out(Op::kGradProbs).as<float>() + token * choices.top_k;
      for (int64_t k = 0; k < choices.top_k; ++k)
        grad_probs[k] = choices.experts[k] >= choices.num_experts ? dot : 0.0F;
    }
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_zero_experts_cpu, table) {
  add_kernel<ZeroExperts>(table, zero_experts);
  add_kernel<ZeroExpertsBackward>(table, zero_experts_backward);
}

}  // namespace tessera
