#include "ops/kda/kda.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::list_inputs;
using testing::random_tensor;
using testing::Role;
using testing::TestInput;

struct KdaCase {
  KdaSpec spec;
  std::vector<int32_t> bounds;
  float decay = 0.3F;  ///< of a token, about
};

KernelTable kernels() {
  KernelTable table;
  add_kda_cpu(table);
  return table;
}

/// Decays and strengths as models have them: below 0, and between 0 and 1.
OwnedTensor random_gates(const Shape& shape, Random& random, float decay) {
  OwnedTensor gates = random_tensor(DType::kF32, shape, random);
  float* values = gates.get().as<float>();
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    values[i] = decay > 0 ? -decay * std::abs(values[i]) : 1.0F / (1.0F + std::exp(-values[i]));
  return gates;
}

std::vector<TestInput> make_inputs(const KdaCase& c, DType dtype) {
  Random random(5, 0);
  const int64_t tokens = c.bounds.back();
  const Shape keys = {tokens, c.spec.num_heads * c.spec.key_size};
  const Shape values = {tokens, c.spec.num_heads * c.spec.value_size};
  const Shape gates = {tokens, c.spec.num_heads};
  return list_inputs(
      TestInput{random_tensor(dtype, keys, random), Role::kValue, "q"},
      TestInput{random_tensor(dtype, keys, random), Role::kValue, "k"},
      TestInput{random_tensor(dtype, values, random), Role::kValue, "v"},
      TestInput{random_gates(keys, random, c.decay), Role::kValue, "g"},
      TestInput{random_gates(gates, random, 0), Role::kValue, "beta"},
      TestInput{testing::tensor_of_i32({std::ssize(c.bounds)}, c.bounds), Role::kConstant, "ends"});
}

std::vector<double> unit(const double* x, int64_t size, double scale) {
  double squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
  std::vector<double> result(x, x + size);
  for (double& value : result) value *= scale / std::sqrt(squares + 1e-6);
  return result;
}

/// The recurrence, token by token.
std::vector<double> recur(const KdaCase& c, const std::vector<TestInput>& inputs) {
  const auto& [heads, dk, dv] = c.spec;
  std::vector<std::vector<double>> in;
  for (int idx = 0; idx < 5; ++idx) in.push_back(testing::to_doubles(inputs[idx].tensor));
  std::vector<double> o(in[2].size());
  for (size_t s = 0; s + 1 < c.bounds.size(); ++s) {
    for (int64_t n = 0; n < heads; ++n) {
      std::vector<double> state(dk * dv);
      for (int64_t t = c.bounds[s]; t < c.bounds[s + 1]; ++t) {
        const int64_t key_at = (t * heads + n) * dk;
        const int64_t value_at = (t * heads + n) * dv;
        const auto q = unit(&in[0][key_at], dk, 1 / std::sqrt(static_cast<double>(dk)));
        const auto k = unit(&in[1][key_at], dk, 1);
        for (int64_t j = 0; j < dv; ++j) {
          double predicted = 0;
          for (int64_t i = 0; i < dk; ++i) {
            state[i * dv + j] *= std::exp(in[3][key_at + i]);
            predicted += state[i * dv + j] * k[i];
          }
          const double written = (in[2][value_at + j] - predicted) * in[4][t * heads + n];
          for (int64_t i = 0; i < dk; ++i) {
            state[i * dv + j] += k[i] * written;
            o[value_at + j] += state[i * dv + j] * q[i];
          }
        }
      }
    }
  }
  return o;
}

/// One head's tokens of one sequence with the recurrence's gradients, token by token.
class Recurrence {
 public:
  Recurrence(const KdaSpec& spec, int64_t tokens)
      : dk_(spec.key_size), dv_(spec.value_size), states_((tokens + 1) * dk_ * dv_) {}

