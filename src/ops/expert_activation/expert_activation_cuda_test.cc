#include <cstring>

#include "ops/dequantize/quantized_giver_testing.h"
#include "ops/dequantize/scaled_reader_testing.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

constexpr ActivationFunction kFunctions[] = {
    Activation::kSwiGLU,
    Activation::kGeGLU,
    Activation::kGeGLUTanh,
    Activation::kGelu,
    Activation::kGeluTanh,
    {Activation::kSwiGLUOai, 0.75},
    {Activation::kSwiGLUClamped, 1.25},
    Activation::kRelu2,
};
constexpr float kGuard = -3;

std::vector<int64_t> offsets_of(const std::vector<int64_t>& rows) {
  std::vector<int64_t> offsets{0};
  for (const int64_t count : rows) offsets.push_back(offsets.back() + count);
  return offsets;
}

class ExpertActivationCuda : public testing::GpuTest {
 protected:
  void check_equal_sizes(const ExpertActivationSpec& spec, const std::vector<int64_t>& rows,
                         int64_t slack, testing::GpuCheck how = {}) const {
    SCOPED_TRACE(
        fmt::format("{} F {} rows {}", to_string(spec.function), spec.expert_sizes[0], rows));
    const std::vector<int64_t> ends = offsets_of(rows);
    const int64_t bound = ends.back() + slack;
    const int64_t width = (is_gated(spec.function.kind) ? 2 : 1) * spec.expert_sizes[0];
    const OwnedTensor offsets = testing::tensor_of_i64({std::ssize(ends)}, ends);
    how.values = {{"offsets", offsets}};
    how.tolerance_f32 = 1e-4;
    testing::check_ragged_operator_on_gpu(
        make_expert_activation(spec),
        [&](DType dtype) -> testing::OperatorInputs {
          testing::OperatorInputs inputs{{"x"}, {testing::ragged_rows(dtype, {bound, width})}};
          if (spec.apply_prob) {
            inputs.names.emplace_back("x_probs");
            inputs.types.push_back(testing::ragged_rows(DType::kF32, {bound}));
          }
          inputs.names.emplace_back("offsets");
          inputs.types.push_back({DType::kI64, {std::ssize(ends)}});
          return inputs;
        },
        {0}, ends.back(), cpu(), gpu(), how);
  }

  void check_sizes(const std::vector<int64_t>& sizes, const std::vector<int64_t>& rows,
                   const ActivationFunction& function, DType dtype, Random& random,
                   bool apply_prob = true) const {
    const std::vector<int64_t> ends = offsets_of(rows);
    const auto forward = std::make_shared<ExpertActivation>(ExpertActivationSpec{
        .function = function, .expert_sizes = sizes, .apply_prob = apply_prob});
    const int64_t act = forward->sizes().largest();
    std::vector<OwnedTensor> inputs;
    inputs.push_back(testing::random_tensor(dtype, {ends.back(), act}, random));
    inputs.push_back(testing::random_tensor(dtype, {ends.back(), forward->pre_width()}, random));
    if (apply_prob) inputs.push_back(testing::random_tensor(DType::kF32, {ends.back()}, random));
    inputs.push_back(testing::tensor_of_i64({std::ssize(ends)}, ends));
    const std::string what = fmt::format("{} {}", to_string(function), dtype_name(dtype));
    const auto grads =
        compare_kernels(ExpertActivationBackward(*forward), inputs, "backward " + what);
    const auto all =
        compare_kernels(ExpertActivationBackward(*forward, true), inputs, "both " + what);
    inputs.erase(inputs.begin());
    const auto values = compare_kernels(*forward, inputs, "forward " + what);
    for (size_t i = 0; i < grads.size(); ++i) EXPECT_TRUE(same_bits(all[i], grads[i])) << what << i;
    EXPECT_TRUE(same_bits(all.back(), values[0])) << what;
  }

