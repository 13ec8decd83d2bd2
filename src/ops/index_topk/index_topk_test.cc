#include "ops/index_topk/index_topk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "ops/paged_attention/pages.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

KernelTable kernels() {
  KernelTable table;
  add_index_topk_cpu(table);
  return table;
}

TestInput constant(OwnedTensor tensor, const std::string& name) {
  return {std::move(tensor), Role::kConstant, name};
}

OwnedTensor vector_of(const std::vector<int32_t>& values) {
  return tensor_of_i32({std::ssize(values)}, values);
}

std::vector<int32_t> bounds_of(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> bounds = {0};
  for (const int64_t length : lengths)
    bounds.push_back(bounds.back() + static_cast<int32_t>(length));
  return bounds;
}

/// Rows begin to end of a matrix.
OwnedTensor rows_of(const Tensor& matrix, int64_t begin, int64_t end) {
  OwnedTensor rows(matrix.dtype, {end - begin, matrix.shape[1]});
  const int64_t row_bytes = matrix.shape[1] * dtype_size(matrix.dtype);
  std::memcpy(rows.get().data, static_cast<const std::byte*>(matrix.data) + begin * row_bytes,
              rows.get().num_bytes());
  return rows;
}

struct Problem {
  IndexSpec spec;
  std::vector<int64_t> lengths;
  OwnedTensor q, weights, k;

  Problem(const IndexSpec& given, const std::vector<int64_t>& sequences, DType dtype = DType::kF32)
      : spec(given), lengths(sequences) {
    Random random(4, 6);
    const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    q = random_tensor(dtype, {tokens, spec.num_heads * spec.head_size}, random);
    weights = random_tensor(dtype, {tokens, spec.num_heads}, random);
    k = random_tensor(dtype, {tokens, spec.head_size}, random);
  }

  std::vector<TestInput> queries(int64_t begin, int64_t end) const {
    return list_inputs(constant(rows_of(q, begin, end), "q"),
                       constant(rows_of(weights, begin, end), "weights"));
  }

  std::vector<int32_t> choose() const {
    std::vector<TestInput> inputs = queries(0, q.get().shape[0]);
    inputs.push_back(constant(rows_of(k, 0, k.get().shape[0]), "k"));
    inputs.push_back(constant(vector_of(bounds_of(lengths)), "cu_seqlens"));
    const auto outputs = run_operator(IndexTopk(spec), kernels(), inputs);
    const auto chosen = outputs[0].get().span<int32_t>();
    return {chosen.begin(), chosen.end()};
  }

  double score(int64_t token, int64_t key) const {
    const auto queries = to_doubles(q);
    const auto factors = to_doubles(weights);
    const auto keys = to_doubles(k);
    double sum = 0;
    for (int64_t h = 0; h < spec.num_heads; ++h) {
      double dot = 0;
      for (int64_t c = 0; c < spec.head_size; ++c)
        dot += queries[(token * spec.num_heads + h) * spec.head_size + c] *
               keys[key * spec.head_size + c];
      sum += factors[token * spec.num_heads + h] * std::max(0.0, dot);
    }
    return sum;
  }

  /// The choice as its definition says it.
  std::vector<int32_t> expected() const {
    std::vector<int32_t> rows;
    int64_t begin = 0;
    for (const int64_t length : lengths) {
      for (int64_t token = begin; token < begin + length; ++token) {
        std::vector<std::pair<double, int32_t>> seen;
        for (int64_t key = begin; key <= token; ++key)
          seen.emplace_back(score(token, key), static_cast<int32_t>(key));
        std::ranges::sort(seen, std::greater<>());
        seen.resize(std::min<int64_t>(std::ssize(seen), spec.top_k));
        std::vector<int32_t> own;
        for (const auto& [score, key] : seen) own.push_back(key);
        std::ranges::sort(own);
        own.resize(spec.top_k, -1);
        rows.insert(rows.end(), own.begin(), own.end());
      }
      begin += length;
    }
    return rows;
  }
};

IndexSpec index_of(int64_t num_heads, int64_t head_size, int64_t top_k) {
  return {.num_heads = num_heads, .head_size = head_size, .top_k = top_k};
}

TEST(IndexTopk, ChoosesTheBestThatATokenSees) {
  for (const auto& lengths : std::vector<std::vector<int64_t>>{
           {}, {0}, {1}, {0, 1, 0, 2, 0}, {30}, {7, 8, 9}, {1, 41, 0, 5}}) {
    for (const auto& spec : {index_of(1, 1, 1), index_of(5, 16, 4), index_of(33, 7, 8),
                             index_of(64, 12, 3), index_of(8, 33, 100)}) {
      const Problem problem(spec, lengths);
      EXPECT_EQ(problem.choose(), problem.expected())
          << spec.num_heads << " heads of " << spec.head_size << ", " << lengths.size()
          << " sequences";
    }
  }
}