  struct Token {
    std::vector<double> q, k, v, g, of_o;
    double beta = 0;
  };
  struct Gradients {
    std::vector<double> q, k, v, g;
    double beta = 0;
  };

  void push(const Token& token) {
    const double* before = state(std::ssize(tokens_));
    tokens_.push_back(token);
    double* after = state(std::ssize(tokens_));
    for (int64_t i = 0; i < dk_; ++i) {
      for (int64_t j = 0; j < dv_; ++j)
        after[i * dv_ + j] = before[i * dv_ + j] * std::exp(token.g[i]);
    }
    const std::vector<double> missing = misses(token, after);
    for (int64_t i = 0; i < dk_; ++i) {
      for (int64_t j = 0; j < dv_; ++j) after[i * dv_ + j] += token.k[i] * token.beta * missing[j];
    }
  }

  /// Of the last token that is left; q and k are unit vectors here.
  Gradients pop() {
    if (of_state_.empty()) of_state_.resize(dk_ * dv_);
    const Token token = tokens_.back();
    const double* after = state(std::ssize(tokens_));
    tokens_.pop_back();
    const double* before = state(std::ssize(tokens_));
    std::vector<double> decayed(before, before + dk_ * dv_);
    for (int64_t i = 0; i < dk_ * dv_; ++i) decayed[i] *= std::exp(token.g[i / dv_]);
    Gradients grads{std::vector<double>(dk_), std::vector<double>(dk_), std::vector<double>(dv_),
                    std::vector<double>(dk_)};
    const std::vector<double> missing = misses(token, decayed.data());
    std::vector<double> of_written(dv_);
    for (int64_t i = 0; i < dk_; ++i) {
      for (int64_t j = 0; j < dv_; ++j) {
        grads.q[i] += after[i * dv_ + j] * token.of_o[j];
        of_state_[i * dv_ + j] += token.q[i] * token.of_o[j];
        of_written[j] += of_state_[i * dv_ + j] * token.k[i];
      }
    }
    for (int64_t j = 0; j < dv_; ++j) {
      grads.beta += of_written[j] * missing[j];
      grads.v[j] = token.beta * of_written[j];
    }
    for (int64_t i = 0; i < dk_; ++i) {
      for (int64_t j = 0; j < dv_; ++j) {
        double& of_state = of_state_[i * dv_ + j];
        grads.k[i] += of_state * token.beta * missing[j] - decayed[i * dv_ + j] * grads.v[j];
        of_state -= token.k[i] * grads.v[j];
        grads.g[i] += of_state * decayed[i * dv_ + j];
        of_state *= std::exp(token.g[i]);
      }
    }
    return grads;
  }

 private:
  double* state(int64_t tokens) { return states_.data() + tokens * dk_ * dv_; }
  /// v less what a decayed state predicts.
  std::vector<double> misses(const Token& token, const double* decayed) const {
    std::vector<double> result = token.v;
    for (int64_t i = 0; i < dk_; ++i) {
      for (int64_t j = 0; j < dv_; ++j) result[j] -= decayed[i * dv_ + j] * token.k[i];
    }
    return result;
  }

  int64_t dk_;
  int64_t dv_;
  std::vector<double> states_;
  std::vector<Token> tokens_;
  std::vector<double> of_state_;
};

std::vector<double> part(const std::vector<double>& all, int64_t at, int64_t size) {
  return {all.begin() + at, all.begin() + at + size};
}

/// The gradient of x from that of the unit vector times `scale` that was made of it.
std::vector<double> unit_gradient(const std::vector<double>& x, const std::vector<double>& grad,
                                  double scale) {
  double squares = 0;
  double along = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    squares += x[i] * x[i];
    along += x[i] * grad[i];
  }
  const double inverse = 1 / std::sqrt(squares + 1e-6);
  std::vector<double> result(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    result[i] = scale * inverse * (grad[i] - x[i] * along * inverse * inverse);
  return result;
}