  /// Gradients of pre-activations in FP8, with `slack` rows behind the last expert's.
  void check_scaled(const std::vector<int64_t>& sizes, const std::vector<int64_t>& rows,
                    int64_t slack, const ActivationFunction& function, DType dtype) const {
    Random random(5, 9);
    const std::vector<int64_t> ends = offsets_of(rows);
    const int64_t bound = ends.back() + slack;
    const OwnedTensor offsets = testing::tensor_of_i64({std::ssize(ends)}, ends);
    const OwnedTensor probs = testing::random_tensor(DType::kF32, {bound}, random);
    for (const bool apply_prob : {false, true}) {
      const ExpertActivation forward(
          {.function = function, .expert_sizes = sizes, .apply_prob = apply_prob});
      const OwnedTensor grad =
          testing::random_tensor(dtype, {bound, forward.sizes().largest()}, random);
      const OwnedTensor pre = testing::random_tensor(dtype, {bound, forward.pre_width()}, random);
      std::vector<Tensor> values{grad, pre};
      if (apply_prob) values.push_back(probs);
      values.push_back(offsets);
      for (const bool gives_act : {false, true}) {
        for (const QuantizeSpec& spec : testing::scaled_reader_specs())
          testing::expect_reads_scaled(ExpertActivationBackward(forward, gives_act),
                                       ExpertActivationBackward::kPre, values, spec, gpu());
      }
    }
  }

  /// BF16 that is given as FP8 too, with `slack` rows behind the last expert's.
  void check_quantized(int64_t size, const std::vector<int64_t>& rows, int64_t slack,
                       const ActivationFunction& function) const {
    Random random(5, 10);
    const std::vector<int64_t> ends = offsets_of(rows);
    const int64_t bound = ends.back() + slack;
    const OwnedTensor offsets = testing::tensor_of_i64({std::ssize(ends)}, ends);
    const OwnedTensor probs = testing::random_tensor(DType::kF32, {bound}, random);
    for (const bool apply_prob : {false, true}) {
      const ExpertActivation forward({.function = function,
                                      .expert_sizes = std::vector<int64_t>(rows.size(), size),
                                      .apply_prob = apply_prob});
      const OwnedTensor grad = testing::random_tensor(DType::kBF16, {bound, size}, random);
      const OwnedTensor pre =
          testing::random_tensor(DType::kBF16, {bound, forward.pre_width()}, random, 4.0);
      std::vector<Tensor> values{pre};
      if (apply_prob) values.push_back(probs);
      values.push_back(offsets);
      testing::expect_gives_quantized(forward, ExpertActivation::kAct, values, ends.back(), gpu());
      values.insert(values.begin(), grad);
      testing::expect_gives_quantized(ExpertActivationBackward(forward),
                                      ExpertActivationBackward::kGradPre, values, ends.back(),
                                      gpu());
    }
  }

 private:
  static bool same_bits(const Tensor& a, const Tensor& b) {
    return a.num_bytes() == b.num_bytes() && std::memcmp(a.data, b.data, a.num_bytes()) == 0;
  }

  /// Runs a kernel on both; what an expert's rows do not use must stay as it was. The GPU's
  /// results.
  std::vector<OwnedTensor> compare_kernels(const Operator& op,
                                           const std::vector<OwnedTensor>& inputs,
                                           const std::string& what) const {
    std::vector<ValueType> types;
    std::vector<Tensor> host, device;
    std::vector<OwnedTensor> kept;
    for (const OwnedTensor& input : inputs) {
      types.push_back({input.get().dtype, input.get().shape});
      host.push_back(input);
      kept.push_back(testing::copy_to(gpu(), input));
      device.push_back(kept.back());
    }
    std::vector<OwnedTensor> results, device_results;
    std::vector<Tensor> host_out, device_out;
    for (const ValueType& type : op.infer(types)) {
      const std::vector<float> guard(type.shape.num_elements(), kGuard);
      results.push_back(testing::tensor_of(type.shape, guard, type.dtype));
      device_results.push_back(testing::copy_to(gpu(), results.back()));
      host_out.push_back(results.back());
      device_out.push_back(device_results.back());
    }
    testing::run_kernel(op, cpu(), host, host_out);
    testing::run_kernel(op, gpu(), device, device_out);
    std::vector<OwnedTensor> copies;
    for (size_t i = 0; i < results.size(); ++i) {
      copies.push_back(testing::copy_to_host(gpu(), device_out[i]));
      testing::expect_rows_near(copies[i], host_out[i],
                                host_out[i].dtype == DType::kF32 ? 2e-5 : 4e-3,
                                fmt::format("{} {}", what, i));
    }
    return copies;
  }
};

