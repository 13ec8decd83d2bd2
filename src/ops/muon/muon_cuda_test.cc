#include <algorithm>
#include <bit>

#include "ops/adamw/adamw.h"
#include "ops/adamw/moment_blocks.h"
#include "ops/adamw/state_rounding.h"
#include "ops/muon/muon.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

constexpr double kLr = 1e-2;

class MuonCuda : public testing::GpuTest {
 protected:
  /// Matrices within one tensor, `gap` elements apart.
  struct Sizes {
    int64_t batch;
    int64_t elements;
    int64_t gap = 0;
    int64_t begin(int64_t i) const { return 1 * gap + i * (elements + gap); }
    int64_t all() const { return begin(batch); }
  };

  static Tensor part(const Tensor& tensor, const Sizes& sizes, int64_t i) {
    return {static_cast<std::byte*>(tensor.data) + sizes.begin(i) * dtype_size(tensor.dtype),
            tensor.dtype,
            {sizes.elements}};
  }
  static OwnedTensor random_of(DType dtype, const Shape& shape, Random& random) {
    if (dtype != DType::kU16 && dtype != DType::kU8)
      return testing::random_tensor(dtype, shape, random, 0.1);
    OwnedTensor tensor(dtype, shape);
    // Of what lower halves can be, those below the halfway.
    if (dtype == DType::kU8) {
      for (uint8_t& x : tensor.get().span<uint8_t>())
        x = static_cast<uint8_t>(random.next_below(0x80));
      return tensor;
    }
    for (uint16_t& x : tensor.get().span<uint16_t>())
      x = static_cast<uint16_t>(random.next_below(0x8000));
    return tensor;
  }
  static void expect_near(const Tensor& actual, const Tensor& expected, double relative,
                          double absolute) {
    const auto values = testing::to_doubles(actual);
    const auto truths = testing::to_doubles(expected);
    for (size_t i = 0; i < truths.size(); ++i)
      ASSERT_NEAR(values[i], truths[i], relative * std::abs(truths[i]) + absolute) << i;
  }

  /// Both back ends on copies of `tensors`, of which `run` makes the call's; the copies come back.
  template <typename Run>
  std::pair<std::vector<OwnedTensor>, std::vector<OwnedTensor>> run_both(
      std::vector<OwnedTensor> tensors, const Run& run) const {
    std::vector<OwnedTensor> device, copies;
    for (const OwnedTensor& tensor : tensors) device.push_back(testing::copy_to(gpu(), tensor));
    run(cpu(), tensors);
    run(gpu(), device);
    for (const OwnedTensor& tensor : device) copies.push_back(testing::copy_to_host(gpu(), tensor));
    return {std::move(tensors), std::move(copies)};
  }

  void check_momentum(const MuonSpec& spec, const Sizes& sizes, float found_inf = 0) const {
    const OperatorPtr op = make_muon_momentum(spec);
    SCOPED_TRACE(fmt::format("{}: {} of {}", op->attributes(), sizes.batch, sizes.elements));
    Random random(static_cast<uint64_t>(sizes.elements), 4);
    MuonFactors factors = make_muon_factors(spec, kLr, 3, 8, 8);
    AdamWGradScale scale{0.5F, found_inf};
    std::vector<OwnedTensor> tensors;
    tensors.push_back(random_of(DType::kF32, {sizes.all()}, random));
    tensors.push_back(random_of(moment_dtype(spec.formats.first_moment), {sizes.all()}, random));
    tensors.push_back(random_of(spec.weight_dtype(), {sizes.batch, sizes.elements}, random));
    const auto [expected, actual] = run_both(
        std::move(tensors), [&](const Backend& backend, const std::vector<OwnedTensor>& at) {
          const OwnedTensor f = testing::copy_to(backend, view_of(factors));
          const OwnedTensor s = testing::copy_to(backend, view_of(scale));
          std::vector<Tensor> inputs, outputs;
          for (int64_t i = 0; i < sizes.batch; ++i) {
            inputs.push_back(part(at[0], sizes, i));
            outputs.push_back(part(at[1], sizes, i));
          }
          inputs.insert(inputs.end(), {f, s});
          outputs.push_back(at[2]);
          testing::run_kernel(*op, backend, inputs, outputs);
        });
    const bool narrow = spec.formats.first_moment != MomentKind::kF32;
    expect_near(actual[1], expected[1], narrow ? 2e-2 : 2e-6, narrow ? 1e-4 : 1e-8);
    expect_near(actual[2], expected[2], spec.bf16_weight ? 1e-2 : 2e-6, narrow ? 1e-3 : 1e-7);
  }

