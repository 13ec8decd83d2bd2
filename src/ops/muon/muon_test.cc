#include "ops/muon/muon.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/memory.h"
#include "core/random.h"
#include "ops/adamw/adamw.h"
#include "ops/adamw/moment_code.h"
#include "ops/adamw/state_rounding.h"
#include "ops/newton_schulz/newton_schulz.h"
#include "ops/newton_schulz/newton_schulz_testing.h"

namespace tessera {
namespace {

constexpr int64_t kRows = 6;
constexpr int64_t kCols = 17;
constexpr int64_t kElements = kRows * kCols;

float value_of(const Tensor& tensor, int64_t i) {
  return tensor.dtype == DType::kF32 ? tensor.as<float>()[i]
                                     : static_cast<float>(tensor.as<Bf16>()[i]);
}

OwnedTensor zeros(DType dtype, const Shape& shape) {
  OwnedTensor tensor(dtype, shape);
  if (tensor.get().num_bytes() > 0) std::memset(tensor.get().data, 0, tensor.get().num_bytes());
  return tensor;
}

/// Matrices with their state, and their step through the three operators.
class Matrices {
 public:
  Matrices(const MuonSpec& spec, int64_t batch) : spec_(spec), batch_(batch) {
    add_muon_cpu(kernels_);
    add_newton_schulz_cpu(kernels_);
    Random random(9, 0);
    for (int64_t i = 0; i < batch; ++i) {
      weights.push_back(zeros(spec.weight_dtype(), {kElements}));
      const bool scaled = has_scales(spec.formats.first_moment);
      const Shape kept = scaled ? Shape{kRows, kCols} : Shape{kElements};
      grads.push_back(zeros(DType::kF32, kept));
      ms.push_back(zeros(moment_dtype(spec.formats.first_moment), kept));
      if (scaled) ms.push_back(zeros(DType::kU8, {kRows, 1}));
      for (int64_t k = 0; k < kElements; ++k) set(weights.back(), k, random.next_normal());
      if (spec.master() == MasterKind::kNone) continue;
      besides.push_back(zeros(master_dtype(spec.master()), {kElements}));
      for (int64_t k = 0; spec.master() == MasterKind::kF32 && k < kElements; ++k)
        besides.back().get().as<float>()[k] = value_of(weights.back(), k);
    }
  }

  void make_gradients(Random& random) const {
    for (const OwnedTensor& grad : grads) {
      for (float& g : grad.get().span<float>()) g = static_cast<float>(random.next_normal());
    }
  }

  void step(double lr, int64_t update, AdamWGradScale scale) {
    MuonFactors factors = make_muon_factors(spec_, lr, update, kRows, kCols);
    const OwnedTensor u = zeros(spec_.weight_dtype(), {batch_, kElements});
    const OwnedTensor o = zeros(spec_.weight_dtype(), {batch_, kElements});
    std::vector<Tensor> inputs(grads.begin(), grads.end());
    inputs.insert(inputs.end(), {view_of(factors), view_of(scale)});
    std::vector<Tensor> outputs(ms.begin(), ms.end());
    outputs.push_back(u);
    run(*make_muon_momentum(spec_), inputs, outputs);
    const auto batch = [&](Tensor tensor) {
      tensor.shape = {batch_, kRows, kCols};
      return tensor;
    };
    run(*make_newton_schulz(5), {batch(u)}, {batch(o)});
    outputs.clear();
    for (int64_t i = 0; i < batch_; ++i) {
      if (!besides.empty()) outputs.push_back(besides[i]);
      outputs.push_back(weights[i]);
    }
    run(*make_muon_update(spec_), {o, view_of(factors), view_of(scale)}, outputs);
  }

  /// With all digits that are kept.
  float weight(int64_t i, int64_t k) const {
    if (spec_.master() == MasterKind::kF32) return besides[i].get().as<float>()[k];
    if (!is_remainder(spec_.master())) return value_of(weights[i], k);
    const Tensor beside = besides[i];
    const uint16_t lower =
        beside.dtype == DType::kU8 ? lower_half(beside.as<uint8_t>()[k]) : beside.as<uint16_t>()[k];
    return std::bit_cast<float>(join_halves(weights[i].get().as<Bf16>()[k].bits, lower));
  }

  std::vector<OwnedTensor> weights, grads, besides;
  std::vector<OwnedTensor> ms;  ///< with their scales where they have some

