#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <limits>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::Role;
using testing::TestInput;

struct Case {
  int64_t T = 0;
  int64_t H = 0;
  int64_t V = 1;
  CrossEntropySpec spec;
  DType dtype = DType::kF32;
  double deviation = 1.0;  // of x
};

constexpr float kScale = 0.25F;

/// As on a machine of few threads, wherever the test runs.
CrossEntropySpec whole(int64_t chunk = 512, int64_t block = 512) {
  return {.chunk_tokens = chunk, .block_vocab = block, .parts = std::nullopt};
}

CrossEntropySpec weighted(CrossEntropySpec spec) {
  spec.weighted = true;
  return spec;
}

CrossEntropySpec capped(CrossEntropySpec spec, float softcap) {
  spec.softcap = softcap;
  return spec;
}

CrossEntropySpec in_parts(int64_t chunk, int64_t block, int64_t parts) {
  return {.parts = CrossEntropyParts{chunk, block, parts}};
}

std::vector<int32_t> random_labels(const Case& c, Random& random) {
  std::vector<int32_t> labels;
  for (int64_t t = 0; t < c.T; ++t) {
    const bool ignored = random.next_below(4) == 0;
    const auto label = static_cast<int32_t>(random.next_below(static_cast<uint64_t>(c.V)));
    labels.push_back(ignored ? kIgnoredLabel : label);
  }
  return labels;
}

std::vector<TestInput> make_inputs(const Case& c, std::vector<int32_t> labels = {}) {
  Random random(static_cast<uint64_t>(c.T), static_cast<uint64_t>(c.V));
  if (labels.empty()) labels = random_labels(c, random);
  std::vector<TestInput> inputs;
  inputs.push_back(
      {testing::random_tensor(c.dtype, {c.T, c.H}, random, c.deviation), Role::kValue, "x"});
  inputs.push_back(
      {testing::random_tensor(c.dtype, {c.V, c.H}, random, 0.7), Role::kWeight, "weight"});
  inputs.push_back({testing::tensor_of_i32({c.T}, labels), Role::kConstant, "labels"});
  inputs.push_back({testing::tensor_of({1}, {kScale}), Role::kConstant, "scale"});
  if (!c.spec.weighted) return inputs;
  OwnedTensor weights = testing::random_tensor(DType::kF32, {c.T}, random, 1.5);
  for (int64_t t = 0; t < c.T; t += 5) weights.get().as<float>()[t] = 0;
  inputs.push_back({std::move(weights), Role::kConstant, "token_weights"});
  return inputs;
}

KernelTable kernels() {
  KernelTable table;
  add_linear_cross_entropy_cpu(table);
  return table;
}

struct Reference {
  double loss = 0;
  std::vector<double> token_loss, lse, dx, dweight;
};

/// A token's label, and what its loss counts.
struct TokenLabel {
  int32_t label = 0;
  double scale = kScale;
};

/// One token's part of the reference, from its logits.
void add_token(Reference& r, const Case& c, int64_t t, const TokenLabel& token,
               std::vector<double> logits, const std::vector<double>& x,
               const std::vector<double>& weight) {
  const int32_t label = token.label;
  std::vector<double> slopes(logits.size(), 1.0);
  for (size_t v = 0; v < logits.size() && c.spec.softcap > 0; ++v) {
    const double tangent = std::tanh(logits[v] / c.spec.softcap);
    logits[v] = c.spec.softcap * tangent;
    slopes[v] = 1 - tangent * tangent;
  }
  const double maximum = *std::ranges::max_element(logits);
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - maximum);
  const double lse = maximum + std::log(sum);
  r.lse.push_back(lse);
  r.token_loss.push_back(label == kIgnoredLabel ? 0.0 : lse - logits[label]);
  r.loss += token.scale * r.token_loss.back();
  if (label == kIgnoredLabel) return;
  for (int64_t v = 0; v < c.V; ++v) {
    const double grad =
        token.scale * slopes[v] * (std::exp(logits[v] - lse) - (v == label ? 1 : 0));
    for (int64_t h = 0; h < c.H; ++h) {
      r.dx[t * c.H + h] += grad * weight[v * c.H + h];
      r.dweight[v * c.H + h] += grad * x[t * c.H + h];
    }
  }
}

