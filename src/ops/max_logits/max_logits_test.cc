#include "ops/max_logits/max_logits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/max_logits/max_logits_testing.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_attention_cpu(table);
  add_max_logits_cpu(table);
  return table;
}

OwnedTensor copy_of(const Tensor& tensor) {
  OwnedTensor copy(tensor.dtype, tensor.shape);
  std::memcpy(copy.get().data, tensor.data, tensor.num_bytes());
  return copy;
}

std::vector<double> run(const MaxLogitsSpec& spec, const Tensor& q, const Tensor& k,
                        const Tensor& lse, const Tensor& cu_seqlens) {
  const auto inputs = list_inputs(TestInput{copy_of(q), Role::kConstant, "q"},
                                  TestInput{copy_of(k), Role::kConstant, "k"},
                                  TestInput{copy_of(lse), Role::kConstant, "lse"},
                                  TestInput{copy_of(cu_seqlens), Role::kConstant, "cu_seqlens"});
  return to_doubles(run_operator(*make_max_logits(spec), kernels(), inputs)[0]);
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 1e-5 * std::max(1.0, std::abs(expected[i]))) << i;
}

TEST(MaxLogits, EqualsTheDefinition) {
  for (LogitsCase c : logits_cases()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      c.dtype = dtype;
      const LogitsData data = make_logits(c, 3);
      for (const float limit : logit_limits()) {
        SCOPED_TRACE(
            fmt::format("{} heads of {}, limit {}", c.spec.num_heads, c.spec.head_size, limit));
        expect_near(
            run({.attention = c.spec, .limit = limit}, data.q, data.k, data.lse, data.cu_seqlens),
            expected_logits(data, limit));
      }
    }
  }
}

TEST(MaxLogits, LeavesOutRowsThatNoSequenceHas) {
  const LogitsCase c{.spec = heads(2, 1, 8), .lengths = {5, 9}, .rest = 3};
  const LogitsData data = make_logits(c, 4);
  expect_near(run({.attention = c.spec, .limit = -1e30}, data.q, data.k, data.lse, data.cu_seqlens),
              expected_logits(data, -1e30F));
}

/// Attention's own statistics bound the logits, and what exceeds a limit is found.
TEST(MaxLogits, GoesWithTheStatisticsOfAttention) {
  for (const LogitsCase& c : logits_cases()) {
    if (c.lengths.empty()) continue;
    const LogitsData data = make_logits(c, 5);
    const AttentionSpec spec = MaxLogits({.attention = c.spec}).spec();
    Random random(6, 1);
    const auto inputs = list_inputs(
        TestInput{copy_of(data.q), Role::kConstant, "q"},
        TestInput{copy_of(data.k), Role::kConstant, "k"},
        TestInput{random_tensor(DType::kF32, {c.num_tokens(), spec.num_kv_heads * spec.head_size_v},
                                random),
                  Role::kConstant, "v"},
        TestInput{copy_of(data.cu_seqlens), Role::kConstant, "cu_seqlens"});
    const auto attended = run_operator(*make_attention(c.spec), kernels(), inputs);
    const auto exact = expected_logits(data, -1e30F);
    const double limit = *std::ranges::min_element(exact);
    const auto found = run({.attention = c.spec, .limit = limit}, data.q, data.k,
                           attended[attention::kLse], data.cu_seqlens);
    for (size_t head = 0; head < exact.size(); ++head) {
      if (exact[head] > limit * (1 + 1e-5)) {
        EXPECT_NEAR(found[head], exact[head], 1e-4);
      } else {
        EXPECT_LE(found[head], limit * (1 + 1e-5));
      }
    }
  }
}

