#include "ops/sparse_mixer/sparse_mixer.h"

#include "ops/sparse_mixer/sparse_mixer_testing.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class SparseMixerCuda : public testing::GpuTest {
 protected:
  /// The CPU's choices and counts, and its probabilities and gradients up to rounding.
  void check(const testing::SparseMixerCase& c, bool samples, bool training) const {
    SCOPED_TRACE(fmt::format("{} tokens, E {}, K {}, {}{}", c.tokens, c.num_experts, c.top_k,
                             c.jitter, samples ? " samples" : ""));
    auto inputs = testing::make_sparse_mixer_inputs(c, 3);
    if (samples) testing::add_sparse_mixer_noise(inputs, training);
    const SparseMixer op({c.jitter, samples});
    const auto on_host = run_on(cpu(), op, inputs);
    const auto on_device = run_on(gpu(), op, inputs);
    expect_near(on_device[0], on_host[0]);
    if (samples) {
      testing::expect_bitwise_equal(on_device[1], on_host[1], "drawn");
      testing::expect_bitwise_equal(on_device[2], on_host[2], "counts");
    }
    check_backward(c, inputs[0].tensor, samples ? on_host[1] : inputs[1].tensor);
  }

  void check_backward(const testing::SparseMixerCase& c, const Tensor& logits,
                      const Tensor& experts) const {
    Random random(5, 0);
    const OwnedTensor grad = testing::random_tensor(DType::kF32, experts.shape, random);
    const OwnedTensor expected(DType::kF32, logits.shape);
    const OwnedTensor found = testing::copy_to(gpu(), expected);
    const OwnedTensor copies[] = {testing::copy_to(gpu(), logits), testing::copy_to(gpu(), experts),
                                  testing::copy_to(gpu(), grad)};
    const SparseMixerBackward op({c.jitter});
    testing::run_kernel(op, cpu(), std::vector<Tensor>{logits, experts, grad},
                        std::vector<Tensor>{expected});
    testing::run_kernel(op, gpu(), std::vector<Tensor>{copies[0], copies[1], copies[2]},
                        std::vector<Tensor>{found});
    expect_near(testing::copy_to_host(gpu(), found), expected);
  }

  /// The outputs on the host.
  static std::vector<OwnedTensor> run_on(const Backend& backend, const SparseMixer& op,
                                         const std::vector<testing::TestInput>& inputs) {
    std::vector<OwnedTensor> copies;
    std::vector<Tensor> in;
    std::vector<ValueType> types;
    for (const testing::TestInput& input : inputs) {
      copies.push_back(testing::copy_to(backend, input.tensor));
      in.push_back(copies.back());
      types.push_back({in.back().dtype, in.back().shape});
    }
    std::vector<OwnedTensor> outputs;
    std::vector<Tensor> out;
    for (const ValueType& type : op.infer(types)) {
      outputs.push_back(testing::copy_to(backend, OwnedTensor(type.dtype, type.shape)));
      out.push_back(outputs.back());
    }
    testing::run_kernel(op, backend, in, out);
    std::vector<OwnedTensor> on_host;
    for (const OwnedTensor& output : outputs)
      on_host.push_back(testing::copy_to_host(backend, output));
    return on_host;
  }

  static void expect_near(const Tensor& found, const Tensor& expected) {
    const auto a = testing::to_doubles(found);
    const auto b = testing::to_doubles(expected);
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-5 * (1 + std::abs(b[i])));
  }
};

TEST_F(SparseMixerCuda, Cases) {
  for (const auto& c : testing::sparse_mixer_cases()) {
    check(c, false, false);
    check(c, true, false);
    check(c, true, true);
  }
}

TEST_F(SparseMixerCuda, TinyShape) {
  check({9, 5, 2, 0.3}, false, false);
  check({9, 5, 2, 0.3}, true, true);
}

}  // namespace
}  // namespace tessera
