#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/memory.h"
#include "core/random.h"
#include "ops/adamw/adamw.h"
#include "ops/adamw/moment_blocks.h"
#include "ops/adamw/moment_code.h"
#include "ops/adamw/state_rounding.h"

namespace tessera {
namespace {

constexpr MomentKind kKinds[] = {MomentKind::kF32, MomentKind::kBF16, MomentKind::kF16,
                                 MomentKind::kFp8};
constexpr MasterKind kMasters[] = {MasterKind::kF32, MasterKind::kRemainder,
                                   MasterKind::kRemainder8, MasterKind::kNone};

std::vector<StateFormats> all_formats_with_scales() {
  std::vector<StateFormats> formats;
  for (const MomentKind m : kKinds) {
    for (const MomentKind v : kKinds) {
      for (const MasterKind master : kMasters) formats.push_back({m, v, master});
    }
  }
  std::erase_if(formats, [](const StateFormats& f) { return !f.have_scales(); });
  return formats;
}

OwnedTensor zeros(DType dtype, const Shape& shape) {
  OwnedTensor tensor(dtype, shape);
  if (tensor.get().num_bytes() > 0) std::memset(tensor.get().data, 0, tensor.get().num_bytes());
  return tensor;
}

OwnedTensor normal_matrix(Random& random, const Shape& shape, double scale) {
  OwnedTensor tensor(DType::kF32, shape);
  for (float& x : tensor.get().span<float>()) x = static_cast<float>(scale * random.next_normal());
  return tensor;
}

Tensor rows_of(Tensor tensor, IndexRange rows) {
  tensor.data = static_cast<std::byte*>(tensor.data) +
                rows.begin * tensor.shape[1] * dtype_size(tensor.dtype);
  tensor.shape[0] = rows.count;
  return tensor;
}

/// A weight [rows, columns] with its state, from fresh.
struct KeptMatrix {
  AdamWSpec spec;
  OperatorPtr op;
  std::vector<OwnedTensor> tensors;  // as the operator's outputs

  KeptMatrix(const AdamWSpec& with, const Tensor& weights) : spec(with), op(make_adamw(spec)) {
    const auto types = op->infer(std::vector<ValueType>{
        {DType::kF32, weights.shape}, {DType::kF32, {8}}, {DType::kF32, {2}}});
    for (const ValueType& type : types) tensors.push_back(zeros(type.dtype, type.shape));
    const Tensor weight =
        tensors[spec.bf16_weight && adamw().has_weight() ? AdamW::kWeight : AdamW::kMaster];
    if (weight.dtype == DType::kF32) {
      std::ranges::copy(weights.span<float>(), weight.as<float>());
      return;
    }
    std::ranges::transform(weights.span<float>(), weight.as<Bf16>(),
                           [](float x) { return Bf16(x); });
    if (spec.master() == MasterKind::kF32)
      std::ranges::copy(weight.span<Bf16>(), tensors[AdamW::kMaster].get().as<float>());
  }
  const AdamW& adamw() const { return static_cast<const AdamW&>(*op); }

  /// One update of all rows, cut into slices in front of these.
  void step(const Tensor& grad, int64_t update, const std::vector<int64_t>& cuts = {},
            AdamWGradScale scale = {0.5F, 0}) const {
    KernelTable kernels;
    add_adamw_cpu(kernels);
    std::vector<int64_t> ends = cuts;
    ends.push_back(grad.shape[0]);
    std::vector<Tensor> inputs, outputs;
    int64_t begin = 0;
    for (const int64_t end : ends) {
      const IndexRange rows = {begin, end - begin};
      inputs.push_back(rows_of(grad, rows));
      for (const OwnedTensor& tensor : tensors) outputs.push_back(rows_of(tensor, rows));
      begin = end;
    }
    AdamWFactors factors = make_adamw_factors(spec, 1e-2, update);
    inputs.push_back(view_of(factors));
    inputs.push_back(view_of(scale));
    kernels.at("adamw")(*op, {.inputs = inputs, .outputs = outputs, .workspace = {}});
  }

