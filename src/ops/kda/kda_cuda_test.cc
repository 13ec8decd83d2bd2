#include "ops/kda/kda.h"

#include <cmath>

#include "ops/gated_delta/gated_delta_kernels.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

struct Case {
  KdaSpec spec;
  std::vector<int32_t> bounds;
  float decay = 0.3F;  ///< of a token, about

  std::string to_string() const {
    return fmt::format("{} heads, keys of {}, values of {}, {} tokens in {} sequences",
                       spec.num_heads, spec.key_size, spec.value_size, bounds.back(),
                       bounds.size() - 1);
  }
};

/// Decays and strengths as models have them: below 0, and between 0 and 1.
OwnedTensor random_gates(const Shape& shape, Random& random, float decay) {
  OwnedTensor gates = testing::random_tensor(DType::kF32, shape, random);
  float* values = gates.get().as<float>();
  for (int64_t i = 0; i < shape.num_elements(); ++i)
    values[i] = decay > 0 ? -decay * std::abs(values[i]) : 1.0F / (1.0F + std::exp(-values[i]));
  return gates;
}

class KdaCuda : public testing::GpuTest {
 protected:
  void check(const Case& c, testing::GpuCheck how = {}, bool with_decay = true) const {
    SCOPED_TRACE(c.to_string());
    const int64_t tokens = c.bounds.back();
    const Shape key_shape = {tokens, c.spec.num_heads * c.spec.key_size};
    const Shape gates = {tokens, c.spec.num_heads};
    Random random(5, 0);
    const OwnedTensor ends = testing::tensor_of_i32({std::ssize(c.bounds)}, c.bounds);
    const OwnedTensor decay = random_gates(key_shape, random, c.decay);
    const OwnedTensor beta = random_gates(gates, random, 0);
    const std::string decay_name = with_decay ? "x_decay" : "decay";
    how.values = {{"cu_seqlens", ends}, {decay_name, decay}, {"x_beta", beta}};
    // Gradients of decays are sums of later tokens' terms that may nearly vanish.
    how.tolerance_f32 = 3e-3;
    const bool fast = cuda::takes_fast_delta(DType::kBF16, c.spec.key_size, c.spec.value_size);
    // On tensor cores states and what tokens write are rounded, and little may be left of a row.
    how.tolerance_bf16 = fast ? 5e-2 : 2e-2;
    testing::check_operator_on_gpu(
        make_kda(c.spec),
        [&](DType dtype) -> testing::OperatorInputs {
          const ValueType keys{dtype, key_shape};
          const ValueType values{dtype, {tokens, c.spec.num_heads * c.spec.value_size}};
          return {{"x_q", "x_k", "x_v", decay_name, "x_beta", "cu_seqlens"},
                  {keys,
                   keys,
                   values,
                   {DType::kF32, key_shape},
                   {DType::kF32, gates},
                   {DType::kI32, ends.get().shape}}};
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(KdaCuda, SmallSizes) {
  check({{1, 4, 4}, {0, 0}});
  check({{4, 8, 5}, {0, 3, 3, 4, 20}});
  check({{3, 17, 16}, {0, 64, 129}});
  check({{2, 16, 33}, {0, 63, 200}});
  check({{1, 5, 1}, {0, 130}});
}

/// Whose decays have no gradients.
TEST_F(KdaCuda, OneToken) {
  check({{1, 4, 3}, {0, 1}}, {}, false);
  check({{4, 128, 128}, {0, 1}}, {}, false);
}

TEST_F(KdaCuda, OddSizes) {
  check({{2, 96, 80}, {0, 5, 64, 190}});
  check({{2, 130, 70}, {0, 100, 101, 230, 230}});
}

TEST_F(KdaCuda, HeadsOf128) {
  check({{4, 128, 128}, {0, 64}});
  check({{8, 128, 128}, {0, 65, 66, 128, 300}});
}

TEST_F(KdaCuda, ManyShortSequences) {
  std::vector<int32_t> bounds = {0};
  for (int i = 0; i < 60; ++i) bounds.push_back(bounds.back() + i % 9);
  for (int i = 0; i < 40; ++i) bounds.push_back(bounds.back());
  check({{4, 64, 64}, bounds});
  check({{2, 16, 8}, bounds});
}

TEST_F(KdaCuda, StrongAndWeakDecays) {
  for (const float decay : {1e-3F, 20.0F}) {
    check({{4, 128, 128}, {0, 90, 300}, decay});
    check({{2, 24, 8}, {0, 90, 200}, decay});
  }
}

TEST_F(KdaCuda, TinyShape) {
  check({{2, 4, 3}, {0, 3, 70}}, {.once = true});
  check({{2, 66, 64}, {0, 66}}, {.once = true});
}

/// On tensor cores.
TEST_F(KdaCuda, TinyFast) {
  check({{2, 64, 64}, {0, 3, 70}}, {.dtypes = {DType::kBF16}, .once = true});
}

TEST_F(KdaCuda, HeadsOf64) {
  check({{2, 64, 128}, {0, 100, 164, 230}});
  check({{2, 128, 64}, {0, 64, 128, 257}});
}

/// Rows [begin, end) of a tensor [T, C].
Tensor rows_of(const Tensor& x, int64_t begin, int64_t end) {
  const int64_t bytes = x.shape[1] * dtype_size(x.dtype);
  return {static_cast<std::byte*>(x.data) + begin * bytes, x.dtype, {end - begin, x.shape[1]}};
}

TEST_F(KdaCuda, GoesOnFromStates) {
  for (const KdaSpec& spec : {KdaSpec{4, 8, 5}, KdaSpec{2, 128, 128}}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      constexpr int64_t kTokens = 150;
      Random random(5, 0);
      const Shape keys = {kTokens, spec.num_heads * spec.key_size};
      std::vector<OwnedTensor> inputs;
      for (int i = 0; i < 2; ++i) inputs.push_back(testing::random_tensor(dtype, keys, random));
      const int64_t width = spec.num_heads * spec.value_size;
      inputs.push_back(testing::random_tensor(dtype, {kTokens, width}, random));
      inputs.push_back(random_gates(keys, random, 0.3F));
      inputs.push_back(random_gates({kTokens, spec.num_heads}, random, 0));
      std::vector<Tensor> host(inputs.begin(), inputs.end());
      const OwnedTensor ends = testing::tensor_of_i32({2}, {0, kTokens});
      host.push_back(ends);
      const OwnedTensor whole(dtype, {kTokens, width}, "o");
      testing::run_kernel(Kda(spec), cpu(), host, std::vector<Tensor>{whole});
      const auto expected = testing::to_doubles(whole);
      std::vector<OwnedTensor> on_gpu;
      for (const OwnedTensor& input : inputs) on_gpu.push_back(testing::copy_to(gpu(), input));
      const Shape shape = {spec.num_heads * spec.key_size, spec.value_size};
      const OwnedTensor states = testing::copy_to(
          gpu(), testing::tensor_of(shape, std::vector<float>(shape.num_elements(), NAN)));
      const std::vector<int64_t> steps = {0, 1, 2, 67, 130, 131, kTokens};
      for (size_t i = 0; i + 1 < steps.size(); ++i) {
        std::vector<Tensor> in;
        for (const OwnedTensor& input : on_gpu)
          in.push_back(rows_of(input, steps[i], steps[i + 1]));
        const OwnedTensor start =
            testing::copy_to(gpu(), testing::tensor_of_i32({1}, {static_cast<int32_t>(steps[i])}));
        in.push_back(start);
        const OwnedTensor o(dtype, {steps[i + 1] - steps[i], width}, "o", gpu().device());
        testing::run_kernel(KdaCached(spec), gpu(), in, std::vector<Tensor>{o, states});
        const auto actual = testing::to_doubles(testing::copy_to_host(gpu(), o));
        for (size_t j = 0; j < actual.size(); ++j) {
          const double value = expected[steps[i] * width + j];
          ASSERT_NEAR(actual[j], value, dtype == DType::kF32 ? 1e-5 : 4e-3 + 8e-3 * std::abs(value))
              << fmt::format("{} from {}", j, steps[i]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera
