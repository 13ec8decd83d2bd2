#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/memory.h"
#include "core/random.h"
#include "ops/adamw/adamw.h"
#include "ops/adamw/state_rounding.h"

namespace tessera {
namespace {

constexpr DType kF32 = DType::kF32;
constexpr MomentKind kBF16 = MomentKind::kBF16;

/// Without scales, of which adamw_blocks_test.cc has the tests.
std::vector<StateFormats> all_formats() {
  std::vector<StateFormats> formats;
  for (const MomentKind m : {MomentKind::kF32, kBF16}) {
    for (const MomentKind v : {MomentKind::kF32, kBF16}) {
      for (const MasterKind master :
           {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kRemainder8, MasterKind::kNone})
        formats.push_back({m, v, master});
    }
  }
  return formats;
}

/// A BF16 weight with its state, from fresh.
struct Kept {
  AdamWSpec spec;
  std::vector<OwnedTensor> tensors;  // as the operator's outputs

  Kept(const AdamWSpec& with, const std::vector<float>& weights) : spec(with) {
    spec.bf16_weight = true;
    const OperatorPtr op = make_adamw(spec);
    const auto n = std::ssize(weights);
    const ValueType grad{kF32, {n}};
    const auto types = op->infer(std::vector<ValueType>{grad, {kF32, {8}}, {kF32, {2}}});
    for (const ValueType& type : types) {
      tensors.emplace_back(type.dtype, type.shape);
      std::memset(tensors.back().get().data, 0, tensors.back().get().num_bytes());
    }
    std::ranges::transform(weights, weight().as<Bf16>(), [](float x) { return Bf16(x); });
    if (spec.master() == MasterKind::kF32)
      std::ranges::copy(weight().span<Bf16>(), tensors[AdamW::kMaster].get().as<float>());
  }

  Tensor weight() const {
    return tensors[spec.master() == MasterKind::kNone ? AdamW::kMaster : AdamW::kWeight];
  }
  /// What the weights are, with all digits that are kept.
  std::vector<float> values() const {
    std::vector<float> result(weight().num_elements());
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = weight().as<Bf16>()[i];
      const Tensor beside = tensors[AdamW::kMaster];
      if (beside.dtype == kF32) result[i] = beside.as<float>()[i];
      if (!is_remainder(spec.master())) continue;
      const uint16_t lower = beside.dtype == DType::kU8 ? lower_half(beside.as<uint8_t>()[i])
                                                        : beside.as<uint16_t>()[i];
      result[i] = std::bit_cast<float>(join_halves(weight().as<Bf16>()[i].bits, lower));
    }
    return result;
  }
  std::vector<double> doubles(int output) const {
    const Tensor tensor = tensors[output];
    if (tensor.dtype == kF32) return {tensor.span<float>().begin(), tensor.span<float>().end()};
    return {tensor.span<Bf16>().begin(), tensor.span<Bf16>().end()};
  }

