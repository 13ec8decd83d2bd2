#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "ops/attention/attention.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::random_tensor;
using testing::Role;
using testing::TestInput;

KernelTable kernels() {
  KernelTable table;
  add_attention_cpu(table);
  return table;
}

TestInput constant(OwnedTensor tensor, const std::string& name) {
  return {std::move(tensor), Role::kConstant, name};
}

/// Rows begin to end of a matrix.
OwnedTensor rows_of(const Tensor& matrix, int64_t begin, int64_t end) {
  OwnedTensor rows(matrix.dtype, {end - begin, matrix.shape[1]});
  const int64_t row_bytes = matrix.shape[1] * dtype_size(matrix.dtype);
  std::memcpy(rows.get().data, static_cast<const std::byte*>(matrix.data) + begin * row_bytes,
              rows.get().num_bytes());
  return rows;
}

/// The first rows of `matrix` in a cache whose other rows are NaN: nothing may read those.
OwnedTensor cache_of(const Tensor& matrix, int64_t valid, int64_t capacity) {
  OwnedTensor cache(matrix.dtype, {capacity, matrix.shape[1]});
  std::memset(cache.get().data, 0xFF, cache.get().num_bytes());
  const int64_t bytes = valid * matrix.shape[1] * dtype_size(matrix.dtype);
  std::memcpy(cache.get().data, matrix.data, bytes);
  return cache;
}

/// The bounds of a sequence's chunks, which training takes for sequences.
OwnedTensor bounds_of(const AttentionSpec& spec, int64_t length) {
  const int64_t chunk = spec.chunk > 0 ? spec.chunk : length;
  std::vector<int32_t> bounds = {0};
  while (bounds.back() < length)
    bounds.push_back(static_cast<int32_t>(std::min(length, bounds.back() + chunk)));
  return testing::tensor_of_i32({std::ssize(bounds)}, bounds);
}

/// One sequence, and what the training forward makes of it.
struct Sequence {
  AttentionSpec spec;
  OwnedTensor q, k, v, o, lse;

  Sequence(const AttentionSpec& spec, int64_t length, DType dtype) : spec(spec) {
    Random random(5, 5);
    q = random_tensor(dtype, {length, spec.num_heads * spec.head_size}, random);
    k = random_tensor(dtype, {length, spec.num_kv_heads * spec.head_size}, random);
    v = random_tensor(dtype, {length, spec.num_kv_heads * spec.head_size_v}, random);
    std::vector<TestInput> inputs;
    inputs.push_back(constant(rows_of(q, 0, length), "q"));
    inputs.push_back(constant(rows_of(k, 0, length), "k"));
    inputs.push_back(constant(rows_of(v, 0, length), "v"));
    inputs.push_back(constant(bounds_of(spec, length), "c"));
    AttentionSpec packed = spec;
    packed.chunk = 0;
    auto outputs = testing::run_operator(*make_attention(packed), kernels(), inputs);
    o = std::move(outputs[0]);
    lse = std::move(outputs[1]);
  }

  int64_t length() const { return q.get().shape[0]; }

  /// o and, where wanted, lse.
  std::vector<OwnedTensor> run_cached(int64_t begin, int64_t end, int64_t capacity, int32_t length,
                                      bool gives_lse = false) const {
    std::vector<TestInput> inputs;
    inputs.push_back(constant(rows_of(q, begin, end), "q"));
    inputs.push_back(constant(cache_of(k, end, capacity), "k_cache"));
    inputs.push_back(constant(cache_of(v, end, capacity), "v_cache"));
    inputs.push_back(constant(testing::tensor_of_i32({1}, {length}), "cache_length"));
    return testing::run_operator(*make_attention_cached(spec, gives_lse), kernels(), inputs);
  }

  /// `actual` [N, T] has the bits of the training's from token `begin` on.
  void expect_lse(const Tensor& actual, int64_t begin) const {
    const auto found = actual.span<float>();
    const auto expected = lse.get().span<float>();
    const int64_t count = actual.shape[1];
    for (int64_t i = 0; i < std::ssize(found); ++i)
      EXPECT_EQ(found[i], expected[i / count * length() + begin + i % count]) << i;
  }

  void expect_chunks_match(int64_t chunk) const {
    for (int64_t begin = 0; begin < length(); begin += chunk) {
      const int64_t end = std::min(length(), begin + chunk);
      const bool gives_lse = begin % 2 == 0;
      const auto actual =
          run_cached(begin, end, length() + 3, static_cast<int32_t>(end), gives_lse);
      testing::expect_bitwise_equal(actual[0], rows_of(o, begin, end),
                                    fmt::format("tokens {} to {}", begin, end));
      if (gives_lse) expect_lse(actual[1], begin);
    }
  }
};

AttentionSpec heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t head_size_v,
                    int64_t window = 0) {
  return {.num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_size = head_size,
          .head_size_v = head_size_v,
          .window = window};
}

class AttentionCachedTest : public ::testing::TestWithParam<DType> {};

TEST_P(AttentionCachedTest, TokenByTokenGivesTheBitsOfTraining) {
  Sequence(heads(4, 2, 16, 16), 150, GetParam()).expect_chunks_match(1);
  Sequence(heads(6, 2, 24, 40, 50), 140, GetParam()).expect_chunks_match(1);
}

TEST_P(AttentionCachedTest, ChunksGiveTheBitsOfTraining) {
  for (const int64_t chunk : {3, 64, 100, 128, 300}) {
    Sequence(heads(4, 1, 33, 17), 300, GetParam()).expect_chunks_match(chunk);
    Sequence(heads(2, 2, 64, 64, 130), 300, GetParam()).expect_chunks_match(chunk);
  }
}

TEST_P(AttentionCachedTest, ChunksOfASequenceAreSeenAlone) {
  AttentionSpec spec = heads(4, 2, 24, 16);
  for (const int64_t chunk : {1, 7, 64, 130, 299, 300, 1000}) {
    spec.chunk = chunk;
    const Sequence sequence(spec, 300, GetParam());
    for (const int64_t part : {1, 50, 300}) sequence.expect_chunks_match(part);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, AttentionCachedTest, ::testing::Values(DType::kF32, DType::kBF16));

TEST(AttentionCachedLimitsTest, NoQueriesGiveNoRows) {
  const Sequence sequence(heads(2, 1, 8, 8), 5, DType::kF32);
  EXPECT_EQ(sequence.run_cached(5, 5, 8, 5)[0].get().shape, (Shape{0, 16}));
}

TEST(AttentionCachedLimitsTest, RefusesChunksWhereTheyAreNot) {
  AttentionSpec spec = heads(2, 1, 8, 8);
  spec.chunk = 3;
  const ValueType q{DType::kF32, {4, 16}};
  const ValueType k{DType::kF32, {4, 8}};
  EXPECT_THROW(make_attention(spec)->infer(std::vector{q, k, k, ValueType{DType::kI32, {2}}}),
               UserError);
  spec.window = 3;
  EXPECT_THROW(make_attention_cached(spec), UserError);
}

TEST(AttentionCachedLimitsTest, RefusesBadLengths) {
  const Sequence sequence(heads(2, 1, 8, 8), 5, DType::kF32);
  EXPECT_THROW(sequence.run_cached(2, 5, 8, 2), UserError);
  EXPECT_THROW(sequence.run_cached(2, 5, 8, 9), UserError);
  EXPECT_THROW(sequence.run_cached(2, 5, 8, -1), UserError);
}

}  // namespace
}  // namespace tessera