TEST(IndexTopk, ChoosesOfBf16) {
  const Problem problem(index_of(8, 16, 5), {30, 2}, DType::kBF16);
  EXPECT_EQ(problem.choose(), problem.expected());
}

TEST(IndexTopk, OfEqualScoresTheNearestWin) {
  Problem problem(index_of(2, 4, 2), {5});
  std::memset(problem.q.get().data, 0, problem.q.get().num_bytes());
  EXPECT_THAT(problem.choose(), ElementsAre(0, -1, 0, 1, 1, 2, 2, 3, 3, 4));
}

/// Scores that are no numbers choose something, and as many.
TEST(IndexTopk, NanChoosesSomething) {
  Problem problem(index_of(2, 4, 3), {40});
  for (float& x : problem.q.get().span<float>()) x = std::numeric_limits<float>::quiet_NaN();
  const auto chosen = problem.choose();
  for (size_t token = 3; token < 40; ++token) {
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_GE(chosen[token * 3 + i], i == 0 ? 0 : chosen[token * 3 + i - 1] + 1);
      EXPECT_LE(chosen[token * 3 + i], static_cast<int32_t>(token));
    }
  }
}

TEST(IndexTopk, SameForAnyNumberOfThreads) {
  const int before = omp_get_max_threads();
  const Problem problem(index_of(4, 8, 6), {50, 20});
  omp_set_num_threads(1);
  const auto one = problem.choose();
  omp_set_num_threads(3);
  EXPECT_EQ(problem.choose(), one);
  omp_set_num_threads(before);
}

/// The last tokens of a sequence over its cache choose what they do in training.
TEST(IndexTopk, CachesChooseTheSame) {
  constexpr int64_t kLength = 25;
  constexpr int64_t kNew = 6;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Problem problem(index_of(4, 8, 5), {kLength}, dtype);
    const auto all = problem.choose();
    std::vector<TestInput> inputs = problem.queries(kLength - kNew, kLength);
    OwnedTensor cache(dtype, {40, 8});
    std::memset(cache.get().data, 0xFF, cache.get().num_bytes());
    std::memcpy(cache.get().data, problem.k.get().data, problem.k.get().num_bytes());
    inputs.push_back(constant(std::move(cache), "cache"));
    inputs.push_back(constant(vector_of({kLength}), "cache_length"));
    const auto outputs = run_operator(IndexTopkCached(problem.spec), kernels(), inputs);
    const auto chosen = outputs[0].get().span<int32_t>();
    EXPECT_EQ(std::vector<int32_t>(chosen.begin(), chosen.end()),
              std::vector<int32_t>(all.end() - kNew * 5, all.end()));
  }
}

/// Two sequences over pages, in rows of these, and rows of no sequence.
TEST(IndexTopk, PagesChooseTheSame) {
  const std::vector<int64_t> lengths = {kPageTokens + 30, 9};
  const Problem problem(index_of(4, 8, 5), lengths);
  const auto all = problem.choose();
  constexpr int64_t kNew = 3;
  constexpr int64_t kPages = 4;
  const std::vector<int32_t> table = {2, 0, 3, -1};
  OwnedTensor pages(DType::kF32, {kPages * kPageTokens, 8});
  std::memset(pages.get().data, 0xFF, pages.get().num_bytes());
  std::vector<int32_t> expected;
  const auto row_of = [&](int64_t sequence, int64_t position) {
    return table[sequence * 2 + position / kPageTokens] * kPageTokens + position % kPageTokens;
  };
  std::vector<TestInput> inputs;
  OwnedTensor q(DType::kF32, {2 * kNew + 1, 32});
  OwnedTensor weights(DType::kF32, {2 * kNew + 1, 4});
  std::memset(q.get().data, 0, q.get().num_bytes());
  std::memset(weights.get().data, 0, weights.get().num_bytes());
  int64_t begin = 0;
  for (int64_t s = 0; s < 2; ++s) {
    for (int64_t p = 0; p < lengths[s]; ++p)
      std::memcpy(pages.get().as<float>() + row_of(s, p) * 8,
                  problem.k.get().as<float>() + (begin + p) * 8, 8 * sizeof(float));
    const int64_t first = begin + lengths[s] - kNew;
    std::memcpy(q.get().as<float>() + s * kNew * 32, problem.q.get().as<float>() + first * 32,
                kNew * 32 * sizeof(float));
    std::memcpy(weights.get().as<float>() + s * kNew * 4,
                problem.weights.get().as<float>() + first * 4, kNew * 4 * sizeof(float));
    for (int64_t i = first * 5; i < (first + kNew) * 5; ++i)
      expected.push_back(static_cast<int32_t>(row_of(s, all[i] - begin)));
    begin += lengths[s];
  }
  expected.resize(expected.size() + 5, -1);
  inputs.push_back(constant(std::move(q), "q"));
  inputs.push_back(constant(std::move(weights), "weights"));
  inputs.push_back(constant(std::move(pages), "pages"));
  inputs.push_back(constant(vector_of({0, kNew, 2 * kNew}), "cu_seqlens"));
  inputs.push_back(constant(vector_of({kPageTokens + 30, 9}), "lengths"));
  inputs.push_back(constant(tensor_of_i32({2, 2}, table), "page_table"));
  const auto outputs = run_operator(IndexTopkPaged(problem.spec), kernels(), inputs);
  const auto chosen = outputs[0].get().span<int32_t>();
  EXPECT_EQ(std::vector<int32_t>(chosen.begin(), chosen.end()), expected);

  inputs[5] = constant(tensor_of_i32({2, 2}, {2, 4, 3, -1}), "page_table");
  EXPECT_THAT([&] { run_operator(IndexTopkPaged(problem.spec), kernels(), inputs); },
              ThrowsMessage<UserError>(HasSubstr("page 4 of sequence 0; there are 4")));
}