 private:
  static void set(const Tensor& tensor, int64_t k, double value) {
    if (tensor.dtype == DType::kF32) {
      tensor.as<float>()[k] = static_cast<float>(value);
    } else {
      tensor.as<Bf16>()[k] = Bf16(static_cast<float>(value));
    }
  }
  void run(const Operator& op, const std::vector<Tensor>& inputs,
           const std::vector<Tensor>& outputs) const {
    std::vector<ValueType> types;
    for (const Tensor& input : inputs) types.push_back({input.dtype, input.shape});
    const auto inferred = op.infer(types);
    ASSERT_EQ(inferred.size(), outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_EQ(inferred[i].dtype, outputs[i].dtype);
      EXPECT_EQ(inferred[i].shape, outputs[i].shape);
    }
    const Kernel& kernel = kernels_.find(op.name())->second;
    std::vector<std::byte> workspace(kernel.workspace_bytes(op, types) + kAlignment);
    const auto begin = align_up(reinterpret_cast<int64_t>(workspace.data())) -
                       reinterpret_cast<int64_t>(workspace.data());
    kernel(op, {.inputs = inputs,
                .outputs = outputs,
                .workspace = std::span(workspace).subspan(static_cast<size_t>(begin))});
  }

  MuonSpec spec_;
  int64_t batch_;
  KernelTable kernels_;
};

/// The step of one matrix in double.
struct Reference {
  std::vector<double> p, m = std::vector<double>(kElements);

  void step(const MuonSpec& spec, const Tensor& grad, double lr, double scale) {
    testing::Matrix u{kRows, kCols, std::vector<double>(kElements)};
    for (int64_t k = 0; k < kElements; ++k) {
      const double g = grad.as<float>()[k] * scale;
      m[k] = spec.momentum * m[k] + (1 - spec.momentum) * g;
      u.at[k] = spec.nesterov ? spec.momentum * m[k] + (1 - spec.momentum) * g : m[k];
    }
    const auto o = testing::orthogonalize_plainly(u, 5);
    for (int64_t k = 0; k < kElements; ++k)
      p[k] = p[k] * (1 - lr * spec.weight_decay) - lr * 0.2 * std::sqrt(17.0) * o.at[k];
  }
};

void expect_follows_reference(const MuonSpec& spec, int64_t batch) {
  SCOPED_TRACE(fmt::format("{}, {}", make_muon_momentum(spec)->attributes(),
                           make_muon_update(spec)->attributes()));
  Matrices matrices(spec, batch);
  std::vector<Reference> expected(batch);
  for (int64_t i = 0; i < batch; ++i)
    for (int64_t k = 0; k < kElements; ++k) expected[i].p.push_back(matrices.weight(i, k));
  Random random(10, 0);
  for (int64_t update = 1; update <= 4; ++update) {
    matrices.make_gradients(random);
    for (int64_t i = 0; i < batch; ++i) expected[i].step(spec, matrices.grads[i], 0.1, 0.5);
    matrices.step(0.1, update, {0.5F, 0});
  }
  const bool narrow = spec.bf16_weight || spec.formats.first_moment != MomentKind::kF32;
  const double limit = spec.formats.first_moment == MomentKind::kFp8 ? 0.2 : 0.1;
  double error = 0;
  for (int64_t i = 0; i < batch; ++i) {
    for (int64_t k = 0; k < kElements; ++k) {
      const double difference = matrices.weight(i, k) - expected[i].p[k];
      EXPECT_NEAR(difference, 0, narrow ? limit : 1e-4) << i << ", " << k;
      error += difference;
    }
  }
  // Roundings lean to no side.
  EXPECT_NEAR(error / static_cast<double>(batch * kElements), 0, narrow ? 6e-3 : 1e-5);
}

TEST(Muon, FollowsTheReference) {
  for (const bool nesterov : {false, true}) {
    for (const MomentKind m :
         {MomentKind::kF32, MomentKind::kBF16, MomentKind::kF16, MomentKind::kFp8}) {
      const MuonSpec spec = {.nesterov = nesterov, .formats = {.first_moment = m}};
      expect_follows_reference(spec, 3);
      for (const MasterKind master :
           {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kRemainder8, MasterKind::kNone}) {
        MuonSpec narrow = spec;
        narrow.bf16_weight = true;
        narrow.formats.master = master;
        expect_follows_reference(narrow, 3);
      }
    }
  }
}

TEST(Muon, WeightsAreTheirMastersRounded) {
  Matrices matrices({.bf16_weight = true}, 2);
  Random random(11, 0);
  matrices.make_gradients(random);
  matrices.step(0.1, 1, {1, 0});
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t k = 0; k < kElements; ++k)
      EXPECT_EQ(matrices.weights[i].get().as<Bf16>()[k].bits, Bf16(matrices.weight(i, k)).bits);
  }
}

