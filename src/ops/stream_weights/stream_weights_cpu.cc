#include <algorithm>

#include "ops/column_sums.h"
#include "ops/cpu_dispatch.h"
#include "ops/stream_weights/stream_weights.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

StreamRule rule_of_streams(const StreamWeightsSpec& spec) {
  return {.iterations = static_cast<int>(spec.iterations),
          .eps = static_cast<float>(spec.eps),
          .collapses = spec.collapses};
}

/// The rows of one operand, or null where this operator has it not.
float* rows_of(const Tensor* tensor, int64_t token) {
  return tensor == nullptr ? nullptr : tensor->as<float>() + token * tensor->shape[1];
}

void stream_weights(const StreamWeights& op, const Args<StreamWeights>& args) {
  using Op = StreamWeights;
  const StreamRule rule = rule_of_streams(op.spec());
  const Tensor& logits = args.in(Op::kLogits);
  const float* scale = args.in(Op::kScale).as<float>();
  const float* base = args.in(Op::kBase).as<float>();
  const Tensor* post = rule.collapses ? nullptr : &args.out(Op::kPost);
  const Tensor* comb = rule.collapses ? nullptr : &args.out(Op::kComb);
  with_streams(op.spec().streams, [&]<int kStreams>() {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < logits.shape[0]; ++t) {
      const TokenStreams<kStreams> token(rule, rows_of(&logits, t), scale, base);
      token.write(rule, rows_of(&args.out(Op::kPre), t), rows_of(post, t), rows_of(comb, t));
    }
  });
}

/// Gradients of a token's logits; adds what it has for scales and bases, these first, to `sums`.
template <int kStreams>
struct TokenStreamGrads {
  StreamRule rule;
  const float* scale;
  const float* base;

  void add(const float* logits, const float* pre, const float* post, const float* comb,
           float* grad_logits, float* sums) const {
    using Token = TokenStreams<kStreams>;
    float grads[Token::kLogits];
    const int count = Token::count(rule);
    Token(rule, logits, scale, base).write_grads(rule, pre, post, comb, grads);
    for (int m = 0; m < count; ++m) {
      grad_logits[m] = grads[m] * scale[Token::part_of(m)];
      sums[m] += grads[m];
      sums[count + Token::part_of(m)] += grads[m] * logits[m];
    }
  }
};

void add_to(const Tensor& accumulator, const float* sums) {
  if (!accumulator) return;
  float* to = accumulator.as<float>();
  for (int64_t i = 0; i < accumulator.num_elements(); ++i) to[i] += sums[i];
}

int64_t num_stream_sums(const StreamWeightsSpec& spec) {
  return spec.logits() + spec.scales();
}

void stream_weights_backward(const StreamWeightsBackward& op,
                             const Args<StreamWeightsBackward>& args) {
  using Op = StreamWeightsBackward;
  const StreamWeightsSpec& spec = op.spec();
  const StreamRule rule = rule_of_streams(spec);
  const Tensor& logits = args.in(Op::kLogits);
  const Tensor* post = rule.collapses ? nullptr : &args.in(Op::kGradPost);
  const Tensor* comb = rule.collapses ? nullptr : &args.in(Op::kGradComb);
  const int64_t count = num_stream_sums(spec);
  auto* totals = workspace_part<float>(args.workspace, column_sums_bytes(count));
  std::fill_n(totals, count, 0.0F);
  with_streams(spec.streams, [&]<int kStreams>() {
    const TokenStreamGrads<kStreams> grads{rule, args.in(Op::kScale).as<float>(),
                                           args.in(Op::kBase).as<float>()};
    add_column_sums(totals, logits.shape[0], count, args.workspace, [&](int64_t t, float* sums) {
      grads.add(rows_of(&logits, t), rows_of(&args.in(Op::kGradPre), t), rows_of(post, t),
                rows_of(comb, t), rows_of(&args.out(Op::kGradLogits), t), sums);
    });
  });
  add_to(args.out(Op::kGradBase), totals);
  add_to(args.out(Op::kGradScale), totals + spec.logits());
}

int64_t stream_weights_backward_workspace(const StreamWeightsBackward& op,
                                          std::span<const ValueType> /*inputs*/) {
  const int64_t count = num_stream_sums(op.spec());
  return column_sums_bytes(count) + count * static_cast<int64_t>(sizeof(float));
}

}  // namespace

TESSERA_CPU_KERNELS(add_stream_weights_cpu, table) {
  add_kernel<StreamWeights>(table, stream_weights);
  add_kernel<StreamWeightsBackward>(table, stream_weights_backward,
                                    {.workspace = stream_weights_backward_workspace});
}

}  // namespace tessera