TEST(IndexTopk, CountsScoresThatDecide) {
  const auto flops = [](int64_t tokens, int64_t top_k, int64_t length) {
    const IndexTopk op({.num_heads = 2, .head_size = 7, .top_k = top_k, .sequence_length = length});
    const std::vector<ValueType> inputs = {{DType::kF32, {tokens, 14}},
                                           {DType::kF32, {tokens, 2}},
                                           {DType::kF32, {tokens, 7}},
                                           {DType::kI32, {2}}};
    return op.cost(inputs, op.infer(inputs)).flops;
  };
  EXPECT_EQ(flops(8, 8, 0), 0);
  EXPECT_EQ(flops(8, 4, 0), 2 * 2 * 8 * (5 + 6 + 7 + 8));
  EXPECT_EQ(flops(8, 3, 4), 2 * 2 * 8 * (4 + 4));
  EXPECT_EQ(flops(0, 3, 4), 0);
}

TEST(IndexTopk, RefusesWhatDoesNotFit) {
  EXPECT_THROW(make_index_topk(index_of(0, 4, 1)), UserError);
  EXPECT_THROW(make_index_topk(index_of(2, 0, 1)), UserError);
  EXPECT_THROW(make_index_topk(index_of(2, 4, 0)), UserError);
  const ValueType q{DType::kF32, {3, 8}};
  const ValueType w{DType::kF32, {3, 2}};
  const ValueType k{DType::kF32, {3, 4}};
  const ValueType bounds{DType::kI32, {2}};
  const IndexTopk op(index_of(2, 4, 2));
  EXPECT_EQ(op.infer(std::vector{q, w, k, bounds})[0], (ValueType{DType::kI32, {3, 2}}));
  const auto refuses = [&](const std::vector<ValueType>& wrong, const char* message) {
    EXPECT_THAT([&] { op.infer(wrong); }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  refuses({q, w, k}, "takes 4 inputs, found 3");
  refuses({with_last_dim(q, 9), w, k, bounds}, "queries are f32 [3, 9], expected f32 [3, 8]");
  refuses({q, with_last_dim(w, 3), k, bounds}, "weights are f32 [3, 3]");
  refuses({q, w, with_dtype(k, DType::kBF16), bounds}, "keys are bf16 [3, 4]");
  refuses({q, w, {DType::kF32, {2, 4}}, bounds}, "3 queries but 2 keys");
  EXPECT_FALSE(op.recomputable());
}

std::vector<int32_t> positions_in(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> positions;
  for (const int64_t length : lengths) {
    for (int32_t i = 0; i < length; ++i) positions.push_back(i);
  }
  return positions;
}

std::vector<int32_t> choose_entries(const Problem& problem, int64_t rate) {
  std::vector<TestInput> inputs = problem.queries(0, problem.q.get().shape[0]);
  inputs.push_back(constant(rows_of(problem.k, 0, problem.k.get().shape[0]), "k"));
  inputs.push_back(constant(vector_of(positions_in(problem.lengths)), "positions"));
  const auto outputs = run_operator(IndexTopkEntries(problem.spec, rate), kernels(), inputs);
  const auto chosen = outputs[0].get().span<int32_t>();
  return {chosen.begin(), chosen.end()};
}

/// Entries of single tokens are the tokens.
TEST(IndexTopkEntries, OfOneTokenEachAreKeys) {
  for (const int64_t top_k : {1, 4, 60}) {
    const Problem problem(index_of(5, 16, top_k), {7, 0, 41, 1});
    EXPECT_EQ(choose_entries(problem, 1), problem.choose());
  }
}

TEST(IndexTopkEntries, ChoosesTheBestWholeOnes) {
  constexpr int64_t kRate = 3;
  for (const auto& lengths : std::vector<std::vector<int64_t>>{{2}, {3}, {31, 2, 10}, {1, 1, 25}}) {
    const Problem problem(index_of(8, 6, 4), lengths);
    std::vector<int32_t> expected;
    int64_t begin = 0;
    for (const int64_t length : lengths) {
      for (int64_t position = 0; position < length; ++position) {
        std::vector<std::pair<double, int32_t>> seen;
        for (int64_t i = 0; i < (position + 1) / kRate; ++i) {
          const int64_t row = begin / kRate + i;
          seen.emplace_back(problem.score(begin + position, row), static_cast<int32_t>(row));
        }
        std::ranges::sort(seen, std::greater<>());
        seen.resize(std::min<int64_t>(std::ssize(seen), problem.spec.top_k));
        std::vector<int32_t> own;
        for (const auto& [score, row] : seen) own.push_back(row);
        std::ranges::sort(own);
        own.resize(problem.spec.top_k, -1);
        expected.insert(expected.end(), own.begin(), own.end());
      }
      begin += length;
    }
    EXPECT_EQ(choose_entries(problem, kRate), expected) << lengths.size() << " sequences";
  }
}

/// Entries that lie in a cache, or in pages, are chosen as those of packed tokens.
TEST(IndexTopkEntries, KeptOnesAsPackedOnes) {
  const IndexSpec spec = index_of(8, 6, 4);
  const Problem problem(spec, {31});
  const auto expected = choose_entries(problem, 3);
  constexpr int64_t kNew = 5;
  const std::vector<int32_t> positions = {26, 27, 28, 29, 30};
  std::vector<TestInput> inputs = problem.queries(31 - kNew, 31);
  inputs.push_back(constant(rows_of(problem.k, 0, 12), "k"));
  inputs.push_back(constant(vector_of(positions), "positions"));
  const auto cached = run_operator(IndexTopkEntries(spec, 3, KeptRows::kCached), kernels(), inputs);
  const std::vector<int32_t> last(expected.end() - kNew * spec.top_k, expected.end());
  const auto found = cached[0].get().span<int32_t>();
  EXPECT_EQ(std::vector<int32_t>(found.begin(), found.end()), last);
  OwnedTensor pages(DType::kF32, {2 * kPageTokens, 6});
  std::ranges::fill(pages.get().span<float>(), std::numeric_limits<float>::quiet_NaN());
  std::ranges::copy(rows_of(problem.k, 0, 12).get().span<float>(),
                    pages.get().as<float>() + kPageTokens * 6);
  inputs[2] = constant(std::move(pages), "k");
  inputs.push_back(constant(vector_of({0, kNew}), "cu_seqlens"));
  inputs.push_back(constant(tensor_of_i32({1, 1}, {1}), "page_table"));
  const auto paged = run_operator(IndexTopkEntries(spec, 3, KeptRows::kPaged), kernels(), inputs);
  const auto rows = paged[0].get().span<int32_t>();
  for (size_t i = 0; i < last.size(); ++i)
    EXPECT_EQ(rows[i], last[i] < 0 ? -1 : last[i] + kPageTokens) << i;
}

TEST(IndexTopkEntries, RefusesWhatDoesNotFit) {
  const Problem problem(index_of(2, 4, 1), {6});
  std::vector<TestInput> inputs = problem.queries(0, 6);
  inputs.push_back(constant(rows_of(problem.k, 0, 1), "k"));
  inputs.push_back(constant(vector_of({0, 1, 2, 3, 4, 5}), "positions"));
  EXPECT_THAT([&] { run_operator(IndexTopkEntries(problem.spec, 2), kernels(), inputs); },
              ThrowsMessage<UserError>(HasSubstr("token 3 sees entries up to row 1 of 1")));
  EXPECT_THROW(IndexTopkEntries(problem.spec, 0), UserError);
  const IndexTopkEntries op(problem.spec, 2);
  const std::vector<ValueType> types = {
      {DType::kF32, {6, 8}}, {DType::kF32, {6, 2}}, {DType::kF32, {3, 4}}, {DType::kI32, {6}}};
  // Tokens at positions 3 to 5 see 2, 2 and 3 entries, more than one.
  EXPECT_EQ(op.cost(types, op.infer(types)).flops, 2.0 * 2 * 5 * 2 * (2 + 3));
}

}  // namespace
}  // namespace tessera::testing