  /// The moment in F32.
  OwnedTensor moment(Moment which) const {
    const bool first = which == Moment::kFirst;
    const MomentKind kind = first ? spec.formats.first_moment : spec.formats.second_moment;
    const Tensor kept = tensors[first ? AdamW::kFirstMoment : AdamW::kSecondMoment];
    OwnedTensor values(DType::kF32, kept.shape);
    if (has_scales(kind)) {
      const int scales = first ? adamw().first_scales() : adamw().second_scales();
      decode_moments({which, kind, kept, tensors[scales], 0}, values);
    } else if (kind == MomentKind::kF32) {
      std::ranges::copy(kept.span<float>(), values.get().as<float>());
    } else {
      std::ranges::copy(kept.span<Bf16>(), values.get().as<float>());
    }
    return values;
  }
  OwnedTensor masters() const {
    const Tensor kept = tensors[AdamW::kMaster];
    OwnedTensor values(DType::kF32, kept.shape);
    const auto to = values.get().span<float>();
    const auto weight = [&] { return tensors[AdamW::kWeight].get().span<Bf16>(); };
    if (kept.dtype == DType::kF32) std::ranges::copy(kept.span<float>(), to.begin());
    if (kept.dtype == DType::kBF16) std::ranges::copy(kept.span<Bf16>(), to.begin());
    if (kept.dtype == DType::kU16) join_masters<uint16_t>(weight(), kept.span<uint16_t>(), to);
    if (kept.dtype == DType::kU8) join_masters<uint8_t>(weight(), kept.span<uint8_t>(), to);
    return values;
  }
};

void expect_same_bits(const KeptMatrix& a, const KeptMatrix& b) {
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const Tensor x = a.tensors[i];
    const Tensor y = b.tensors[i];
    ASSERT_EQ(x.shape, y.shape);
    EXPECT_EQ(std::memcmp(x.data, y.data, x.num_bytes()), 0) << "output " << i;
  }
}

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> kShapes = {{0, 7},   {3, 0},   {1, 1},    {5, 16},   {3, 127},
                                             {4, 128}, {3, 129}, {7, 1000}, {2, 2049}, {40, 512}};
  return kShapes;
}

/// As ranks cut it, and on any number of threads.
TEST(AdamWBlocks, BitsDependNeitherOnRowsNorOnThreads) {
  const int threads = omp_get_max_threads();
  for (const StateFormats& formats : all_formats_with_scales()) {
    for (const Shape& shape : shapes()) {
      Random random(1, static_cast<uint64_t>(shape.num_elements()));
      const OwnedTensor weights = normal_matrix(random, shape, 0.02);
      const AdamWSpec spec = {.bf16_weight = true, .formats = formats};
      SCOPED_TRACE(fmt::format("{} {}", shape.to_string(), make_adamw(spec)->attributes()));
      const KeptMatrix whole(spec, weights);
      const KeptMatrix cut(spec, weights);
      for (int64_t update = 1; update <= 3; ++update) {
        const OwnedTensor grad = normal_matrix(random, shape, 1e-3);
        omp_set_num_threads(1);
        whole.step(grad, update);
        omp_set_num_threads(3);
        cut.step(grad, update, {shape[0] / 3, shape[0] / 3, shape[0] / 2});
      }
      omp_set_num_threads(threads);
      expect_same_bits(whole, cut);
    }
  }
}

/// The block that element i of a row of `columns` is in, of flat tensors.
template <typename Code, uint32_t (*kBits)(uint32_t)>
void expect_encoded(const Tensor& values, const std::vector<uint32_t>& random, const Tensor& codes,
                    const Tensor& scales) {
  const int64_t columns = values.shape[1];
  const auto* const found = static_cast<const typename Code::Code*>(codes.data);
  for (int64_t row = 0; row < values.shape[0]; ++row) {
    for (int64_t block = 0; block < scales.shape[1]; ++block) {
      const int64_t begin = row * columns + block * kMomentBlock;
      const int64_t end = std::min(begin + kMomentBlock, (row + 1) * columns);
      const float* const x = values.as<float>();
      uint32_t largest = 0;
      for (int64_t i = begin; i < end; ++i)
        largest = std::max(largest, word_of_float(std::abs(x[i])));
      const uint8_t scale = Code::scale_of(largest);
      ASSERT_EQ(scales.as<uint8_t>()[row * scales.shape[1] + block], scale);
      for (int64_t i = begin; i < end; ++i)
        ASSERT_EQ(found[i],
                  Code::encode_stochastically(x[i], Code::base_of(scale), kBits(random[i])))
            << i;
    }
  }
}

