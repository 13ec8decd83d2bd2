#include "ops/max_logits/max_logits_testing.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class MaxLogitsCuda : public testing::GpuTest {
 protected:
  std::vector<double> run(const MaxLogitsSpec& spec, const std::vector<Tensor>& inputs) const {
    std::vector<OwnedTensor> copies;
    std::vector<Tensor> views;
    for (const Tensor& input : inputs)
      views.push_back(copies.emplace_back(testing::copy_to(gpu(), input)));
    const OperatorPtr op = make_max_logits(spec);
    OwnedTensor result(DType::kF32, {spec.attention.num_heads}, "logits", gpu().device());
    const Tensor output = result;
    testing::run_kernel(*op, gpu(), views, std::span(&output, 1));
    return testing::to_doubles(testing::copy_to_host(gpu(), output));
  }

  void check(testing::LogitsCase c) const {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      c.dtype = dtype;
      const testing::LogitsData data = testing::make_logits(c, 3);
      for (const float limit : testing::logit_limits()) {
        SCOPED_TRACE(fmt::format("{} heads of {}, limit {}, {}", c.spec.num_heads, c.spec.head_size,
                                 limit, dtype_name(dtype)));
        const auto found =
            run({.attention = c.spec, .limit = limit}, {data.q, data.k, data.lse, data.cu_seqlens});
        const auto expected = testing::expected_logits(data, limit);
        for (size_t i = 0; i < found.size(); ++i)
          EXPECT_NEAR(found[i], expected[i], 1e-5 * std::max(1.0, std::abs(expected[i]))) << i;
      }
    }
  }
};

TEST_F(MaxLogitsCuda, EqualsTheDefinition) {
  for (const testing::LogitsCase& c : testing::logits_cases()) check(c);
  check({.spec = testing::heads(2, 1, 128), .lengths = {1000, 0, 500, 1}});
}

TEST_F(MaxLogitsCuda, LeavesOutRowsThatNoSequenceHas) {
  check({.spec = testing::heads(2, 1, 8), .lengths = {5, 90}, .rest = 3});
}

TEST_F(MaxLogitsCuda, TinyHeads) {
  check({.spec = testing::heads(3, 1, 5), .lengths = {3, 11}});
}

/// Keys stand rank by rank.
TEST_F(MaxLogitsCuda, RanksOfARingSeeAllKeys) {
  const testing::LogitsCase c{.spec = testing::heads(4, 2, 40), .lengths = {100, 0, 92}};
  const Zigzag tokens{.num_rows = 2, .row_length = 96, .ring = 3};
  const testing::LogitsData data = testing::make_logits(c, 9);
  const int64_t count = tokens.tokens_per_rank();
  const int64_t heads = c.spec.num_heads;
  const int64_t width = heads * c.spec.head_size;
  const int64_t key_width = c.spec.num_kv_heads * c.spec.head_size;
  OwnedTensor keys(DType::kF32, data.k.get().shape);
  for (int64_t token = 0; token < tokens.num_tokens(); ++token) {
    std::copy_n(data.k.get().as<float>() + token * key_width, key_width,
                keys.get().as<float>() + testing::rows_of(tokens, 0).row_of_key(token) * key_width);
  }
  for (const float limit : testing::logit_limits()) {
    std::vector<double> all(heads, kNoLogit);
    for (int64_t rank = 0; rank < tokens.ring; ++rank) {
      OwnedTensor q(DType::kF32, {count, width});
      OwnedTensor lse(DType::kF32, {heads, count});
      for (int64_t row = 0; row < count; ++row) {
        const int64_t token = testing::rows_of(tokens, rank).token_of_query(row);
        std::copy_n(data.q.get().as<float>() + token * width, width,
                    q.get().as<float>() + row * width);
        for (int64_t head = 0; head < heads; ++head)
          lse.get().as<float>()[head * count + row] =
              data.lse.get().as<float>()[head * tokens.num_tokens() + token];
      }
      const auto own = run({.attention = c.spec, .limit = limit, .tokens = tokens, .rank = rank},
                           {q, keys, lse, data.cu_seqlens});
      for (int64_t head = 0; head < heads; ++head) all[head] = std::max(all[head], own[head]);
    }
    const auto expected = testing::expected_logits(data, limit);
    for (int64_t head = 0; head < heads; ++head)
      EXPECT_NEAR(all[head], expected[head], 1e-5 * std::max(1.0, std::abs(expected[head])));
  }
}

}  // namespace
}  // namespace tessera
