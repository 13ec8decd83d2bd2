#include "ops/expert_bias/expert_bias_testing.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

using Case = testing::BiasCase;

class ExpertBiasCuda : public testing::GpuTest {
 protected:
  /// Where experts differ in size, columns beyond an expert's own are compared too: they are
  /// copied.
  void check(const Case& c, testing::GpuCheck how = {}) const {
    const OperatorPtr op = make_expert_bias(c.spec);
    SCOPED_TRACE(fmt::format("{} rows {}", c.num_rows(), op->attributes()));
    const bool sparse = c.spec.block_size > 0;
    const int64_t num_experts = std::ssize(c.rows_of);
    const OwnedTensor offsets = testing::tensor_of_i64({num_experts + 1}, c.offsets());
    const std::vector<int32_t> blocks = sparse ? c.row_offsets() : std::vector<int32_t>{0};
    const OwnedTensor row_offsets = testing::tensor_of_i32({std::ssize(blocks)}, blocks);
    how.values = {{"offsets", offsets}, {"row_offsets", row_offsets}};
    // Gradients of probabilities are sums that may nearly vanish.
    how.tolerance_f32 = 1e-4;
    testing::check_operator_on_gpu(
        op,
        [&](DType dtype) -> testing::OperatorInputs {
          const int64_t block = c.spec.block_size;
          const Shape shape =
              sparse ? Shape{blocks.back(), block, block} : Shape{c.num_rows(), c.width};
          testing::OperatorInputs inputs{
              .names = {"x", "w_bias"}, .types = {{dtype, shape}, {DType::kF32, {c.num_biases()}}}};
          const auto add = [&](const char* name, const ValueType& type) {
            inputs.names.emplace_back(name);
            inputs.types.push_back(type);
          };
          if (c.spec.apply_prob) add("x_probs", {DType::kF32, {c.num_rows()}});
          add("offsets", {DType::kI64, {num_experts + 1}});
          if (sparse) add("row_offsets", {DType::kI32, {std::ssize(blocks)}});
          return inputs;
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(ExpertBiasCuda, Matrices) {
  for (const bool probs : {false, true}) {
    check({{.sizes = {8}, .apply_prob = probs}, {0}, 8});
    check({{.sizes = {1}, .apply_prob = probs}, {1}, 1});
    check({{.sizes = {33, 33, 33}, .apply_prob = probs}, {0, 190, 0}, 33});
    check({{.sizes = {264, 264, 264, 264}, .apply_prob = probs}, {70, 1, 0, 1300}, 264});
    check({{.sizes = std::vector<int64_t>(32, 2880), .apply_prob = probs},
           std::vector<int64_t>(32, 40),
           2880});
  }
}

TEST_F(ExpertBiasCuda, SomeColumns) {
  for (const bool probs : {false, true}) {
    check({{.sizes = {64, 64}, .first_column = 64, .apply_prob = probs}, {30, 9}, 192});
    check({{.sizes = {5, 5}, .first_column = 10, .apply_prob = probs}, {30, 9}, 15});
  }
}

TEST_F(ExpertBiasCuda, BlockSparseValues) {
  for (const int64_t block : {8, 64, 128}) {
    check({{.sizes = {2 * block, block, 3 * block}, .block_size = block}, {2 * block, 0, block}});
    check({{.sizes = {2 * block, 2 * block}, .apply_prob = true, .block_size = block},
           {block, 3 * block}});
  }
}

TEST_F(ExpertBiasCuda, TinyMatrix) {
  check({{.sizes = {24, 24}, .apply_prob = true}, {7, 4}, 24}, {.once = true});
}

TEST_F(ExpertBiasCuda, TinyBlockSparseValues) {
  check({{.sizes = {16, 8}, .block_size = 8}, {8, 16}}, {.once = true});
}

}  // namespace
}  // namespace tessera