/// Gradients of q, k, v, g and beta by the recurrence, of inputs with the gradient of o behind.
std::vector<std::vector<double>> recur_backward(const KdaCase& c,
                                                const std::vector<TestInput>& inputs) {
  const int64_t heads = c.spec.num_heads;
  const int64_t dk = c.spec.key_size;
  const int64_t dv = c.spec.value_size;
  const double scale = 1 / std::sqrt(static_cast<double>(dk));
  std::vector<std::vector<double>> in;
  for (const TestInput& input : inputs) in.push_back(testing::to_doubles(input.tensor));
  std::vector<std::vector<double>> grads(in.begin(), in.begin() + 5);
  for (size_t s = 0; s + 1 < c.bounds.size(); ++s) {
    for (int64_t n = 0; n < heads; ++n) {
      Recurrence recurrence(c.spec, c.bounds[s + 1] - c.bounds[s]);
      const auto keys = [&](int64_t t) { return (t * heads + n) * dk; };
      const auto values = [&](int64_t t) { return (t * heads + n) * dv; };
      for (int64_t t = c.bounds[s]; t < c.bounds[s + 1]; ++t)
        recurrence.push({unit(&in[0][keys(t)], dk, scale), unit(&in[1][keys(t)], dk, 1),
                         part(in[2], values(t), dv), part(in[3], keys(t), dk),
                         part(in[6], values(t), dv), in[4][t * heads + n]});
      for (int64_t t = c.bounds[s + 1] - 1; t >= c.bounds[s]; --t) {
        const Recurrence::Gradients g = recurrence.pop();
        std::ranges::copy(unit_gradient(part(in[0], keys(t), dk), g.q, scale), &grads[0][keys(t)]);
        std::ranges::copy(unit_gradient(part(in[1], keys(t), dk), g.k, 1), &grads[1][keys(t)]);
        std::ranges::copy(g.v, &grads[2][values(t)]);
        std::ranges::copy(g.g, &grads[3][keys(t)]);
        grads[4][t * heads + n] = g.beta;
      }
    }
  }
  return grads;
}

class KdaCases : public ::testing::TestWithParam<KdaCase> {};

TEST_P(KdaCases, EqualsTheRecurrence) {
  const KdaCase c = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto inputs = make_inputs(c, dtype);
    const auto expected = recur(c, inputs);
    const auto out = testing::run_operator(Kda(c.spec), kernels(), inputs);
    const auto actual = testing::to_doubles(out[0]);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i],
                  (dtype == DType::kF32 ? 5e-6 : 4e-3) * (1 + std::abs(expected[i])))
          << i;
    }
  }
}

TEST_P(KdaCases, GradientsMatchFiniteDifferences) {
  const KdaCase c = GetParam();
  testing::check_gradients(make_kda(c.spec), kernels(), make_inputs(c, DType::kF32));
}

TEST_P(KdaCases, GradientsAreTheRecurrences) {
  const KdaCase c = GetParam();
  auto inputs = make_inputs(c, DType::kF32);
  Random random(9, 0);
  inputs.push_back(
      {random_tensor(DType::kF32, inputs[2].tensor.get().shape, random), Role::kConstant, "grad"});
  const auto expected = recur_backward(c, inputs);
  const auto out = testing::run_operator(KdaBackward(c.spec), kernels(), inputs);
  for (size_t idx = 0; idx < expected.size(); ++idx) {
    const auto actual = testing::to_doubles(out[idx]);
    ASSERT_EQ(actual.size(), expected[idx].size());
    double largest = 0;
    for (const double x : expected[idx]) largest = std::max(largest, std::abs(x));
    for (size_t i = 0; i < actual.size(); ++i)
      ASSERT_NEAR(actual[i], expected[idx][i], 2e-5 * (largest + 1e-2)) << idx << " " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, KdaCases,
                         ::testing::Values(KdaCase{{1, 4, 4}, {0, 0}}, KdaCase{{1, 4, 3}, {0, 1}},
                                           KdaCase{{4, 8, 5}, {0, 3, 3, 4, 20}},
                                           KdaCase{{3, 17, 16}, {0, 64, 97}},
                                           KdaCase{{2, 16, 33}, {0, 31, 100}},
                                           KdaCase{{1, 5, 1}, {0, 130}},
                                           KdaCase{{2, 8, 5}, {0, 70}, 1e-3F}));

/// Of which exp(-G) would overflow within a chunk.
TEST(Kda, StrongDecays) {
  const KdaCase c{{2, 17, 9}, {0, 90}, 20.0F};
  const auto inputs = make_inputs(c, DType::kF32);
  const auto expected = recur(c, inputs);
  const auto actual = testing::to_doubles(testing::run_operator(Kda(c.spec), kernels(), inputs)[0]);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 5e-6);
  testing::check_gradients(make_kda(c.spec), kernels(), inputs);
}