/// The composition that the kernel is: F32 moments from those that are kept, F32 AdamW, and each
/// rounded by the hash of what the update read.
TEST(AdamWBlocks, UpdateIsThatOfF32BetweenTheRoundings) {
  for (const StateFormats& formats : all_formats_with_scales()) {
    for (const Shape& shape : shapes()) {
      Random random(2, static_cast<uint64_t>(shape.num_elements()));
      const AdamWSpec spec = {.bf16_weight = true, .formats = formats};
      SCOPED_TRACE(fmt::format("{} {}", shape.to_string(), make_adamw(spec)->attributes()));
      const KeptMatrix kept(spec, normal_matrix(random, shape, 0.02));
      for (int64_t update = 1; update <= 3; ++update) {
        const OwnedTensor grad = normal_matrix(random, shape, 1e-3);
        OwnedTensor master = kept.masters();
        OwnedTensor m = kept.moment(Moment::kFirst);
        OwnedTensor v = kept.moment(Moment::kSecond);
        std::vector<uint32_t> bits;
        for (int64_t i = 0; i < shape.num_elements(); ++i) {
          const auto word = [&](const OwnedTensor& x) {
            return word_of_float(x.get().as<float>()[i]);
          };
          bits.push_back(rounding_bits(static_cast<uint32_t>(update), word(grad), word(m), word(v),
                                       word(master)));
        }
        kept.step(grad, update);
        const auto flat = [](Tensor tensor) {
          tensor.shape = {tensor.num_elements()};
          return tensor;
        };
        AdamWFactors factors = make_adamw_factors(spec, 1e-2, update);
        AdamWGradScale scale = {0.5F, 0};
        const std::vector<Tensor> inputs = {flat(grad), view_of(factors), view_of(scale)};
        const std::vector<Tensor> outputs = {flat(master), flat(m), flat(v)};
        KernelTable kernels;
        add_adamw_cpu(kernels);
        kernels.at("adamw")(*make_adamw({}),
                            {.inputs = inputs, .outputs = outputs, .workspace = {}});
        const AdamW& op = kept.adamw();
        if (has_scales(formats.first_moment)) {
          with_first_moment_code(formats.first_moment, [&]<typename Code>() {
            expect_encoded<Code, first_moment_bits>(m, bits, kept.tensors[AdamW::kFirstMoment],
                                                    kept.tensors[op.first_scales()]);
          });
        }
        if (has_scales(formats.second_moment)) {
          with_second_moment_code(formats.second_moment, [&]<typename Code>() {
            expect_encoded<Code, second_moment_bits>(v, bits, kept.tensors[AdamW::kSecondMoment],
                                                     kept.tensors[op.second_scales()]);
          });
        }
        if (formats.master == MasterKind::kF32) {
          EXPECT_TRUE(
              std::ranges::equal(kept.masters().get().span<float>(), master.get().span<float>()));
        }
      }
    }
  }
}

