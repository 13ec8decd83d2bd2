#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/permute/permute.h"
#include "ops/permute/row_maps.h"
#include "ops/simd.h"

namespace tessera {
namespace {

void permute(const Permute& /*op*/, const Args<Permute>& args) {
  gather_rows(args.in(Permute::kX), args.in(Permute::kSource),
              top_k_of(args.in(Permute::kRowOf).shape), args.out(Permute::kRows));
}

/// One token's rows, the same for every element of them.
struct TokenRows {
  const int32_t* row_of_K;
  const float* probs_K;  ///< null: each row counts once
  int64_t top_k;
};

/// to = addend (unless null) + Σ_k p_k · y[row_k], dropped assignments left out.
template <typename T>
void combine_rows(const TokenRows& token, const T* y, int64_t width, const T* addend, T* to) {
  simd::for_each_vector(width, [&](int64_t i, auto lanes) {
    simd::Vec sum{};
    for (int64_t k = 0; k < token.top_k; ++k) {
      if (token.row_of_K[k] < 0) continue;
      const simd::Vec row = simd::load(y + token.row_of_K[k] * width + i, lanes);
      sum += token.probs_K == nullptr ? row : row * token.probs_K[k];
    }
    simd::store(to + i, addend == nullptr ? sum : simd::load(addend + i, lanes) + sum, lanes);
  });
}

/// Tokens whose rows are asked for before they are added up: they lie anywhere.
constexpr int64_t kTokensAhead = 2;

/// `addend` is null where there is none.
template <typename T>
void combine(const Tensor& y, const float* probs_TK, const Tensor& row_of_TK, const Tensor* addend,
             const Tensor& out) {
  const int64_t top_k = top_k_of(row_of_TK.shape);
  const int32_t* row_of = row_of_TK.as<int32_t>();
  const int64_t width = y.shape[1];
  const int64_t last = row_of_TK.shape[0] * top_k - 1;
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < row_of_TK.shape[0]; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t ahead = row_of[std::min((t + kTokensAhead) * top_k + k, last)];
      if (ahead >= 0) prefetch_bytes(y.as<T>() + ahead * width, width * sizeof(T));
    }
    const float* probs = probs_TK == nullptr ? nullptr : probs_TK + t * top_k;
    combine_rows({row_of + t * top_k, probs, top_k}, y.as<T>(), width,
                 addend == nullptr ? nullptr : addend->as<T>() + t * width,
                 out.as<T>() + t * width);
  }
}

void unpermute(const Unpermute& op, const Args<Unpermute>& args) {
  const Tensor* addend = op.addend() ? &args.in(Unpermute::kAddend) : nullptr;
  const bool is_f32 = args.in(Unpermute::kRows).dtype == DType::kF32;
  (is_f32 ? combine<float> : combine<Bf16>)(args.in(Unpermute::kRows), nullptr,
                                            args.in(Unpermute::kRowOf), addend,
                                            args.out(Unpermute::kY));
}

void unpermute_weighted(const UnpermuteWeighted& op, const Args<UnpermuteWeighted>& args) {
  using Op = UnpermuteWeighted;
  const Tensor* addend = op.addend() ? &args.in(Op::kAddend) : nullptr;
  const bool is_f32 = args.in(Op::kRows).dtype == DType::kF32;
  (is_f32 ? combine<float> : combine<Bf16>)(args.in(Op::kRows), args.in(Op::kProbs).as<float>(),
                                            args.in(Op::kRowOf), addend, args.out(Op::kY));
}

/// to = prob · grad; returns ⟨y, grad⟩.
template <typename T>
float backward_row(const T* grad, const T* y, float prob, int64_t width, T* to) {
  simd::Vec dot{};
  simd::for_each_vector(width, [&](int64_t i, auto lanes) {
    const simd::Vec g = simd::load(grad + i, lanes);
    dot += g * simd::load(y + i, lanes);
    simd::store(to + i, g * prob, lanes);
  });
  return simd::sum(dot);
}

template <typename T>
void weighted_backward(const Args<UnpermuteWeightedBackward>& args) {
  using Op = UnpermuteWeightedBackward;
  const T* grad_TH = args.in(Op::kGrad).as<T>();
  const T* y_RH = args.in(Op::kRows).as<T>();
  const float* probs_TK = args.in(Op::kProbs).as<float>();
  const int32_t* source_R = args.in(Op::kSource).as<int32_t>();
  T* grad_y_RH = args.out(Op::kGradRows).as<T>();
  const auto grad_probs_TK = args.out(Op::kGradProbs).span<float>();
  const int64_t top_k = top_k_of(args.in(Op::kProbs).shape);
  const int64_t width = args.in(Op::kGrad).shape[1];
  std::ranges::fill(grad_probs_TK, 0.0F);
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < args.in(Op::kSource).shape[0]; ++r) {
    const int32_t source = source_R[r];
    T* to = grad_y_RH + r * width;
    if (source < 0) {
      std::fill_n(to, width, T(0.0F));
      continue;
    }
    grad_probs_TK[source] = backward_row(grad_TH + source / top_k * width, y_RH + r * width,
                                         probs_TK[source], width, to);
  }
}

void unpermute_weighted_backward(const UnpermuteWeightedBackward& /*op*/,
                                 const Args<UnpermuteWeightedBackward>& args) {
  const bool is_f32 = args.in(UnpermuteWeightedBackward::kGrad).dtype == DType::kF32;
  (is_f32 ? weighted_backward<float> : weighted_backward<Bf16>)(args);
}

/// to[i] = from[index[i]], 0 where the index is negative.
void gather(const Tensor& from, const Tensor& index, const Tensor& to) {
  const float* values = from.as<float>();
  const auto indices = index.span<int32_t>();
  float* result = to.as<float>();
#pragma omp parallel for schedule(static)
  for (size_t i = 0; i < indices.size(); ++i) {
    result[i] = indices[i] < 0 ? 0.0F : values[indices[i]];
  }
}

void permute_probs(const PermuteProbs& /*op*/, const Args<PermuteProbs>& args) {
  using Op = PermuteProbs;
  gather(args.in(Op::kProbs), args.in(Op::kSource), args.out(Op::kRowProbs));
}

void unpermute_probs(const UnpermuteProbs& /*op*/, const Args<UnpermuteProbs>& args) {
  using Op = UnpermuteProbs;
  gather(args.in(Op::kRowProbs), args.in(Op::kRowOf), args.out(Op::kProbs));
}

}  // namespace

TESSERA_CPU_KERNELS(add_permute_cpu, table) {
  add_kernel<Permute>(table, permute, {.takes = takes_scaled_rows});
  add_kernel<Unpermute>(table, unpermute);
  add_kernel<PermuteProbs>(table, permute_probs);
  add_kernel<UnpermuteProbs>(table, unpermute_probs);
  add_kernel<UnpermuteWeighted>(table, unpermute_weighted);
  add_kernel<UnpermuteWeightedBackward>(table, unpermute_weighted_backward);
}

}  // namespace tessera