/// Each rank of a ring has its own queries; together they have seen all.
void check_ring(const LogitsCase& c, const Zigzag& tokens) {
  SCOPED_TRACE(
      fmt::format("{} rows of {} over {}", tokens.num_rows, tokens.row_length, tokens.ring));
  const LogitsData data = make_logits(c, 7);
  const AttentionSpec spec = MaxLogits({.attention = c.spec}).spec();
  const int64_t count = tokens.tokens_per_rank();
  std::vector<double> all(spec.num_heads, kNoLogit);
  for (const float limit : logit_limits()) {
    std::ranges::fill(all, kNoLogit);
    OwnedTensor keys(c.dtype, data.k.get().shape);
    const int64_t key_bytes = keys.get().num_bytes() / tokens.num_tokens();
    const int64_t query_bytes = data.q.get().num_bytes() / tokens.num_tokens();
    const TokenRows order = rows_of(tokens, 0);
    for (int64_t token = 0; token < tokens.num_tokens(); ++token)
      std::memcpy(static_cast<std::byte*>(keys.get().data) + order.row_of_key(token) * key_bytes,
                  static_cast<std::byte*>(data.k.get().data) + token * key_bytes, key_bytes);
    for (int64_t rank = 0; rank < tokens.ring; ++rank) {
      OwnedTensor q(c.dtype, {count, data.q.get().shape[1]});
      OwnedTensor lse(DType::kF32, {spec.num_heads, count});
      int64_t row = 0;
      tokens.for_each_run(rank, [&](const IndexRange& run) {
        for (int64_t token = run.begin; token < run.end(); ++token, ++row) {
          EXPECT_EQ(rows_of(tokens, rank).token_of_query(row), token);
          EXPECT_EQ(order.row_of_key(token), rank * count + row);
          std::memcpy(static_cast<std::byte*>(q.get().data) + row * query_bytes,
                      static_cast<std::byte*>(data.q.get().data) + token * query_bytes,
                      query_bytes);
          for (int64_t head = 0; head < spec.num_heads; ++head)
            lse.get().as<float>()[head * count + row] =
                data.lse.get().as<float>()[head * tokens.num_tokens() + token];
        }
      });
      const auto own = run({.attention = c.spec, .limit = limit, .tokens = tokens, .rank = rank}, q,
                           keys, lse, data.cu_seqlens);
      for (size_t head = 0; head < own.size(); ++head) all[head] = std::max(all[head], own[head]);
    }
    expect_near(all, expected_logits(data, limit));
  }
}

TEST(MaxLogits, RanksOfARingSeeAllKeys) {
  check_ring({.spec = heads(4, 2, 8), .lengths = {48}},
             {.num_rows = 1, .row_length = 48, .ring = 2});
  check_ring({.spec = heads(2, 2, 5), .lengths = {10, 0, 22, 16}},
             {.num_rows = 2, .row_length = 24, .ring = 3});
  check_ring({.spec = heads(2, 1, 8, 0, 7), .lengths = {32, 32}, .dtype = DType::kBF16},
             {.num_rows = 2, .row_length = 32, .ring = 4});
}

TEST(MaxLogits, RefusesWhatDoesNotFit) {
  const auto refuses = [](const std::vector<ValueType>& types, const char* message) {
    EXPECT_THAT([&] { make_max_logits({.attention = heads(4, 2, 8)})->infer(types); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  const ValueType q{DType::kF32, {5, 32}};
  const ValueType k{DType::kF32, {5, 16}};
  const ValueType lse{DType::kF32, {4, 5}};
  const ValueType ends{DType::kI32, {2}};
  EXPECT_EQ(make_max_logits({.attention = heads(4, 2, 8)})->infer(std::vector{q, k, lse, ends})[0],
            (ValueType{DType::kF32, {4}}));
  refuses({q, k, lse}, "takes q, k, lse and cu_seqlens");
  refuses({k, k, lse, ends}, "queries are");
  refuses({q, q, lse, ends}, "keys are");
  refuses({q, k, q, ends}, "lse is");
  refuses({q, k, lse, lse}, "cu_seqlens is");
  EXPECT_THROW(make_max_logits({.attention = heads(3, 2, 8)}), UserError);
  EXPECT_THROW(make_max_logits({.attention = heads(2, 2, 8),
                                .tokens = {.num_rows = 1, .row_length = 6, .ring = 2}}),
               UserError);
}

}  // namespace
}  // namespace tessera::testing