double mean(const Tensor& tensor) {
  const auto values = tensor.span<float>();
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

/// Each block's values are apart by powers of ten; on average they are those of F32 state, which a
/// root that is rounded would not be.
TEST(AdamWBlocks, MomentsFollowF32OnAverage) {
  const Shape shape = {120, 128};
  for (const MomentKind kind : {MomentKind::kF16, MomentKind::kFp8}) {
    for (const double beta2 : {0.95, 0.999}) {
      Random random(6, 6);
      const OwnedTensor weights = normal_matrix(random, shape, 0.02);
      const KeptMatrix plain({.beta2 = beta2, .formats = {MomentKind::kF32, MomentKind::kF16}},
                             weights);
      const KeptMatrix narrow({.beta2 = beta2, .formats = {kind, kind}}, weights);
      for (int64_t update = 1; update <= 300; ++update) {
        const OwnedTensor grad = normal_matrix(random, shape, 1e-4);
        plain.step(grad, update);
        narrow.step(grad, update);
      }
      const double v = mean(plain.moment(Moment::kSecond));
      EXPECT_NEAR(mean(narrow.moment(Moment::kSecond)) / v, 1, 1e-2) << beta2;
      EXPECT_NEAR(mean(narrow.moment(Moment::kFirst)) / 1e-4,
                  mean(plain.moment(Moment::kFirst)) / 1e-4, 2e-3);
    }
  }
}

/// Averages that change by a thousandth of what is kept, less than any of the formats can tell.
TEST(AdamWBlocks, SmallChangesAddUp) {
  const Shape shape = {32, 128};
  for (const MomentKind kind : {MomentKind::kF16, MomentKind::kFp8}) {
    OwnedTensor ones(DType::kF32, shape);
    std::ranges::fill(ones.get().span<float>(), 1.0F);
    const KeptMatrix kept({.beta1 = 0.999, .beta2 = 0.999, .formats = {kind, kind}}, ones);
    const AdamW& op = kept.adamw();
    encode_moments(ones, {Moment::kFirst, kind, kept.tensors[AdamW::kFirstMoment],
                          kept.tensors[op.first_scales()]});
    encode_moments(ones, {Moment::kSecond, kind, kept.tensors[AdamW::kSecondMoment],
                          kept.tensors[op.second_scales()]});
    Random random(8, 8);
    double expected = 1;
    for (int64_t update = 1; update <= 500; ++update) {
      kept.step(normal_matrix(random, shape, 1e-6), update);
      expected *= 0.999;
    }
    const double tolerance = kind == MomentKind::kFp8 ? 0.03 : 3e-3;
    EXPECT_NEAR(mean(kept.moment(Moment::kFirst)), expected, tolerance);
    EXPECT_NEAR(mean(kept.moment(Moment::kSecond)), expected, tolerance);
  }
}

/// A row beside one a million times larger, and elements of a row that are small for their block.
TEST(AdamWBlocks, SmallNeighboursMoveWithinReason) {
  const Shape shape = {2, 128};
  for (const MomentKind kind : {MomentKind::kF16, MomentKind::kFp8}) {
    const OwnedTensor weights = zeros(DType::kF32, shape);
    const KeptMatrix kept({.eps = 1e-15, .weight_decay = 0, .formats = {kind, kind}}, weights);
    Random random(4, 4);
    for (int64_t update = 1; update <= 50; ++update) {
      const OwnedTensor grad = normal_matrix(random, shape, 1e-9);
      for (int64_t i = 0; i < 128; ++i) grad.get().as<float>()[128 + i] *= i < 3 ? 1e6F : 1e3F;
      const OwnedTensor before = kept.masters();
      kept.step(grad, update);
      const OwnedTensor after = kept.masters();
      // Adam's own bound is lr · (1 - beta1) / sqrt(1 - beta2) without bias corrections.
      for (int64_t i = 0; i < 256; ++i)
        ASSERT_LT(std::abs(after.get().as<float>()[i] - before.get().as<float>()[i]), 4e-2) << i;
    }
  }
}

TEST(AdamWBlocks, SkippedStepsChangeNothing) {
  const Shape shape = {3, 200};
  Random random(5, 5);
  const OwnedTensor weights = normal_matrix(random, shape, 0.02);
  const OwnedTensor grad = normal_matrix(random, shape, 1);
  const AdamWSpec spec = {.bf16_weight = true,
                          .formats = {MomentKind::kFp8, MomentKind::kFp8, MasterKind::kRemainder8}};
  const KeptMatrix a(spec, weights);
  const KeptMatrix b(spec, weights);
  for (const KeptMatrix* kept : {&a, &b}) kept->step(grad, 1);
  a.step(grad, 2, {}, {0.5F, 1});
  expect_same_bits(a, b);
}

TEST(AdamWBlocks, ShapesAndBytes) {
  const AdamWSpec spec = {.bf16_weight = true,
                          .formats = {MomentKind::kFp8, MomentKind::kF16, MasterKind::kRemainder8}};
  const OperatorPtr op = make_adamw(spec);
  const std::vector<ValueType> inputs = {
      {DType::kF32, {10, 300}}, {DType::kF32, {8}}, {DType::kF32, {2}}};
  const auto outputs = op->infer(inputs);
  const std::vector<ValueType> expected = {{DType::kU8, {10, 300}},  {DType::kU8, {10, 300}},
                                           {DType::kF16, {10, 300}}, {DType::kBF16, {10, 300}},
                                           {DType::kU8, {10, 3}},    {DType::kU8, {10, 3}}};
  EXPECT_EQ(outputs, expected);
  const double kept = 3000 * 4 + 60;
  EXPECT_EQ(op->cost(inputs, outputs).bytes, 3000 * 4 + 40 + 2 * kept + 3000 * 2);
  EXPECT_THROW(op->infer(std::vector<ValueType>{
                   {DType::kF32, {3000}}, {DType::kF32, {8}}, {DType::kF32, {2}}}),
               UserError);
}

}  // namespace
}  // namespace tessera
