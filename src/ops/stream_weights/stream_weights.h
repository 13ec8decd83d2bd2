#pragma once

#include <string>

#include "ops/operator.h"
#include "ops/stream_weights/stream_rule.h"

namespace tessera {

struct StreamWeightsSpec {
  int64_t streams = 2;  ///< n, at most kMaxStreams
  /// Of Sinkhorn's iteration, at most kMaxSinkhornIterations.
  int64_t iterations = 20;
  double eps = 1e-6;
  /// Streams are collapsed for good, as before the model's head: there is `pre` alone.
  bool collapses = false;

  /// M: logits of a token.
  int64_t logits() const { return collapses ? streams : (2 + streams) * streams; }
  /// Learnt factors of the logits: of those of each output.
  int64_t scales() const { return collapses ? 1 : 3; }
};

/// By what a layer's part reads residual streams, and how what it gives joins them
/// (manifold-constrained hyper-connections, mHC: Xie et al., 2026, section 4.2; DeepSeek-V4,
/// section 2.2): (logits F32 [T, M], scale F32 [3 or 1], base F32 [M]) ->
///   (pre F32 [T, n], post F32 [T, n], comb F32 [T, n·n])
/// Of z = scale · logits + base, whose n first are of pre, n next of post and the others, row by
/// row, of comb:
///   pre = sigmoid(z) + eps, post = 2 · sigmoid(z),
///   comb = the softmax of each row + eps, whose columns are divided by their sums + eps, and then
///   its rows and its columns in turn, `iterations` - 1 times: all but doubly stochastic (Sinkhorn
///   and Knopp, 1967).
/// Stream k of what comes out has comb[j, k] of stream j.
class StreamWeights final : public Operator {
 public:
  static constexpr std::string_view kName = "stream_weights";
  enum Input : int { kLogits, kScale, kBase };
  enum Output : int { kPre, kPost, kComb };

  /// Throws UserError for sizes that there are not.
  explicit StreamWeights(const StreamWeightsSpec& spec);
  const StreamWeightsSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;

 private:
  StreamWeightsSpec spec_;
};

/// (logits, scale, base, grad of pre, [grads of post and comb]) -> (dlogits F32 [T, M]; dscale and
/// dbase, accumulated in an order that sizes give). Sums of the iteration are made again.
class StreamWeightsBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "stream_weights_backward";
  enum Input : int { kLogits, kScale, kBase, kGradPre, kGradPost, kGradComb };
  enum Output : int { kGradLogits, kGradScale, kGradBase };

  explicit StreamWeightsBackward(const StreamWeightsSpec& spec) : spec_(spec) {}
  const StreamWeightsSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  bool accumulates(int output) const override { return output != kGradLogits; }

 private:
  StreamWeightsSpec spec_;
};

OperatorPtr make_stream_weights(const StreamWeightsSpec& spec);
void add_stream_weights_cpu(KernelTable& table);
void add_stream_weights_cuda(KernelTable& table);

}  // namespace tessera
