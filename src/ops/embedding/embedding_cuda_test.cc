#include "ops/embedding/embedding.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

/// Tokens of a vocabulary, of which about half are one and the same.
OwnedTensor skewed_tokens(int64_t count, int64_t vocab_size, uint64_t seed) {
  Random random(seed, 4);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    const auto token = static_cast<int32_t>(random.next_below(static_cast<uint64_t>(vocab_size)));
    tokens.push_back(random.next_below(2) == 0 ? static_cast<int32_t>(vocab_size / 2) : token);
  }
  return testing::tensor_of_i32({count}, tokens);
}

class EmbeddingCuda : public testing::GpuTest {
 protected:
  void check(const EmbeddingSpec& spec, int64_t num_tokens, const Shape& table,
             testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} tokens, table {}", num_tokens, table.to_string()));
    const int64_t vocab = spec.vocab_size == 0 ? table[0] : spec.vocab_size;
    const OwnedTensor tokens = skewed_tokens(num_tokens, vocab, static_cast<uint64_t>(num_tokens));
    how.values = {{"tokens", tokens}};
    testing::check_operator_on_gpu(
        make_embedding(spec),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"tokens", "w"}, {{DType::kI32, {num_tokens}}, {dtype, table}}};
        },
        {0}, cpu(), gpu(), how);
  }
};

TEST_F(EmbeddingCuda, Tables) {
  for (const int64_t tokens : {0, 1, 31, 700}) {
    for (const int64_t hidden : {8, 5, 1100}) check({}, tokens, {300, hidden});
  }
  check({}, 5000, {3, 16});
  check({}, 40'000, {3, 8});
  check({}, 9001, {20'000, 24});
}

TEST_F(EmbeddingCuda, VocabulariesOfManyRowsForABlock) {
  check({}, 900, {1'100'000, 8});
}

TEST_F(EmbeddingCuda, PaddingAndOtherTables) {
  check({.padding_token = 20}, 500, {40, 32});
  check({.padding_token = 3, .first_row = 30, .vocab_size = 100}, 500, {40, 32});
  check({.first_row = 100, .vocab_size = 100}, 60, {0, 32});
}

/// One row's tokens make several segments.
TEST_F(EmbeddingCuda, TinyTable) {
  check({}, 101, {140, 40}, {.once = true});
}

TEST_F(EmbeddingCuda, RaggedTokens) {
  const OwnedTensor tokens = skewed_tokens(300, 50, 8);
  for (const int64_t extent : {0, 1, 222}) {
    testing::check_ragged_operator_on_gpu(
        make_embedding(EmbeddingSpec{}),
        [&](DType dtype) -> testing::OperatorInputs {
          return {{"tokens", "w"}, {testing::ragged_rows(DType::kI32, {300}), {dtype, {50, 64}}}};
        },
        {0}, extent, cpu(), gpu(), {.values = {{"tokens", tokens}}});
  }
}

using EmbeddingCudaDeathTest = EmbeddingCuda;

TEST_F(EmbeddingCudaDeathTest, TokenOutsideTheVocabulary) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    const OwnedTensor tokens = testing::copy_to(gpu(), testing::tensor_of_i32({2}, {1, 9}));
    const OwnedTensor table(DType::kF32, {4, 8}, "a table", gpu().device());
    const OwnedTensor out(DType::kF32, {2, 8}, "rows", gpu().device());
    const Tensor inputs[] = {tokens, table};
    const Tensor outputs[] = {out};
    try {
      testing::run_kernel(*make_embedding(EmbeddingSpec{}), gpu(), inputs, outputs);
    } catch (const InternalError&) {
      std::_Exit(3);
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(3), "token id is outside the vocabulary");
}

}  // namespace
}  // namespace tessera
