#include <algorithm>
#include <cstring>

#include "core/slice.h"
#include "ops/adamw/adamw.h"
#include "ops/adamw/moment_blocks.h"
#include "ops/adamw/state_rounding.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

constexpr MomentKind kMoments[] = {MomentKind::kF32, MomentKind::kBF16, MomentKind::kF16,
                                   MomentKind::kFp8};
constexpr MasterKind kMasters[] = {MasterKind::kF32, MasterKind::kRemainder,
                                   MasterKind::kRemainder8, MasterKind::kNone};

/// A matrix with its state: the gradient, then the operator's outputs.
using Matrix = std::vector<OwnedTensor>;

class AdamWRowsCuda : public testing::GpuTest {
 protected:
  /// Each of three updates on both back ends from the state that the CPU's last one left, and a
  /// fourth that is left out. `gap`: elements in front of every tensor, so that none is aligned.
  void check(const AdamWSpec& spec, const std::vector<Shape>& shapes, int64_t gap = 0) const {
    const OperatorPtr op = make_adamw(spec);
    SCOPED_TRACE(fmt::format("{} slices, the first {}, {}, weight {}, gap {}", shapes.size(),
                             shapes[0].to_string(), op->attributes(), spec.bf16_weight, gap));
    gap_ = gap;
    std::vector<Matrix> host;
    for (const Shape& shape : shapes) host.push_back(random_matrix(*op, shape));
    Differences differences;
    for (int64_t update = 1; update <= 4; ++update) {
      AdamWFactors factors = make_adamw_factors(spec, 1e-2, update);
      AdamWGradScale scale = {0.5F, update == 4 ? 1.0F : 0.0F};
      std::vector<Matrix> device;
      for (const Matrix& matrix : host) {
        device.emplace_back();
        for (const OwnedTensor& tensor : matrix)
          device.back().push_back(testing::copy_to(gpu(), tensor));
      }
      run(*op, cpu(), host, shapes, view_of(factors), view_of(scale));
      const OwnedTensor device_factors = testing::copy_to(gpu(), view_of(factors));
      const OwnedTensor device_scale = testing::copy_to(gpu(), view_of(scale));
      run(*op, gpu(), device, shapes, device_factors, device_scale);
      for (size_t i = 0; i < host.size(); ++i) {
        Matrix copies;
        for (const OwnedTensor& tensor : device[i])
          copies.push_back(testing::copy_to_host(gpu(), tensor));
        compare(*op, host[i], copies, shapes[i], differences);
      }
    }
    // A sum whose last bit differs turns a rounding the other way once in many.
    EXPECT_LE(differences.bits, 4 + differences.elements / 200);
  }

 private:
  struct Differences {
    int64_t elements = 0;
    int64_t bits = 0;
  };

  /// Within a tensor of the operator's type with a gap in front.
  Tensor view_of_output(const Tensor& tensor, const Shape& shape) const {
    return {static_cast<std::byte*>(tensor.data) + gap_ * dtype_size(tensor.dtype), tensor.dtype,
            shape, tensor.device};
  }
  static std::vector<ValueType> outputs_of(const Operator& op, const Shape& shape) {
    return op.infer(
        std::vector<ValueType>{{DType::kF32, shape}, {DType::kF32, {8}}, {DType::kF32, {2}}});
  }

