#include "ops/paged_attention/paged_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::random_tensor;
using testing::Role;
using testing::tensor_of_i32;
using testing::TestInput;

KernelTable kernels() {
  KernelTable table;
  add_attention_cpu(table);
  add_paged_attention_cpu(table);
  return table;
}

TestInput constant(const Tensor& tensor, const std::string& name) {
  OwnedTensor copy(tensor.dtype, tensor.shape);
  std::memcpy(copy.get().data, tensor.data, tensor.num_bytes());
  return {std::move(copy), Role::kConstant, name};
}

/// Copies `count` rows.
void copy_rows(const Tensor& from, int64_t first, const Tensor& to, int64_t to_first,
               int64_t count) {
  const int64_t bytes = from.shape[1] * dtype_size(from.dtype);
  std::memcpy(static_cast<std::byte*>(to.data) + to_first * bytes,
              static_cast<const std::byte*>(from.data) + first * bytes, count * bytes);
}

/// A sequence of `length` tokens, of which the last `count` are new.
struct Piece {
  int64_t length, count;
};

/// Several sequences, what training's attention makes of each, and their pages.
struct Batch {
  AttentionSpec spec;
  DType dtype;
  std::vector<Piece> pieces;
  int64_t padding;  ///< rows after the last sequence's
  int64_t num_tokens = 0;
  OwnedTensor q, keys, values, expected_o, expected_lse;
  std::vector<int32_t> bounds = {0}, lengths, table;
  int64_t table_width = 1, num_pages = 1;

  Batch(const AttentionSpec& given, DType type, std::vector<Piece> all, int64_t padding_rows)
      : spec(given), dtype(type), pieces(std::move(all)), padding(padding_rows) {
    for (const Piece& piece : pieces) {
      num_tokens += piece.count;
      num_pages += pages_of(piece.length);
      table_width = std::max(table_width, pages_of(piece.length));
    }
    const auto zeros = [&](int64_t rows, int64_t columns, DType own) {
      OwnedTensor tensor(own, {rows, columns});
      std::memset(tensor.get().data, 0, tensor.get().num_bytes());
      return tensor;
    };
    q = zeros(num_tokens + padding, spec.num_heads * spec.head_size, dtype);
    expected_o = zeros(num_tokens + padding, spec.num_heads * spec.head_size_v, dtype);
    expected_lse = zeros(spec.num_heads, num_tokens + padding, DType::kF32);
    keys = zeros(num_pages * kPageTokens, spec.num_kv_heads * spec.head_size, dtype);
    values = zeros(num_pages * kPageTokens, spec.num_kv_heads * spec.head_size_v, dtype);
    // What nothing may read is NaN.
    std::memset(keys.get().data, 0xFF, keys.get().num_bytes());
    std::memset(values.get().data, 0xFF, values.get().num_bytes());
    Random random(9, 9);
    int32_t next_page = static_cast<int32_t>(num_pages) - 1;  // falling, page 0 belongs to nobody
    for (const Piece& piece : pieces) add(piece, next_page, random);
  }

