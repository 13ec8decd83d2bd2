#include <algorithm>

#include "ops/activation_math.h"
#include "ops/cpu_dispatch.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/scaled_row_load.h"
#include "ops/storage.h"

namespace tessera {
namespace {

constexpr int64_t kRowBlock = 16;

/// Calls run(row, expert) for all routed rows, on all threads.
template <typename F>
void for_each_routed_row(std::span<const int64_t> offsets, F run) {
  const int64_t num_rows = offsets.back();
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < num_rows; first += kRowBlock) {
    int64_t expert = std::ranges::upper_bound(offsets, first) - offsets.begin() - 1;
    const int64_t last = std::min(first + kRowBlock, num_rows);
    for (int64_t row = first; row < last; ++row) {
      while (offsets[expert + 1] <= row) ++expert;
      run(row, expert);
    }
  }
}

void check_rows(const Tensor& rows, const Tensor& offsets) {
  const int64_t num_rows = offsets.span<int64_t>().back();
  ensure(num_rows == rows.shape[0], "expert_activation: offsets end at {} of {} rows", num_rows,
         rows.shape[0]);
}

void quantize_short_blocks(const Tensor& values, const Tensor& to) {
  quantize_on_host(Quantize(short_blocks()), values, to);
}

/// to = act(pre) · prob for one row, `width` elements before the next.
template <bool kGated, typename Fn, typename T>
void forward_row(Fn fn, const T* gate, int64_t width, float prob, int64_t size, T* to) {
  simd::for_each_vector(size, [=](int64_t i, auto lanes) {
    simd::prefetch(gate + width + i);
    simd::Vec value = fn.value(simd::load(gate + i, lanes));
    if constexpr (kGated) {
      simd::prefetch(gate + width + size + i);
      value *= fn.other(simd::load(gate + size + i, lanes));
    }
    simd::store(to + i, value * prob, lanes);
  });
}

template <typename T, typename Fn>
void forward(Fn fn, const ExpertActivation& op, const Args<ExpertActivation>& args) {
  using Op = ExpertActivation;
  const T* pre = args.in(Op::kPre).as<T>();
  const float* probs = op.apply_prob() ? args.in(Op::kProbs).as<float>() : nullptr;
  T* act = args.out(Op::kAct).as<T>();
  const int64_t pre_width = op.pre_width();
  const int64_t act_width = op.sizes().largest();
  const bool gated = is_gated(op.function().kind);
  for_each_routed_row(args.in(Op::kOffsets).span<int64_t>(), [&](int64_t row, int64_t expert) {
    const float prob = probs == nullptr ? 1.0F : probs[row];
    (gated ? forward_row<true, Fn, T>
           : forward_row<false, Fn, T>)(fn, pre + row * pre_width, pre_width, prob,
                                        op.sizes()[expert], act + row * act_width);
  });
}

void expert_activation(const ExpertActivation& op, const Args<ExpertActivation>& args) {
  check_rows(args.in(ExpertActivation::kPre), args.in(ExpertActivation::kOffsets));
  with_activation(op.function(), [&](auto fn) {
    if (args.in(ExpertActivation::kPre).dtype == DType::kF32) return forward<float>(fn, op, args);
    return forward<Bf16>(fn, op, args);
  });
  if (op.gives_fp8())
    quantize_short_blocks(args.out(ExpertActivation::kAct), args.out(ExpertActivation::kActFp8));
}

/// One row's gradients. Pre: where gates and ups are, a pointer or a ScaledRow.
template <typename T, typename Pre>
struct BackwardRow {
  const T* grad;
  int64_t grad_width;  ///< to the next row
  int64_t pre_width;   ///< likewise
  Pre pre;             ///< gates, and `size` elements behind them ups where the activation is gated
  float prob;
  int64_t size;
  T* grad_pre;
  T* act;  ///< forward_row's result, where it is wanted
};

/// Writes the row's gradient and returns that of its probability, Σ act · grad.
template <bool kGated, bool kGivesAct, typename Fn, typename T, typename Pre>
float backward_row(Fn fn, const BackwardRow<T, Pre> r) {
  using simd::load;
  using simd::prefetch;
  simd::Vec dot{};
  simd::for_each_vector(r.size, [&, r](int64_t i, auto lanes) {
    prefetch(r.grad + r.grad_width + i);
    prefetch(r.pre + r.pre_width + i);
    const Slope slope = fn.slope(load(r.pre + i, lanes));
    const simd::Vec grad = load(r.grad + i, lanes);
    const simd::Vec scaled = grad * r.prob;
    if constexpr (!kGated) {
      dot += slope.value * grad;
      simd::store(r.grad_pre + i, scaled * slope.derivative, lanes);
      if constexpr (kGivesAct) simd::store(r.act + i, slope.value * r.prob, lanes);
    } else {
      prefetch(r.pre + r.pre_width + r.size + i);
      const simd::Vec up = load(r.pre + r.size + i, lanes);
      const simd::Vec other = fn.other(up);
      const simd::Vec value = slope.value * other;
      dot += value * grad;
      simd::store(r.grad_pre + i, scaled * other * slope.derivative, lanes);
      simd::store(r.grad_pre + r.size + i, fn.other_grad(up, scaled * slope.value), lanes);
      if constexpr (kGivesAct) simd::store(r.act + i, value * r.prob, lanes);
    }
  });
  return simd::sum(dot);
}

/// backward_row of a call: which depends on the activation and on what is wanted.
template <typename Fn, typename T, typename Pre>
auto choose_backward_row(bool gated, bool gives_act) {
  if (gated)
    return gives_act ? backward_row<true, true, Fn, T, Pre> : backward_row<true, false, Fn, T, Pre>;
  return gives_act ? backward_row<false, true, Fn, T, Pre> : backward_row<false, false, Fn, T, Pre>;
}

template <typename T, typename Fn, typename PreRows>
void backward(Fn fn, const ExpertActivationBackward& backward,
              const Args<ExpertActivationBackward>& args, const PreRows& pre) {
  using Op = ExpertActivationBackward;
  const ExpertActivation& op = backward.forward();
  using Pre = decltype(pre[0]);
  const T* grad = args.in(Op::kGrad).as<T>();
  const float* probs = op.apply_prob() ? args.in(Op::kProbs).as<float>() : nullptr;
  T* grad_pre = args.out(Op::kGradPre).as<T>();
  float* grad_probs = op.apply_prob() ? args.out(Op::kGradProbs).as<float>() : nullptr;
  T* act = backward.gives_act() ? args.out(Op::kAct).as<T>() : nullptr;
  const int64_t pre_width = op.pre_width();
  const int64_t act_width = op.sizes().largest();
  const auto run = choose_backward_row<Fn, T, Pre>(is_gated(op.function().kind), act != nullptr);
  for_each_routed_row(args.in(Op::kOffsets).span<int64_t>(), [&](int64_t row, int64_t expert) {
    const float dot = run(fn, {.grad = grad + row * act_width,
                               .grad_width = act_width,
                               .pre_width = pre_width,
                               .pre = pre[row],
                               .prob = probs == nullptr ? 1.0F : probs[row],
                               .size = op.sizes()[expert],
                               .grad_pre = grad_pre + row * pre_width,
                               .act = act == nullptr ? nullptr : act + row * act_width});
    if (grad_probs != nullptr) grad_probs[row] = dot;
  });
}

void expert_activation_backward(const ExpertActivationBackward& op,
                                const Args<ExpertActivationBackward>& args) {
  using Op = ExpertActivationBackward;
  check_rows(args.in(Op::kPre), args.in(Op::kOffsets));
  with_activation(op.forward().function(), [&](auto fn) {
    with_storage(args.in(Op::kGrad).dtype, [&](auto storage) {
      using T = decltype(storage);
      const Tensor& pre = args.in(Op::kPre);
      op.pre_format() == RowFormat::kScaled ? backward<T>(fn, op, args, ScaledRowsOf(pre))
                                            : backward<T>(fn, op, args, ValueRowsOf<T>(pre));
    });
  });
  if (op.gives_fp8()) quantize_short_blocks(args.out(Op::kGradPre), args.out(Op::kGradPreFp8));
}

}  // namespace

TESSERA_CPU_KERNELS(add_expert_activation_cpu, table) {
  add_kernel<ExpertActivation>(table, expert_activation, {.takes = takes_scaled_rows});
  add_kernel<ExpertActivationBackward>(table, expert_activation_backward,
                                       {.takes = takes_scaled_rows});
}

}  // namespace tessera