  Matrix random_matrix(const Operator& op, const Shape& shape) const {
    const auto& adamw = static_cast<const AdamW&>(op);
    const StateFormats& formats = adamw.spec().formats;
    Random random(static_cast<uint64_t>(shape.num_elements()), 6);
    Matrix matrix;
    matrix.push_back(
        testing::random_tensor(DType::kF32, {shape.num_elements() + gap_}, random, 1.0));
    for (const ValueType& type : outputs_of(op, shape)) {
      const int64_t count = type.shape.num_elements() + gap_;
      if (is_storage(type.dtype)) {
        matrix.push_back(testing::random_tensor(type.dtype, {count}, random, 0.1));
      } else {
        matrix.emplace_back(type.dtype, Shape{count});
        std::memset(matrix.back().get().data, 0, matrix.back().get().num_bytes());
      }
    }
    fill_moment(matrix, shape, Moment::kFirst, formats.first_moment, AdamW::kFirstMoment,
                adamw.first_scales(), random);
    fill_moment(matrix, shape, Moment::kSecond, formats.second_moment, AdamW::kSecondMoment,
                adamw.second_scales(), random);
    return matrix;
  }
  /// Neighbours differ by powers of ten; a few are zero.
  void fill_moment(const Matrix& matrix, const Shape& shape, Moment moment, MomentKind kind,
                   int output, int scales, Random& random) const {
    const OwnedTensor values(DType::kF32, shape);
    for (float& x : values.get().span<float>()) {
      const double y = 0.1 * random.next_normal() * std::exp(2 * random.next_normal());
      x = static_cast<float>(moment == Moment::kSecond ? y * y : y);
      if (random.next_below(20) == 0) x = 0;
    }
    const Tensor kept = view_of_output(matrix[1 + output], shape);
    if (has_scales(kind)) {
      const Tensor at = view_of_output(matrix[1 + scales], shape_of_scales(shape));
      encode_moments(values, {moment, kind, kept, at});
    } else if (kind == MomentKind::kF32) {
      std::ranges::copy(values.get().span<float>(), kept.as<float>());
    } else {
      std::ranges::transform(values.get().span<float>(), kept.as<Bf16>(),
                             [](float x) { return Bf16(x); });
    }
  }

  void run(const Operator& op, const Backend& backend, const std::vector<Matrix>& matrices,
           const std::vector<Shape>& shapes, const Tensor& factors,
           const Tensor& grad_scale) const {
    std::vector<Tensor> inputs, outputs;
    for (size_t i = 0; i < matrices.size(); ++i) {
      inputs.push_back(view_of_output(matrices[i][0], shapes[i]));
      const auto types = outputs_of(op, shapes[i]);
      for (size_t k = 0; k < types.size(); ++k)
        outputs.push_back(view_of_output(matrices[i][k + 1], types[k].shape));
    }
    inputs.push_back(factors);
    inputs.push_back(grad_scale);
    testing::run_kernel(op, backend, inputs, outputs);
  }

  /// Bits of all outputs, gaps included; where some differ, both must be neighbours.
  void compare(const Operator& op, const Matrix& host, const Matrix& copies, const Shape& shape,
               Differences& differences) const {
    for (size_t k = 1; k < host.size(); ++k) {
      const Tensor a = host[k];
      const Tensor b = copies[k];
      const auto size = static_cast<size_t>(dtype_size(a.dtype));
      differences.elements += a.num_elements();
      for (int64_t i = 0; i < a.num_elements(); ++i) {
        const size_t at = static_cast<size_t>(i) * size;
        const bool same = std::memcmp(static_cast<const std::byte*>(a.data) + at,
                                      static_cast<const std::byte*>(b.data) + at, size) == 0;
        // The last bits of what is not rounded, F32 and the lower halves of masters, may differ.
        const bool all_bits = a.dtype == DType::kF32 || a.dtype == DType::kU16;
        differences.bits += same || all_bits ? 0 : 1;
        ASSERT_TRUE(same || i >= gap_) << "output " << k - 1 << ": a gap was written";
      }
    }
    const auto& adamw = static_cast<const AdamW&>(op);
    const StateFormats& formats = adamw.spec().formats;
    compare_moment(host, copies, shape, Moment::kFirst, formats.first_moment, AdamW::kFirstMoment,
                   adamw.first_scales());
    compare_moment(host, copies, shape, Moment::kSecond, formats.second_moment,
                   AdamW::kSecondMoment, adamw.second_scales());
    compare_masters(adamw, host, copies, shape);
  }
  void compare_moment(const Matrix& host, const Matrix& copies, const Shape& shape, Moment moment,
                      MomentKind kind, int output, int scales) const {
    const auto decode = [&](const Matrix& from) {
      const Tensor kept = view_of_output(from[1 + output], shape);
      OwnedTensor values(DType::kF32, shape);
      if (!has_scales(kind)) return testing::to_doubles(kept);
      const Tensor at = view_of_output(from[1 + scales], shape_of_scales(shape));
      decode_moments({moment, kind, kept, at}, values);
      return testing::to_doubles(values);
    };
    const std::vector<double> expected = decode(host);
    const std::vector<double> found = decode(copies);
    const double step = kind == MomentKind::kF32    ? 2e-6
                        : kind == MomentKind::kBF16 ? 1.0 / 128
                        : kind == MomentKind::kF16  ? 1.0 / 1024
                                                    : 1.0 / 8;
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(found[i], expected[i], 1.01 * step * std::abs(expected[i]) + 1e-2 * step + 2e-8)
          << "moment " << output << ", element " << i;
  }
  void compare_masters(const AdamW& adamw, const Matrix& host, const Matrix& copies,
                       const Shape& shape) const {
    const auto values_of = [&](const Matrix& from) {
      const Tensor master = view_of_output(from[1 + AdamW::kMaster], shape);
      if (!is_remainder(adamw.spec().master())) return testing::to_doubles(master);
      const Tensor weight = view_of_output(from[1 + AdamW::kWeight], shape);
      std::vector<float> values(static_cast<size_t>(shape.num_elements()));
      if (master.dtype == DType::kU8) {
        join_masters<uint8_t>(weight.span<Bf16>(), master.span<uint8_t>(), values);
      } else {
        join_masters<uint16_t>(weight.span<Bf16>(), master.span<uint16_t>(), values);
      }
      return std::vector<double>(values.begin(), values.end());
    };
    const std::vector<double> expected = values_of(host);
    const std::vector<double> found = values_of(copies);
    // Of 24 bits none is halfway between two BF16 numbers: the neighbours of one are two steps
    // apart.
    const double step = adamw.spec().bf16_weight && !adamw.has_weight()    ? 1.0 / 128
                        : adamw.spec().master() == MasterKind::kRemainder8 ? 2.0 / 32768
                                                                           : 2e-6;
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(found[i], expected[i], 1.01 * step * std::abs(expected[i]) + 4e-8) << i;
  }