TEST_F(ExpertActivationCuda, AllKinds) {
  for (const ActivationFunction& function : kFunctions) {
    for (const bool prob : {false, true}) {
      check_equal_sizes({.function = function, .expert_sizes = {776, 776, 776}, .apply_prob = prob},
                        {20, 0, 31}, 9);
      check_equal_sizes({.function = function, .expert_sizes = {13, 13}, .apply_prob = prob},
                        {1, 5}, 0);
    }
  }
  check_equal_sizes({.expert_sizes = {16, 16}, .apply_prob = true}, {0, 0}, 4);
}

/// Rows of more columns than a block's warps take at a time.
TEST_F(ExpertActivationCuda, RowsThatWarpsTakeInTurns) {
  Random random(5, 8);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    check_sizes({2600, 2600}, {5, 2}, Activation::kSwiGLU, dtype, random);
    check_sizes({301, 301}, {3, 4}, Activation::kGeGLU, dtype, random);
    check_sizes({2600, 8, 4104}, {3, 1, 4}, Activation::kGelu, dtype, random);
    check_sizes({301, 7, 520}, {3, 1, 4}, Activation::kSwiGLU, dtype, random);
  }
}

TEST_F(ExpertActivationCuda, SizesThatDiffer) {
  Random random(5, 5);
  const std::vector<int64_t> rows = {3, 0, 40, 1, 17};
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{64, 8, 320, 16, 136}, std::vector<int64_t>{5, 9, 70, 2, 33}}) {
    for (const ActivationFunction& function : kFunctions) {
      for (const DType dtype : {DType::kF32, DType::kBF16})
        check_sizes(sizes, rows, function, dtype, random);
    }
  }
}

TEST_F(ExpertActivationCuda, ActivationsThatComeWithTheirGradients) {
  Random random(5, 7);
  for (const ActivationFunction& function : kFunctions) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool apply_prob : {false, true}) {
        check_sizes({776, 776, 776}, {20, 0, 31}, function, dtype, random, apply_prob);
        check_sizes({13, 13}, {1, 5}, function, dtype, random, apply_prob);
      }
    }
  }
}

TEST_F(ExpertActivationCuda, GradientsOfFp8AreThoseOfWhatItStandsFor) {
  for (const ActivationFunction& function : kFunctions) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(fmt::format("{} {}", to_string(function), dtype_name(dtype)));
      check_scaled({776, 776, 776}, {20, 0, 31}, 9, function, dtype);
      check_scaled({13, 13}, {1, 5}, 0, function, dtype);
      check_scaled({64, 8, 320, 16, 136}, {3, 0, 40, 1, 17}, 0, function, dtype);
      check_scaled({5, 9, 70}, {3, 1, 4}, 2, function, dtype);
      check_scaled({16, 16}, {0, 0}, 4, function, dtype);
    }
  }
  check_scaled({2600, 2600}, {5, 2}, 0, Activation::kSwiGLU, DType::kBF16);
}

TEST_F(ExpertActivationCuda, WhatIsGivenAsFp8TooHasTheBitsOfQuantize) {
  for (const ActivationFunction& function : kFunctions) {
    check_quantized(768, {20, 0, 31}, 9, function);
    check_quantized(128, {1, 5}, 0, function);
    check_quantized(2560, {5, 2}, 3, function);
    check_quantized(384, {0, 0}, 4, function);
  }
}

TEST_F(ExpertActivationCuda, TinyExpertsThatGiveFp8) {
  check_quantized(128, {3, 0, 2}, 1, Activation::kSwiGLU);
}

TEST_F(ExpertActivationCuda, TinyExpertsOfFp8) {
  check_scaled({40, 40, 40}, {11, 0, 1}, 3, Activation::kSwiGLU, DType::kBF16);
}

TEST_F(ExpertActivationCuda, TinyExperts) {
  check_equal_sizes({.expert_sizes = {40, 40, 40}, .apply_prob = true}, {11, 0, 1}, 3,
                    {.once = true});
}

TEST_F(ExpertActivationCuda, TinyExpertsOfDifferentSizes) {
  Random random(5, 6);
  check_sizes({64, 8, 40}, {11, 0, 1}, Activation::kSwiGLU, DType::kBF16, random);
}

}  // namespace
}  // namespace tessera