Reference make_reference(const Case& c, const std::vector<TestInput>& inputs) {
  const std::vector<double> x = testing::to_doubles(inputs[0].tensor);
  const std::vector<double> weight = testing::to_doubles(inputs[1].tensor);
  Reference r;
  r.dx.resize(x.size());
  r.dweight.resize(weight.size());
  for (int64_t t = 0; t < c.T; ++t) {
    std::vector<double> logits(c.V);
    for (int64_t v = 0; v < c.V; ++v) {
      for (int64_t h = 0; h < c.H; ++h) {
        logits[v] += x[t * c.H + h] * weight[v * c.H + h];
      }
    }
    TokenLabel token{.label = inputs[2].tensor.get().as<int32_t>()[t]};
    if (c.spec.weighted) token.scale *= inputs[4].tensor.get().as<float>()[t];
    add_token(r, c, t, token, std::move(logits), x, weight);
  }
  return r;
}

OwnedTensor to_tensor(const std::vector<double>& values, const Shape& shape) {
  return testing::tensor_of(shape, std::vector<float>(values.begin(), values.end()));
}

void expect_all_near(const Tensor& actual, const std::vector<double>& expected, double tolerance,
                     const std::string& what) {
  const std::vector<double> values = testing::to_doubles(actual);
  ASSERT_EQ(values.size(), expected.size()) << what;
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(values[i], expected[i], tolerance * (1 + std::abs(expected[i])))
        << what << " " << i;
  }
}

/// BF16 rounds each logit's gradient and each element of dx by up to 2^-9. Where x is large, some
/// tokens are all but certain, and p - 1 at their labels keeps the absolute error of 1: then rows
/// of dx may be nearly zero, and elements are compared to an absolute error in proportion to x.
void expect_gradient_near(const Case& c, const Tensor& actual, const std::vector<double>& expected,
                          const std::string& what) {
  const bool f32 = c.dtype == DType::kF32;
  if (c.deviation > 5.0) {
    expect_all_near(actual, expected, c.deviation * (f32 ? 1e-5 : 2.5e-3), what);
  } else {
    testing::expect_rows_near(actual, to_tensor(expected, actual.shape), f32 ? 1e-5 : 6e-3, what);
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    all.push_back({0, 4, 7, whole(), dtype});
    all.push_back({1, 1, 1, whole(), dtype});
    all.push_back({5, 3, 2, whole(2, 1), dtype});
    all.push_back({7, 16, 33, whole(3, 10), dtype});
    all.push_back({40, 24, 100, whole(16, 32), dtype});
    all.push_back({33, 31, 257, whole(32, 64), dtype});
    all.push_back({65, 8, 3001, whole(), dtype});
    all.push_back({20, 32, 50, whole(8, 16), dtype, 8.0});
    all.push_back({40, 24, 100, weighted(whole(16, 32)), dtype});
    all.push_back({0, 4, 7, weighted(whole()), dtype});
    all.push_back({7, 16, 33, capped(whole(3, 10), 5), dtype});
    all.push_back({40, 24, 100, capped(weighted(whole(16, 32)), 3), dtype});
    all.push_back({33, 31, 257, capped(whole(32, 64), 200), dtype});
  }
  return all;
}

/// The same sizes, cut into parts of the vocabulary: fewer and more than there are blocks.
std::vector<Case> cases_in_parts() {
  std::vector<Case> all = cases();
  for (size_t i = 0; i < all.size(); ++i) {
    const CrossEntropySpec& spec = all[i].spec;
    CrossEntropySpec cut = in_parts(spec.chunk_tokens, spec.block_vocab, i % 2 == 0 ? 32 : 3);
    cut.weighted = spec.weighted;
    cut.softcap = spec.softcap;
    all[i].spec = cut;
  }
  return all;
}

std::string describe(const Case& c) {
  return fmt::format("T {} H {} V {} {} chunk {} block {} ", c.T, c.H, c.V, dtype_name(c.dtype),
                     c.spec.chunk_tokens, c.spec.block_vocab) +
         (c.spec.parts ? fmt::format("by {} parts of {} x {} ", c.spec.parts->num_parts,
                                     c.spec.parts->chunk_tokens, c.spec.parts->block_vocab)
                       : "");
}

TEST(LinearCrossEntropy, ForwardMatchesReference) {
  for (const Case& c : cases()) {
    const std::vector<TestInput> inputs = make_inputs(c);
    const Reference expected = make_reference(c, inputs);
    const auto outputs =
        testing::run_operator(*make_linear_cross_entropy(c.spec), kernels(), inputs);
    expect_all_near(outputs[0], {expected.loss}, 2e-6, describe(c) + "loss");
    expect_all_near(outputs[1], expected.token_loss, 3e-6, describe(c) + "token_loss");
    expect_all_near(outputs[2], expected.lse, 2e-6, describe(c) + "lse");
  }
}