  /// Averages with scales: matrices [rows, columns].
  void check_scaled(const MuonSpec& spec, int64_t batch, int64_t rows, int64_t columns,
                    float found_inf = 0) const {
    const OperatorPtr op = make_muon_momentum(spec);
    SCOPED_TRACE(fmt::format("{}: {} of {} x {}", op->attributes(), batch, rows, columns));
    const MomentKind kind = spec.formats.first_moment;
    const int64_t blocks = count_moment_blocks(columns);
    Random random(static_cast<uint64_t>(rows * columns), 6);
    MuonFactors factors = make_muon_factors(spec, kLr, 3, rows, columns);
    AdamWGradScale scale{0.5F, found_inf};
    std::vector<OwnedTensor> tensors;
    tensors.push_back(random_of(DType::kF32, {batch * rows, columns}, random));
    tensors.emplace_back(moment_dtype(kind), Shape{batch * rows, columns});
    tensors.emplace_back(DType::kU8, Shape{batch * rows, blocks});
    tensors.push_back(random_of(spec.weight_dtype(), {batch, rows * columns}, random));
    const OwnedTensor before = random_of(DType::kF32, {batch * rows, columns}, random);
    encode_moments(before, {Moment::kFirst, kind, tensors[1], tensors[2]});
    const auto [expected, actual] = run_both(
        std::move(tensors), [&](const Backend& backend, const std::vector<OwnedTensor>& at) {
          const OwnedTensor f = testing::copy_to(backend, view_of(factors));
          const OwnedTensor s = testing::copy_to(backend, view_of(scale));
          const auto matrix = [&](const Tensor& tensor, int64_t i) {
            Tensor part = tensor;
            part.shape[0] = rows;
            part.data = static_cast<std::byte*>(tensor.data) + i * part.num_bytes();
            return part;
          };
          std::vector<Tensor> inputs, outputs;
          for (int64_t i = 0; i < batch; ++i) {
            inputs.push_back(matrix(at[0], i));
            outputs.insert(outputs.end(), {matrix(at[1], i), matrix(at[2], i)});
          }
          inputs.insert(inputs.end(), {f, s});
          outputs.push_back(at[3]);
          testing::run_kernel(*op, backend, inputs, outputs);
        });
    // Products and sums are joined differently: a rounding may go to the next number.
    const auto decoded = [&](const std::vector<OwnedTensor>& tensors) {
      OwnedTensor values(DType::kF32, {batch * rows, columns});
      decode_moments({Moment::kFirst, kind, tensors[1], tensors[2]}, values);
      return values;
    };
    const double digit = kind == MomentKind::kFp8 ? 0.13 : 2e-3;
    expect_near(decoded(actual), decoded(expected), digit, kind == MomentKind::kFp8 ? 2e-3 : 1e-5);
    expect_near(actual[3], expected[3], spec.bf16_weight ? 1e-2 : 2e-6, 1e-6);
  }