  mutable int64_t gap_ = 0;
};

TEST_F(AdamWRowsCuda, FormatsAndShapes) {
  for (const MomentKind m : kMoments) {
    for (const MomentKind v : kMoments) {
      for (const MasterKind master : kMasters) {
        const StateFormats formats = {m, v, master};
        if (!formats.have_scales()) continue;
        for (const bool bf16_weight : {false, true}) {
          const AdamWSpec spec = {.bf16_weight = bf16_weight, .formats = formats};
          check(spec, {{5, 256}, {3, 100}, {0, 8}, {7, 129}, {1, 1}, {33, 132}});
        }
      }
    }
  }
}

TEST_F(AdamWRowsCuda, Sizes) {
  const AdamWSpec spec = {.bf16_weight = true,
                          .formats = {MomentKind::kFp8, MomentKind::kFp8, MasterKind::kRemainder8}};
  for (const Shape& shape :
       {Shape{1, 128}, Shape{2, 127}, Shape{3, 3}, Shape{17, 2048}, Shape{1000, 16},
        Shape{1, 1'000'003}, Shape{300, 1000}, Shape{2000, 384}, Shape{4, 0}})
    check(spec, {shape});
  for (const int64_t gap : {1, 4}) {
    check(spec, {{17, 256}}, gap);
    check(spec, {{5, 300}}, gap);
  }
}

/// More slices than a launch takes.
TEST_F(AdamWRowsCuda, ManySlices) {
  Random random(5, 5);
  std::vector<Shape> shapes;
  for (int i = 0; i < 130; ++i)
    shapes.push_back({static_cast<int64_t>(random.next_below(40)),
                      static_cast<int64_t>(1 + random.next_below(400))});
  check({.bf16_weight = true,
         .formats = {MomentKind::kFp8, MomentKind::kFp8, MasterKind::kRemainder8}},
        shapes);
}

TEST_F(AdamWRowsCuda, TinyRows) {
  check({.bf16_weight = true,
         .formats = {MomentKind::kFp8, MomentKind::kFp8, MasterKind::kRemainder8}},
        {{3, 256}, {2, 131}});
  check({.bf16_weight = true, .formats = {MomentKind::kF16, MomentKind::kF16, MasterKind::kNone}},
        {{3, 256}, {2, 131}});
}

}  // namespace
}  // namespace tessera