std::vector<OwnedTensor> pair_gradients(const Case& c, const std::vector<TestInput>& inputs,
                                        float grad_loss) {
  std::vector<OwnedTensor> grad_outputs(3);
  grad_outputs[0] = testing::tensor_of({1}, {grad_loss});
  return testing::run_gradients(make_linear_cross_entropy(c.spec), kernels(), inputs, grad_outputs);
}

TEST(LinearCrossEntropy, GradientsMatchReference) {
  for (const Case& c : cases()) {
    const std::vector<TestInput> inputs = make_inputs(c);
    Reference expected = make_reference(c, inputs);
    for (double& grad : expected.dx) grad *= 3.0;
    for (double& grad : expected.dweight) grad *= 3.0;
    const std::vector<OwnedTensor> grads = pair_gradients(c, inputs, 3.0F);
    expect_gradient_near(c, grads[0], expected.dx, describe(c) + "dx");
    expect_gradient_near(c, grads[1], expected.dweight, describe(c) + "dweight");
  }
}

TEST(LinearCrossEntropy, FiniteDifferences) {
  for (const Case& c : {Case{6, 5, 9, {4, 4}}, Case{1, 3, 2, {}}, Case{9, 4, 40, {3, 16}},
                        Case{9, 4, 40, weighted({3, 16})}, Case{9, 4, 40, capped({3, 16}, 2)}}) {
    testing::check_gradients(make_linear_cross_entropy(c.spec), kernels(), make_inputs(c),
                             {.outputs = {0}});
  }
}

TEST(LinearCrossEntropyFused, AgreesWithThePair) {
  for (const Case& c : cases()) {
    const std::vector<TestInput> inputs = make_inputs(c);
    const auto plain = testing::run_operator(*make_linear_cross_entropy(c.spec), kernels(), inputs);
    const auto grads = pair_gradients(c, inputs, 1.0F);
    const auto fused =
        testing::run_operator(*make_linear_cross_entropy_fused(c.spec), kernels(), inputs);
    testing::expect_bitwise_equal(fused[0], plain[0], describe(c) + "loss");
    testing::expect_bitwise_equal(fused[1], plain[1], describe(c) + "token_loss");
    // Exponentials are scaled rather than computed anew: a few ulp, which may turn a rounding to
    // BF16.
    const double tolerance = c.dtype == DType::kF32 ? 3e-6 : 3e-3;
    testing::expect_rows_near(fused[2], grads[0], tolerance, describe(c) + "dx");
    testing::expect_rows_near(fused[3], grads[1], tolerance, describe(c) + "dweight");
  }
}

TEST(LinearCrossEntropyFused, WeightsOfOneChangeNoBit) {
  for (const CrossEntropySpec& spec : {whole(16, 32), in_parts(16, 32, 3)}) {
    const Case c = {40, 24, 100, spec};
    std::vector<TestInput> inputs = make_inputs(c);
    const auto plain =
        testing::run_operator(*make_linear_cross_entropy_fused(spec), kernels(), inputs);
    inputs.push_back({testing::tensor_of({c.T}, std::vector<float>(c.T, 1.0F)), Role::kConstant,
                      "token_weights"});
    const auto same =
        testing::run_operator(*make_linear_cross_entropy_fused(weighted(spec)), kernels(), inputs);
    for (size_t i = 0; i < plain.size(); ++i)
      testing::expect_bitwise_equal(same[i], plain[i], fmt::format("output {}", i));
  }
}

TEST(LinearCrossEntropyFused, InPartsMatchesReference) {
  for (const Case& c : cases_in_parts()) {
    const std::vector<TestInput> inputs = make_inputs(c);
    const Reference expected = make_reference(c, inputs);
    const auto fused =
        testing::run_operator(*make_linear_cross_entropy_fused(c.spec), kernels(), inputs);
    expect_all_near(fused[0], {expected.loss}, 2e-6, describe(c) + "loss");
    expect_all_near(fused[1], expected.token_loss, 3e-6, describe(c) + "token_loss");
    expect_gradient_near(c, fused[2], expected.dx, describe(c) + "dx");
    expect_gradient_near(c, fused[3], expected.dweight, describe(c) + "dweight");
  }
}

TEST(LinearCrossEntropyFused, InPartsTheNumberOfThreadsChangesNothing) {
  const int num_threads = omp_get_max_threads();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Case c = {70, 24, 500, in_parts(32, 64, 3), dtype};
    const std::vector<TestInput> inputs = make_inputs(c);
    const OperatorPtr op = make_linear_cross_entropy_fused(c.spec);
    omp_set_num_threads(1);
    const auto one = testing::run_operator(*op, kernels(), inputs);
    omp_set_num_threads(5);
    const auto five = testing::run_operator(*op, kernels(), inputs);
    omp_set_num_threads(num_threads);
    for (size_t i = 0; i < one.size(); ++i) {
      testing::expect_bitwise_equal(five[i], one[i], describe(c) + fmt::format("output {}", i));
    }
  }
}