  void add(const Piece& piece, int32_t& next_page, Random& random) {
    const auto row = [&](int64_t width) {
      return random_tensor(dtype, {piece.length, width}, random);
    };
    const OwnedTensor all_q = row(spec.num_heads * spec.head_size);
    const OwnedTensor k = row(spec.num_kv_heads * spec.head_size);
    const OwnedTensor v = row(spec.num_kv_heads * spec.head_size_v);
    std::vector<TestInput> inputs;
    inputs.push_back(constant(all_q, "q"));
    inputs.push_back(constant(k, "k"));
    inputs.push_back(constant(v, "v"));
    AttentionSpec packed = spec;  // given as chunks
    packed.chunk = 0;
    const int64_t chunk = spec.chunk > 0 ? spec.chunk : std::max<int64_t>(piece.length, 1);
    std::vector<int32_t> ends = {0};
    while (ends.back() < piece.length)
      ends.push_back(static_cast<int32_t>(std::min(piece.length, ends.back() + chunk)));
    inputs.push_back(constant(tensor_of_i32({std::ssize(ends)}, ends), "cu_seqlens"));
    const auto trained = testing::run_operator(*make_attention(packed), kernels(), inputs);
    const int64_t old = piece.length - piece.count;
    const int64_t first = bounds.back();
    copy_rows(all_q, old, q, first, piece.count);
    copy_rows(trained[0], old, expected_o, first, piece.count);
    for (int64_t head = 0; head < spec.num_heads; ++head) {
      const float* from = trained[1].get().as<float>() + head * piece.length + old;
      std::copy_n(from, piece.count,
                  expected_lse.get().as<float>() + head * (num_tokens + padding) + first);
    }
    for (int64_t begin = 0; begin < piece.length; begin += kPageTokens) {
      const int64_t count = std::min(kPageTokens, piece.length - begin);
      copy_rows(k, begin, keys, next_page * kPageTokens, count);
      copy_rows(v, begin, values, next_page * kPageTokens, count);
      table.push_back(next_page--);
    }
    bounds.push_back(static_cast<int32_t>(first + piece.count));
    lengths.push_back(static_cast<int32_t>(piece.length));
    table.resize(lengths.size() * static_cast<size_t>(table_width), -7);  // nobody reads these
  }

  std::vector<OwnedTensor> run() const {
    const auto count = static_cast<int64_t>(lengths.size());
    std::vector<TestInput> inputs;
    inputs.push_back(constant(q, "q"));
    inputs.push_back(constant(keys, "key_pages"));
    inputs.push_back(constant(values, "value_pages"));
    inputs.push_back(constant(tensor_of_i32({count + 1}, bounds), "cu_seqlens"));
    inputs.push_back(constant(tensor_of_i32({count}, lengths), "lengths"));
    inputs.push_back(constant(tensor_of_i32({count, table_width}, table), "page_table"));
    return testing::run_operator(*make_paged_attention(spec), kernels(), inputs);
  }