  /// One update of all elements, cut into slices at these places.
  void step(std::vector<float> grad, double lr, int64_t update,
            const std::vector<int64_t>& cuts = {}) {
    const OperatorPtr op = make_adamw(spec);
    KernelTable kernels;
    add_adamw_cpu(kernels);
    std::vector<int64_t> ends = cuts;
    ends.push_back(std::ssize(grad));
    std::vector<Tensor> inputs, outputs;
    int64_t begin = 0;
    for (const int64_t end : ends) {
      inputs.push_back(part(view(std::span(grad), {std::ssize(grad)}), begin, end));
      for (const OwnedTensor& tensor : tensors) outputs.push_back(part(tensor, begin, end));
      begin = end;
    }
    AdamWFactors factors = make_adamw_factors(spec, lr, update);
    AdamWGradScale scale{1, 0};
    inputs.push_back(view_of(factors));
    inputs.push_back(view_of(scale));
    kernels.at("adamw")(*op, {.inputs = inputs, .outputs = outputs, .workspace = {}});
  }
  static Tensor part(const Tensor& tensor, int64_t begin, int64_t end) {
    return {static_cast<std::byte*>(tensor.data) + begin * dtype_size(tensor.dtype),
            tensor.dtype,
            {end - begin}};
  }
};

std::vector<float> normal_values(Random& random, size_t n, double scale = 1) {
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(scale * random.next_normal());
  return values;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

void expect_same_bits(const Kept& a, const Kept& b) {
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const Tensor x = a.tensors[i];
    const Tensor y = b.tensors[i];
    EXPECT_EQ(std::memcmp(x.data, y.data, x.num_bytes()), 0) << "output " << i;
  }
}

/// As ranks cut it, and on any number of threads.
TEST(AdamWFormats, BitsDependNeitherOnSlicesNorOnThreads) {
  const int threads = omp_get_max_threads();
  for (const StateFormats& formats : all_formats()) {
    for (const size_t n : {0, 1, 1023, 1025, 40'003}) {
      Random random(n, 1);
      const auto weights = normal_values(random, n, 0.02);
      Kept whole({.formats = formats}, weights);
      Kept cut({.formats = formats}, weights);
      const auto size = static_cast<int64_t>(n);
      for (int64_t update = 1; update <= 3; ++update) {
        const auto grad = normal_values(random, n);
        omp_set_num_threads(1);
        whole.step(grad, 1e-3, update);
        omp_set_num_threads(3);
        cut.step(grad, 1e-3, update, {size / 3, size / 3, size / 2 + 1 <= size ? size / 2 : size});
      }
      omp_set_num_threads(threads);
      expect_same_bits(whole, cut);
    }
  }
}

/// The same as an F32 master that is moved off the halfway after each update.
TEST(AdamWFormats, RemainderIsTheLowerHalfOfTheMaster) {
  constexpr size_t kCount = 30'011;
  Random random(5, 5);
  const auto weights = normal_values(random, kCount, 0.02);
  Kept master({}, weights);
  Kept remainder({.formats = {.master = MasterKind::kRemainder}}, weights);
  int64_t num_halfway = 0;
  for (int64_t update = 1; update <= 20; ++update) {
    const auto grad = normal_values(random, kCount);
    master.step(grad, 1e-3, update);
    remainder.step(grad, 1e-3, update);
    for (float& value : master.tensors[AdamW::kMaster].get().span<float>()) {
      const auto word = std::bit_cast<uint32_t>(value);
      num_halfway += leave_halfway(word) != word ? 1 : 0;
      value = std::bit_cast<float>(leave_halfway(word));
    }
    ASSERT_EQ(master.values(), remainder.values()) << update;
    for (size_t i = 0; i < kCount; ++i)
      ASSERT_EQ(master.weight().as<Bf16>()[i].bits, remainder.weight().as<Bf16>()[i].bits);
    for (const int moment : {AdamW::kFirstMoment, AdamW::kSecondMoment})
      ASSERT_EQ(master.doubles(moment), remainder.doubles(moment));
  }
  EXPECT_GT(num_halfway, 0);
}

/// The same within the digit that is rounded, on average without it, and never halfway between two
/// weights.
TEST(AdamWFormats, Remainder8FollowsTheMasterOnAverage) {
  constexpr size_t kCount = 40'000;
  Random random(9, 5);
  // All of one exponent, so that the last digit kept is the same.
  std::vector<float> weights(kCount);
  for (float& weight : weights) weight = static_cast<float>(0.018 + 0.012 * random.next_uniform());
  Kept master({}, weights);
  Kept remainder({.formats = {.master = MasterKind::kRemainder8}}, weights);
  for (int64_t update = 1; update <= 100; ++update) {
    const auto grad = normal_values(random, kCount);
    master.step(grad, 1e-5, update);
    remainder.step(grad, 1e-5, update);
  }
  const auto expected = master.values();
  const auto found = remainder.values();
  double sum = 0;
  double squares = 0;
  for (size_t i = 0; i < kCount; ++i) {
    const auto word = std::bit_cast<uint32_t>(found[i]);
    ASSERT_NE(word & 0xffffU, 0x8000U);
    ASSERT_EQ(Bf16(found[i]).bits, remainder.weight().as<Bf16>()[i].bits);
    const double error = (found[i] - expected[i]) * 0x1p21;  // in units of that digit
    sum += error;
    squares += error * error;
  }
  const double deviation = std::sqrt(squares / kCount);
  EXPECT_NEAR(sum / kCount, 0, 6 * deviation / std::sqrt(kCount));
  // 100 roundings, each off by sqrt(1/6) of a digit.
  EXPECT_NEAR(deviation, std::sqrt(100.0 / 6), 0.5);
}

/// Each value is within a digit or two of what F32 state gives, and on average there.
TEST(AdamWFormats, Bf16MomentsFollowF32OnAverage) {
  constexpr size_t kCount = 20'000;
  for (const double beta2 : {0.95, 0.999}) {
    Random random(6, 6);
    const auto weights = normal_values(random, kCount, 0.02);
    Kept plain({.beta2 = beta2}, weights);
    Kept narrow({.beta2 = beta2, .formats = {kBF16, kBF16}}, weights);
    for (int64_t update = 1; update <= 200; ++update) {
      const auto grad = normal_values(random, kCount);
      plain.step(grad, 1e-3, update);
      narrow.step(grad, 1e-3, update);
    }
    const double v = mean(plain.doubles(AdamW::kSecondMoment));
    EXPECT_NEAR(mean(narrow.doubles(AdamW::kSecondMoment)) / v, 1, 1e-3) << beta2;
    EXPECT_NEAR(
        mean(narrow.doubles(AdamW::kFirstMoment)) - mean(plain.doubles(AdamW::kFirstMoment)), 0,
        1e-4);
  }
}

/// Steps of a thousandth of what is kept, less than BF16 can tell: rounded to nearest, nothing
/// would ever move.
TEST(AdamWFormats, SmallChangesAddUp) {
  constexpr size_t kCount = 4'000;
  const std::vector<float> weights(kCount, 1.0F);
  const AdamWSpec spec = {.beta1 = 0.999,
                          .beta2 = 0.999,
                          .weight_decay = 0.1,
                          .formats = {kBF16, kBF16, MasterKind::kNone}};
  Kept kept(spec, weights);
  for (const int moment : {AdamW::kFirstMoment, AdamW::kSecondMoment})
    std::ranges::fill(kept.tensors[moment].get().span<Bf16>(), Bf16(1.0F));
  Random random(8, 8);
  double expected_weight = 1;
  double expected_moment = 1;
  for (int64_t update = 1; update <= 500; ++update) {
    // Next to nothing, but different for each element, as their roundings then are.
    const auto grad = normal_values(random, kCount, 1e-6);
    const AdamWFactors f = make_adamw_factors(kept.spec, 1e-3, update);
    kept.step(grad, 1e-3, update);
    const double m = expected_moment * 0.999;
    const double v = expected_moment * 0.999;
    expected_weight = expected_weight * f.decay - f.step_size * m / (std::sqrt(v) / f.sqrt_bias2);
    expected_moment *= 0.999;
  }
  EXPECT_NEAR(mean(kept.doubles(AdamW::kSecondMoment)), expected_moment, 5e-3);
  EXPECT_NEAR(mean(kept.doubles(AdamW::kFirstMoment)), expected_moment, 5e-3);
  EXPECT_NEAR(mean(kept.doubles(AdamW::kMaster)), expected_weight,
              0.02 * std::abs(1 - expected_weight));
}

TEST(AdamWFormats, ShapesAndBytes) {
  const ValueType grad{kF32, {100}};
  const std::vector<ValueType> inputs = {grad, {kF32, {8}}, {kF32, {2}}};
  for (const StateFormats& formats : all_formats()) {
    for (const bool bf16_weight : {false, true}) {
      const OperatorPtr op = make_adamw({.bf16_weight = bf16_weight, .formats = formats});
      const std::vector<ValueType> outputs = op->infer(inputs);
      const bool beside = bf16_weight && formats.master != MasterKind::kNone;
      ASSERT_EQ(outputs.size(), beside ? 4U : 3U);
      EXPECT_EQ(outputs[AdamW::kFirstMoment].dtype, moment_dtype(formats.first_moment));
      EXPECT_EQ(outputs[AdamW::kSecondMoment].dtype, moment_dtype(formats.second_moment));
      if (beside) {
        EXPECT_EQ(outputs[AdamW::kWeight].dtype, DType::kBF16);
      }
    }
  }
  const auto bytes = [&](const StateFormats& formats) {
    const OperatorPtr op = make_adamw({.bf16_weight = true, .formats = formats});
    return op->cost(inputs, op->infer(inputs)).bytes;
  };
  EXPECT_EQ(bytes({}) - bytes({kBF16, kBF16, MasterKind::kF32}), 100 * 8);
  EXPECT_EQ(bytes({.master = MasterKind::kRemainder}) - bytes({.master = MasterKind::kRemainder8}),
            100 * 2);
}

}  // namespace
}  // namespace tessera