TEST(LinearCrossEntropyFused, PartsAreForManyThreads) {
  const int num_threads = omp_get_max_threads();
  omp_set_num_threads(7);
  EXPECT_FALSE(CrossEntropySpec().parts);
  omp_set_num_threads(8);
  EXPECT_EQ(CrossEntropySpec().parts, CrossEntropyParts());
  omp_set_num_threads(num_threads);
  EXPECT_THROW(make_linear_cross_entropy_fused(in_parts(8, 8, 0)), UserError);
  EXPECT_THROW(make_linear_cross_entropy_fused(capped(whole(), -1)), UserError);
}

TEST(LinearCrossEntropyFused, MatchesReference) {
  for (const Case& c : cases()) {
    const std::vector<TestInput> inputs = make_inputs(c);
    const Reference expected = make_reference(c, inputs);
    const auto fused =
        testing::run_operator(*make_linear_cross_entropy_fused(c.spec), kernels(), inputs);
    expect_gradient_near(c, fused[2], expected.dx, describe(c) + "dx");
    expect_gradient_near(c, fused[3], expected.dweight, describe(c) + "dweight");
  }
}

TEST(LinearCrossEntropyFused, TwoRunsAreBitwiseEqual) {
  const Case c = {70, 24, 500, whole(32, 128)};
  const std::vector<TestInput> inputs = make_inputs(c);
  const OperatorPtr op = make_linear_cross_entropy_fused(c.spec);
  const auto first = testing::run_operator(*op, kernels(), inputs);
  const auto second = testing::run_operator(*op, kernels(), inputs);
  for (size_t i = 0; i < first.size(); ++i) {
    testing::expect_bitwise_equal(first[i], second[i], fmt::format("output {}", i));
  }
}

/// Runs the fused kernel on memory of the test's own, so that the accumulator may be filled or
/// absent.
void run_fused(const Case& c, const std::vector<TestInput>& inputs, const Tensor& dx,
               const Tensor& dweight) {
  const OperatorPtr op = make_linear_cross_entropy_fused(c.spec);
  std::vector<Tensor> tensors;
  std::vector<ValueType> types;
  for (const TestInput& input : inputs) {
    tensors.push_back(input.tensor);
    types.push_back({.dtype = tensors.back().dtype, .shape = tensors.back().shape});
  }
  const Buffer workspace(kernels().at(std::string(op->name())).workspace_bytes(*op, types),
                         "a test");
  const OwnedTensor loss(DType::kF32, {1});
  const OwnedTensor token_loss(DType::kF32, {c.T});
  const Tensor outputs[] = {loss, token_loss, dx, dweight};
  kernels().at("linear_cross_entropy_fused")(*op, {tensors, outputs, workspace.bytes()});
}

TEST(LinearCrossEntropyFused, AddsToTheAccumulatorOrSkipsIt) {
  const Case c = {20, 8, 30, {8, 16}};
  const std::vector<TestInput> inputs = make_inputs(c);
  const auto once =
      testing::run_operator(*make_linear_cross_entropy_fused(c.spec), kernels(), inputs);
  const OwnedTensor dx(DType::kF32, {c.T, c.H});
  const OwnedTensor dweight(DType::kF32, {c.V, c.H});
  std::ranges::fill(dweight.get().span<float>(), 5.0F);
  run_fused(c, inputs, dx, dweight);
  for (int64_t i = 0; i < c.V * c.H; ++i) {
    EXPECT_NEAR(dweight.get().as<float>()[i], 5.0F + once[3].get().as<float>()[i], 2e-6);
  }
  std::ranges::fill(dx.get().span<float>(), 0.0F);
  run_fused(c, inputs, dx, Tensor{});
  testing::expect_bitwise_equal(dx, once[2], "dx without an accumulator");
}

TEST(LinearCrossEntropy, IgnoredTokensAddNothing) {
  const Case c = {4, 8, 10, {}};
  const std::vector<TestInput> inputs = make_inputs(c, {-100, -100, -100, -100});
  const auto fused =
      testing::run_operator(*make_linear_cross_entropy_fused(c.spec), kernels(), inputs);
  for (const OwnedTensor& output : fused) {
    for (const double value : testing::to_doubles(output)) EXPECT_EQ(value, 0.0);
  }
}