TEST(Kda, RunsMoreHeadsThanWorkers) {
  const KdaCase c{{40, 2, 2}, {0, 1, 2, 9}};
  const auto inputs = make_inputs(c, DType::kF32);
  const auto expected = recur(c, inputs);
  const auto out = testing::run_operator(Kda(c.spec), kernels(), inputs);
  const auto actual = testing::to_doubles(out[0]);
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-5);
  testing::check_gradients(make_kda(c.spec), kernels(), inputs);
}

/// Rows [begin, end) of a tensor [T, C].
Tensor rows_of(const Tensor& x, int64_t begin, int64_t end) {
  return {x.as<float>() + begin * x.shape[1], x.dtype, {end - begin, x.shape[1]}};
}

TEST(Kda, GoesOnFromStates) {
  const KdaCase c{{4, 8, 5}, {0, 150}};
  const auto inputs = make_inputs(c, DType::kF32);
  const auto whole = testing::run_operator(Kda(c.spec), kernels(), inputs);
  const OwnedTensor states =
      testing::tensor_of({32, 5}, std::vector<float>(160, std::numeric_limits<float>::quiet_NaN()));
  const KernelTable table = kernels();
  const KdaCached op(c.spec);
  std::vector<std::byte> memory(4 << 20);
  const std::vector<int64_t> steps = {0, 1, 2, 67, 130, 131, 150};
  for (size_t i = 0; i + 1 < steps.size(); ++i) {
    const OwnedTensor start = testing::tensor_of_i32({1}, {static_cast<int32_t>(steps[i])});
    std::vector<Tensor> in;
    for (int idx = 0; idx < 5; ++idx)
      in.push_back(rows_of(inputs[idx].tensor, steps[i], steps[i + 1]));
    in.push_back(start);
    const OwnedTensor o(DType::kF32, {steps[i + 1] - steps[i], 20}, "o");
    const std::vector<Tensor> out = {o, states};
    table.at("kda_cached")(op, {.inputs = in, .outputs = out, .workspace = memory});
    const Tensor expected = rows_of(whole[0], steps[i], steps[i + 1]);
    for (int64_t j = 0; j < expected.num_elements(); ++j)
      EXPECT_NEAR(o.get().as<float>()[j], expected.as<float>()[j], 2e-6);
  }
}

TEST(Kda, RefusesWhatDoesNotFit) {
  EXPECT_THROW(Kda({.num_heads = 0}), UserError);
  const KdaCase c{{4, 8, 5}, {0, 20}};
  std::vector<ValueType> types;
  for (const TestInput& input : make_inputs(c, DType::kF32))
    types.push_back({input.tensor.get().dtype, input.tensor.get().shape});
  EXPECT_NO_THROW(Kda(c.spec).infer(types));
  types[Kda::kDecay].shape = {20, 4};  // one of each head, as a gated delta rule's
  EXPECT_THROW(Kda(c.spec).infer(types), UserError);
}

}  // namespace
}  // namespace tessera