  void expect_bits_of_training() const {
    const auto actual = run();
    testing::expect_bitwise_equal(actual[0], expected_o, "o");
    testing::expect_bitwise_equal(actual[1], expected_lse, "lse");
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

class PagedAttentionTest : public ::testing::TestWithParam<DType> {};

TEST_P(PagedAttentionTest, SequencesOfAnyLengthHaveTheBitsOfTraining) {
  const std::vector<Piece> pieces = {{1, 1},   {127, 1},   {0, 0},     {128, 5},
                                     {300, 1}, {129, 129}, {260, 131}, {5, 0}};
  Batch(heads(4, 2, 16, 16), GetParam(), pieces, 0).expect_bits_of_training();
  Batch(heads(6, 2, 24, 40, 50), GetParam(), pieces, 3).expect_bits_of_training();
  Batch(heads(2, 2, 33, 17, 130), GetParam(), pieces, 1).expect_bits_of_training();
}

TEST_P(PagedAttentionTest, ChunksOfSequencesAreSeenAlone) {
  const std::vector<Piece> pieces = {{1, 1},   {127, 1},   {0, 0},     {128, 5},
                                     {300, 1}, {129, 129}, {260, 131}, {5, 0}};
  AttentionSpec spec = heads(4, 2, 24, 16);
  for (const int64_t chunk : {128, 256, 1000}) {
    spec.chunk = chunk;
    Batch(spec, GetParam(), pieces, 2).expect_bits_of_training();
  }
  for (const int64_t chunk : {1, 9, 100, 130}) {  // which pages cut into other tiles
    spec.chunk = chunk;
    const Batch batch(spec, GetParam(), pieces, 2);
    const double tolerance = GetParam() == DType::kF32 ? 1e-5 : 2e-2;
    const auto actual = batch.run();
    testing::expect_rows_near(actual[0], batch.expected_o, tolerance, "o");
    testing::expect_rows_near(actual[1], batch.expected_lse, tolerance, "lse");
  }
}

INSTANTIATE_TEST_SUITE_P(Types, PagedAttentionTest, ::testing::Values(DType::kF32, DType::kBF16));

TEST(PagedAttentionLimits, NoSequencesGiveZeros) {
  Batch(heads(2, 1, 8, 8), DType::kF32, {}, 4).expect_bits_of_training();
  Batch(heads(2, 1, 8, 8), DType::kF32, {}, 0).expect_bits_of_training();
}

TEST(PagedAttentionLimits, RefusesWhatIsNotThere) {
  const auto refused = [](const auto& change) {
    Batch batch(heads(2, 1, 8, 8), DType::kF32, {{130, 2}, {4, 1}}, 1);
    change(batch);
    EXPECT_THROW(batch.run(), UserError);
  };
  refused([](Batch& b) { b.lengths[0] = 1; });
  refused([](Batch& b) { b.lengths[1] = 257; });
  refused([](Batch& b) { b.bounds[1] = 4; });
  refused([](Batch& b) { b.bounds[2] = 5; });
  refused([](Batch& b) { b.table[1] = -1; });
  refused([](Batch& b) { b.table[2] = static_cast<int32_t>(b.num_pages); });
}

/// Runs the kernel on a cache in place.
void write(const Tensor& cache, const Tensor& rows, const std::vector<int32_t>& to) {
  const OperatorPtr op = make_page_write(cache.shape[0]);
  const OwnedTensor own = tensor_of_i32({static_cast<int64_t>(to.size())}, to);
  const std::vector<ValueType> types = {{rows.dtype, rows.shape}, {DType::kI32, own.get().shape}};
  ASSERT_EQ(op->infer(types)[0], (ValueType{cache.dtype, cache.shape}));
  const std::vector<Tensor> inputs = {rows, own.get()};
  const std::vector<Tensor> outputs = {cache};
  kernels().at("page_write")(*op, {inputs, outputs, {}});
}

TEST(PageWriteTest, WritesItsRowsAndNoOthers) {
  Random random(1, 1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t width : {1, 5, 16}) {
      const OwnedTensor cache = random_tensor(dtype, {9, width}, random);
      const OwnedTensor rows = random_tensor(dtype, {4, width}, random);
      const OwnedTensor expected = random_tensor(dtype, {9, width}, random);
      copy_rows(cache, 0, expected, 0, 9);
      copy_rows(rows, 0, expected, 8, 1);
      copy_rows(rows, 2, expected, 0, 1);
      copy_rows(rows, 3, expected, 5, 1);
      write(cache, rows, {8, -1, 0, 5});
      testing::expect_bitwise_equal(cache, expected, "the cache");
    }
  }
}

TEST(PageWriteTest, RefusesRowsThatAreNotThere) {
  Random random(1, 2);
  const OwnedTensor cache = random_tensor(DType::kF32, {9, 5}, random);
  const OwnedTensor rows = random_tensor(DType::kF32, {2, 5}, random);
  EXPECT_THROW(write(cache, rows, {0, 9}), UserError);
  EXPECT_THROW(write(cache, rows, {-2, 0}), UserError);
  EXPECT_THROW(make_page_write(-1), UserError);
  write({nullptr, DType::kF32, {9, 5}}, rows, {0, 1});  // an unbound cache is left out
}

TEST(PageWriteTest, RefusesShapesThatDoNotFit) {
  const OperatorPtr op = make_page_write(4);
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kI32, {2, 3}}, {DType::kI32, {2}}}),
               UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kF32, {2, 3}}, {DType::kI32, {3}}}),
               UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{{DType::kF32, {2, 3}}}), UserError);
}

}  // namespace
}  // namespace tessera