TEST(LinearCrossEntropy, RefusesLabelsOutsideTheVocabulary) {
  const Case c = {4, 8, 10, {}};
  for (const int32_t bad : {10, -1, -99, -101, std::numeric_limits<int32_t>::max()}) {
    const std::vector<TestInput> inputs = make_inputs(c, {1, 2, bad, 3});
    for (const OperatorPtr& op : {make_linear_cross_entropy(), make_linear_cross_entropy_fused()}) {
      try {
        testing::run_operator(*op, kernels(), inputs);
        ADD_FAILURE() << "label " << bad << " was taken";
      } catch (const UserError& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr(fmt::format(
                                      "token 2 is {}, outside the vocabulary of 10", bad)));
      }
    }
  }
}

TEST(LinearCrossEntropy, NanShowsInTheLoss) {
  const Case c = {6, 8, 100, {4, 32}};
  const std::vector<TestInput> inputs = make_inputs(c, {1, 2, 3, 4, 5, 6});
  inputs[0].tensor.get().as<float>()[3 * c.H + 1] = std::numeric_limits<float>::quiet_NaN();
  const auto outputs = testing::run_operator(*make_linear_cross_entropy(c.spec), kernels(), inputs);
  EXPECT_TRUE(std::isnan(*outputs[0].get().as<float>()));
  for (int64_t t = 0; t < c.T; ++t) EXPECT_EQ(std::isnan(outputs[1].get().as<float>()[t]), t == 3);
}

TEST(LinearCrossEntropy, LogitsOfAnySizeAreStable) {
  const Case c = {2, 1, 3, {}};
  std::vector<TestInput> inputs = make_inputs(c, {2, 0});
  inputs[0].tensor = testing::tensor_of({2, 1}, {1000.0F, -1000.0F});
  inputs[1].tensor = testing::tensor_of({3, 1}, {-90.0F, 0.0F, 90.0F});
  const auto outputs = testing::run_operator(*make_linear_cross_entropy(), kernels(), inputs);
  EXPECT_THAT(testing::to_doubles(outputs[1]), ::testing::ElementsAre(0.0, 0.0));
  EXPECT_THAT(testing::to_doubles(outputs[2]), ::testing::ElementsAre(90000.0, 90000.0));
}

TEST(LinearCrossEntropy, ShapeRule) {
  const ValueType x = {.dtype = DType::kBF16, .shape = {6, 4}};
  const ValueType weight = {.dtype = DType::kBF16, .shape = {10, 4}};
  const ValueType labels = {.dtype = DType::kI32, .shape = {6}};
  const ValueType scale = {.dtype = DType::kF32, .shape = {1}};
  const OperatorPtr op = make_linear_cross_entropy_fused();
  const std::vector<ValueType> inputs = {x, weight, labels, scale};
  const std::vector<ValueType> outputs = op->infer(inputs);
  ASSERT_EQ(outputs.size(), 4U);
  EXPECT_EQ(outputs[2], x);
  EXPECT_EQ(outputs[3], with_dtype(weight, DType::kF32));
  EXPECT_EQ(op->cost(inputs, outputs).flops, 3 * 2.0 * 6 * 4 * 10);

  const auto refuses = [&](size_t idx, const ValueType& type) {
    std::vector<ValueType> wrong = inputs;
    wrong[idx] = type;
    EXPECT_THROW(op->infer(wrong), UserError) << type.to_string();
    EXPECT_THROW(make_linear_cross_entropy()->infer(wrong), UserError) << type.to_string();
  };
  refuses(0, with_last_dim(x, 5));
  refuses(0, labels);
  refuses(1, with_dtype(weight, DType::kF32));
  refuses(1, {.dtype = DType::kBF16, .shape = {0, 4}});
  refuses(2, {.dtype = DType::kI32, .shape = {5}});
  refuses(2, {.dtype = DType::kI64, .shape = {6}});
  refuses(3, {.dtype = DType::kF32, .shape = {2}});
  const OperatorPtr weighing = make_linear_cross_entropy_fused(weighted({}));
  EXPECT_THROW(weighing->infer(inputs), UserError);
  std::vector<ValueType> with_weights = inputs;
  with_weights.push_back({.dtype = DType::kF32, .shape = {6}});
  EXPECT_EQ(weighing->infer(with_weights), outputs);
  EXPECT_THROW(op->infer(with_weights), UserError);
  with_weights.back().shape = {5};
  EXPECT_THROW(weighing->infer(with_weights), UserError);
  EXPECT_THROW(make_linear_cross_entropy({.chunk_tokens = 0}), UserError);
  EXPECT_THROW(make_linear_cross_entropy_fused({.block_vocab = -1}), UserError);
}

}  // namespace
}  // namespace tessera