  void check_update(const MuonSpec& spec, const Sizes& sizes, float found_inf = 0) const {
    const OperatorPtr op = make_muon_update(spec);
    SCOPED_TRACE(fmt::format("{}: {} of {}", op->attributes(), sizes.batch, sizes.elements));
    Random random(static_cast<uint64_t>(sizes.elements), 5);
    MuonFactors factors = make_muon_factors(spec, kLr, 3, 8, 8);
    AdamWGradScale scale{0.5F, found_inf};
    const auto types = op->infer(std::vector<ValueType>{
        {spec.weight_dtype(), {1, 4}}, {DType::kF32, {8}}, {DType::kF32, {2}}});
    std::vector<OwnedTensor> tensors;
    tensors.push_back(random_of(spec.weight_dtype(), {sizes.batch, sizes.elements}, random));
    for (const ValueType& type : types)
      tensors.push_back(random_of(type.dtype, {sizes.all()}, random));
    const auto [expected, actual] = run_both(
        std::move(tensors), [&](const Backend& backend, const std::vector<OwnedTensor>& at) {
          const OwnedTensor f = testing::copy_to(backend, view_of(factors));
          const OwnedTensor s = testing::copy_to(backend, view_of(scale));
          std::vector<Tensor> outputs;
          for (int64_t i = 0; i < sizes.batch; ++i) {
            for (size_t k = 1; k < at.size(); ++k) outputs.push_back(part(at[k], sizes, i));
          }
          testing::run_kernel(*op, backend, std::vector<Tensor>{at[0], f, s}, outputs);
        });
    expect_near(joined(actual), joined(expected), spec.bf16_weight ? 1e-2 : 2e-6, 1e-4);
  }

 private:
  /// The weights with what is kept beside them.
  static OwnedTensor joined(const std::vector<OwnedTensor>& tensors) {
    const Tensor master = tensors[1];
    OwnedTensor values(DType::kF32, master.shape);
    if (master.dtype == DType::kU16) {
      join_masters<uint16_t>(tensors[2].get().span<Bf16>(), master.span<uint16_t>(),
                             values.get().span<float>());
    } else if (master.dtype == DType::kU8) {
      join_masters<uint8_t>(tensors[2].get().span<Bf16>(), master.span<uint8_t>(),
                            values.get().span<float>());
    } else {
      const auto doubles = testing::to_doubles(master);
      std::ranges::transform(doubles, values.get().as<float>(),
                             [](double x) { return static_cast<float>(x); });
    }
    return values;
  }
};

std::vector<MuonSpec> all_specs() {
  std::vector<MuonSpec> specs;
  for (const MomentKind m : {MomentKind::kF32, MomentKind::kBF16}) {
    specs.push_back({.formats = {.first_moment = m}});
    for (const MasterKind master :
         {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kRemainder8, MasterKind::kNone})
      specs.push_back({.nesterov = master != MasterKind::kF32,
                       .bf16_weight = true,
                       .formats = {.first_moment = m, .master = master}});
  }
  return specs;
}

TEST_F(MuonCuda, TinyMatrices) {
  check_momentum({}, {2, 35});
  check_update({.bf16_weight = true}, {2, 35});
  check_scaled({.formats = {.first_moment = MomentKind::kFp8}}, 2, 3, 130);
}

TEST_F(MuonCuda, Sizes) {
  for (const MuonSpec& spec : all_specs()) {
    for (const Sizes& sizes : {Sizes{1, 1}, Sizes{3, 64}, Sizes{3, 4097}, Sizes{2, 100'000},
                               Sizes{150, 264}, Sizes{3, 4096, 8}, Sizes{70, 513, 3}}) {
      check_momentum(spec, sizes);
      check_update(spec, sizes);
    }
  }
}

TEST_F(MuonCuda, AveragesWithScales) {
  for (const MomentKind kind : {MomentKind::kF16, MomentKind::kFp8}) {
    for (const bool bf16 : {false, true}) {
      const MuonSpec spec = {.bf16_weight = bf16, .formats = {.first_moment = kind}};
      check_scaled(spec, 1, 1, 1);
      check_scaled(spec, 3, 5, 127);
      check_scaled(spec, 2, 4, 128);
      check_scaled(spec, 70, 3, 129);
      check_scaled(spec, 4, 768, 2048);
      check_scaled(spec, 3, 40, 300, 1);
    }
  }
}

TEST_F(MuonCuda, SkippedSteps) {
  for (const MuonSpec& spec : all_specs()) {
    check_momentum(spec, {3, 640}, 1);
    check_update(spec, {3, 640}, 1);
  }
}

}  // namespace
}  // namespace tessera