TEST(Muon, DoesNothingWhereTheStepIsSkipped) {
  Matrices matrices({}, 2);
  Random random(12, 0);
  matrices.make_gradients(random);
  matrices.step(0.1, 1, {1, 0});
  const float weight = matrices.weight(1, 3);
  const float m = value_of(matrices.ms[1], 3);
  matrices.step(0.1, 2, {std::nanf(""), 1});
  EXPECT_EQ(matrices.weight(1, 3), weight);
  EXPECT_EQ(value_of(matrices.ms[1], 3), m);
}

TEST(Muon, RefusesWhatItCannotTake) {
  EXPECT_THROW(make_muon_momentum({.momentum = 1.0}), UserError);
  EXPECT_THROW(make_muon_update({.weight_decay = -1}), UserError);
  const ValueType grad{DType::kF32, {8}};
  const ValueType factors{DType::kF32, {8}};
  const ValueType scale{DType::kF32, {2}};
  const OperatorPtr op = make_muon_momentum({});
  EXPECT_NO_THROW(op->infer(std::vector{grad, grad, factors, scale}));
  EXPECT_THROW(op->infer(std::vector{grad, ValueType{DType::kF32, {9}}, factors, scale}),
               UserError);
  EXPECT_THROW(op->infer(std::vector{factors, scale}), UserError);
  const OperatorPtr scaled = make_muon_momentum({.formats = {.first_moment = MomentKind::kFp8}});
  EXPECT_THROW(scaled->infer(std::vector{grad, factors, scale}), UserError);
  EXPECT_NO_THROW(scaled->infer(std::vector{ValueType{DType::kF32, {2, 4}}, factors, scale}));
}

/// Matrices of any shape, whose averages are found in the format's digits, and so kept.
template <typename Code>
void expect_kept_averages(MomentKind kind, int64_t rows, int64_t cols, Random& random) {
  SCOPED_TRACE(fmt::format("{}, {} x {}", moment_name(kind), rows, cols));
  const MuonSpec spec = {.formats = {.first_moment = kind}};
  const OperatorPtr op = make_muon_momentum(spec);
  const int64_t blocks = count_moment_blocks(cols);
  MuonFactors factors = make_muon_factors(spec, 0.1, 7, rows, cols);
  AdamWGradScale scale = {0.5F, 0};
  const OwnedTensor grad = zeros(DType::kF32, {rows, cols});
  const OwnedTensor m = zeros(moment_dtype(kind), {rows, cols});
  const OwnedTensor scales = zeros(DType::kU8, {rows, blocks});
  const OwnedTensor u = zeros(DType::kF32, {1, rows * cols});
  auto* const codes = static_cast<typename Code::Code*>(m.get().data);
  std::vector<float> old;
  for (uint8_t& s : scales.get().span<uint8_t>())
    s = static_cast<uint8_t>(90 + random.next_below(40));
  const auto scale_at = [&](int64_t i) {
    return scales.get().as<uint8_t>()[i / cols * blocks + i % cols / kMomentBlock];
  };
  for (int64_t i = 0; i < rows * cols; ++i) {
    codes[i] = static_cast<typename Code::Code>(random.next_below(Code::kLargest));
    old.push_back(Code::decode(codes[i], Code::base_of(scale_at(i))));
    grad.get().as<float>()[i] = static_cast<float>(random.next_normal());
  }
  KernelTable kernels;
  add_muon_cpu(kernels);
  const std::vector<Tensor> inputs = {grad, view_of(factors), view_of(scale)};
  const std::vector<Tensor> outputs = {m, scales, u};
  kernels.find(op->name())->second(*op, {.inputs = inputs, .outputs = outputs, .workspace = {}});
  for (int64_t i = 0; i < rows * cols; ++i) {
    const double g = 0.5 * grad.get().as<float>()[i];
    const double average = old[i] + (g - old[i]) * static_cast<double>(factors.new_m);
    EXPECT_NEAR(u.get().as<float>()[i], g + (average - g) * 0.95, 1e-6 * (1 + std::abs(average)));
    const uint32_t base = Code::base_of(scale_at(i));
    const double digit =
        std::max<double>(std::abs(average) * std::exp2(-Code::kMantissa), Code::decode(1, base));
    EXPECT_NEAR(Code::decode(codes[i], base), average, 1.001 * digit) << i;
  }
}

TEST(Muon, KeepsAveragesWithScales) {
  Random random(13, 0);
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1},
                                   {3, 127},
                                   {2, 128},
                                   {5, 129},
                                   {4, 512},
                                   {200, 300},
                                   {0, 4},
                                   {4, 0}}) {
    for (const MomentKind kind : {MomentKind::kF16, MomentKind::kFp8}) {
      with_first_moment_code(
          kind, [&]<typename Code>() { expect_kept_averages<Code>(kind, rows, cols, random); });
    }
  }
}

}  // namespace
}  // namespace tessera
