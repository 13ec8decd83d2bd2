#include "ops/ring_attention/ring_attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>

#include "comm/thread/thread_world.h"
#include "ops/attention/attention_testing.h"

namespace tessera {
namespace {

using testing::cumulative;
using testing::expect_bitwise_equal;
using testing::heads;
using testing::random_tensor;
using testing::Role;
using testing::TestInput;
using testing::to_doubles;

/// How a ring shares tokens of sequences with these bounds.
struct Deal : Zigzag {
  std::vector<int32_t> bounds = {};
};

/// One micro-batch: B rows of S tokens in sequences of the given lengths, which sum to B·S.
struct Case {
  AttentionSpec spec;
  int64_t ring = 1;
  int64_t num_rows = 1;
  int64_t row_length = 0;
  std::vector<int64_t> lengths;
  DType dtype = DType::kF32;
  double deviation = 1.0;
  bool by_sequence = false;

  Deal tokens() const {
    Deal deal{{num_rows, row_length, ring, by_sequence}, {0}};
    for (const int64_t length : lengths)
      deal.bounds.push_back(deal.bounds.back() + static_cast<int32_t>(length));
    return deal;
  }
  std::string to_string() const {
    return fmt::format("N={}/{} D={}/{} window={} {} ring={} rows={}x{} lengths {}", spec.num_heads,
                       spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.window,
                       dtype_name(dtype), ring, num_rows, row_length,
                       ::testing::PrintToString(lengths));
  }
};

/// A case's tensors over all tokens.
struct Problem {
  Case test;
  OwnedTensor q, k, v, cu_seqlens;
  OwnedTensor grad_o, grad_lse;

  explicit Problem(const Case& test, uint64_t seed = 1) : test(test) {
    const AttentionSpec& spec = test.spec;
    Random random(seed, 7);
    const auto make = [&](int64_t width, double deviation) {
      return random_tensor(test.dtype, {test.tokens().num_tokens(), width}, random, deviation);
    };
    q = make(spec.num_heads * spec.head_size, test.deviation);
    k = make(spec.num_kv_heads * spec.head_size, test.deviation);
    v = make(spec.num_kv_heads * spec.head_size_v, 1.0);
    grad_o = make(spec.num_heads * spec.head_size_v, 1.0);
    grad_lse = random_tensor(DType::kF32, {spec.num_heads, test.tokens().num_tokens()}, random);
    cu_seqlens = cumulative(test.lengths);
  }
};

/// Outputs and gradients over all tokens.
struct Results {
  OwnedTensor o, lse, grad_q, grad_k, grad_v;

  std::vector<std::pair<std::string, Tensor>> named() const {
    return {{"o", o}, {"lse", lse}, {"grad_q", grad_q}, {"grad_k", grad_k}, {"grad_v", grad_v}};
  }
};

/// Calls visit(element of the whole, element of the part, bytes) for what a rank holds of a matrix
/// [T, width], or [N, T] where `columns`.
template <typename Visit>
void for_each_piece(const Tensor& whole, const Deal& tokens, int64_t rank, bool columns,
                    const Visit& visit) {
  const int64_t width = columns ? 1 : whole.shape.last();
  const int64_t matrices = columns ? whole.shape[0] : 1;
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    int64_t row = matrix * tokens.tokens_per_rank();
    tokens.for_each_run(tokens.bounds, rank, [&](const IndexRange& run) {
      const int64_t from = matrix * tokens.num_tokens() + run.begin;
      visit(from * width, row * width, run.count * width * dtype_size(whole.dtype));
      row += run.count;
    });
  }
}

std::byte* element(const Tensor& tensor, int64_t idx) {
  return static_cast<std::byte*>(tensor.data) + idx * dtype_size(tensor.dtype);
}

OwnedTensor take(const Tensor& whole, const Deal& tokens, int64_t rank, bool columns = false) {
  Shape shape = whole.shape;
  shape[columns ? 1 : 0] = tokens.tokens_per_rank();
  OwnedTensor part(whole.dtype, shape);
  for_each_piece(whole, tokens, rank, columns, [&](int64_t from, int64_t to, int64_t bytes) {
    std::memcpy(element(part, to), element(whole, from), bytes);
  });
  return part;
}

void put(const Tensor& part, const Deal& tokens, int64_t rank, const Tensor& whole,
         bool columns = false) {
  for_each_piece(whole, tokens, rank, columns, [&](int64_t to, int64_t from, int64_t bytes) {
    std::memcpy(element(whole, to), element(part, from), bytes);
  });
}

OwnedTensor copy_tensor(const Tensor& tensor) {
  OwnedTensor copy(tensor.dtype, tensor.shape);
  std::memcpy(copy.get().data, tensor.data, tensor.num_bytes());
  return copy;
}

KernelTable kernels() {
  KernelTable table;
  add_attention_cpu(table);
  add_ring_attention_cpu(table);
  return table;
}

/// Forward and backward of either operator on the tokens of one rank.
Results run_rank(const OperatorPtr& op, const Problem& problem, const Deal& tokens, int64_t rank) {
  std::vector<TestInput> inputs;
  const auto add = [&](OwnedTensor tensor, const char* name, Role role = Role::kValue) {
    inputs.push_back({std::move(tensor), role, name});
  };
  add(take(problem.q, tokens, rank), "q");
  add(take(problem.k, tokens, rank), "k");
  add(take(problem.v, tokens, rank), "v");
  add(copy_tensor(problem.cu_seqlens), "cu_seqlens", Role::kConstant);
  std::vector<OwnedTensor> outputs = testing::run_operator(*op, kernels(), inputs);
  std::vector<OwnedTensor> grad_outputs;
  grad_outputs.push_back(take(problem.grad_o, tokens, rank));
  grad_outputs.push_back(take(problem.grad_lse, tokens, rank, true));
  std::vector<OwnedTensor> grads = testing::run_gradients(op, kernels(), inputs, grad_outputs);
  return {std::move(outputs[0]), std::move(outputs[1]), std::move(grads[0]), std::move(grads[1]),
          std::move(grads[2])};
}

Results run_plain(const Problem& problem) {
  const Deal all{{problem.test.num_rows, problem.test.row_length, 1}};
  return run_rank(make_attention(problem.test.spec), problem, all, 0);
}

Results empty_results(const Problem& problem) {
  const auto like = [](const Tensor& tensor) { return OwnedTensor(tensor.dtype, tensor.shape); };
  return {like(problem.grad_o), like(problem.grad_lse), like(problem.q), like(problem.k),
          like(problem.v)};
}

/// By a ring of threads. `inspect` sees each rank's world afterwards, one rank at a time; `threads`
/// are OpenMP's of each rank (0: its share).
Results run_ring(const Problem& problem, const std::function<void(const World&)>& inspect = {},
                 int threads = 0) {
  const Deal tokens = problem.test.tokens();
  Results all = empty_results(problem);
  std::mutex mutex;
  run_thread_world(tokens.ring, [&](World& world) {
    if (threads > 0) omp_set_num_threads(threads);
    const OperatorPtr op =
        tokens.by_sequence ? make_ring_attention_by_sequence(problem.test.spec, tokens.num_tokens(),
                                                             world.make_world_group())
                           : make_ring_attention(problem.test.spec, tokens.num_rows,
                                                 tokens.row_length, world.make_world_group());
    const Results part = run_rank(op, problem, tokens, world.rank());
    const std::scoped_lock lock(mutex);
    const auto whole = all.named();
    const auto parts = part.named();
    for (size_t i = 0; i < whole.size(); ++i) {
      put(parts[i].second, tokens, world.rank(), whole[i].second, whole[i].first == "lse");
    }
    if (inspect) inspect(world);
  });
  return all;
}

std::vector<double> row_errors(const Tensor& actual, const Tensor& exact) {
  const auto x = to_doubles(actual);
  const auto y = to_doubles(exact);
  const size_t width = std::max<int64_t>(actual.shape.last(), 1);
  std::vector<double> errors(x.size() / width);
  for (size_t i = 0; i < x.size(); ++i) errors[i / width] += (x[i] - y[i]) * (x[i] - y[i]);
  for (double& error : errors) error = std::sqrt(error);
  return errors;
}

std::vector<double> row_norms(const Tensor& tensor) {
  return row_errors(tensor, OwnedTensor(tensor.dtype, tensor.shape));
}

/// Row by row; where a row's terms cancel, within the rounding of terms of the usual size.
void expect_rows_near(const Tensor& actual, const Tensor& expected, const std::string& name) {
  const std::vector<double> errors = row_errors(actual, expected);
  const std::vector<double> norms = row_norms(expected);
  const double sum = std::inner_product(norms.begin(), norms.end(), norms.begin(), 0.0);
  const double usual = std::sqrt(sum / static_cast<double>(std::max<size_t>(norms.size(), 1)));
  for (size_t row = 0; row < errors.size(); ++row)
    EXPECT_LE(errors[row], 1e-5 * norms[row] + 1e-6 * usual) << name << ", row " << row;
}

void expect_matches_plain(const Case& test) {
  SCOPED_TRACE(test.to_string());
  const Problem problem(test);
  const auto plain = run_plain(problem);
  const auto ring = run_ring(problem);
  const auto all_expected = plain.named();
  const auto all_actual = ring.named();
  for (size_t i = 0; i < all_expected.size(); ++i) {
    const auto& [name, expected] = all_expected[i];
    const Tensor& actual = all_actual[i].second;
    if (test.ring == 1) {
      expect_bitwise_equal(actual, expected, name);
    } else {
      expect_rows_near(actual, expected, name);
    }
  }
}

std::vector<int64_t> equal_lengths(int64_t count, int64_t length) {
  return std::vector<int64_t>(count, length);
}

TEST(RingAttention, WholeRows) {
  for (const int64_t ring : {1, 2, 3, 4}) {
    expect_matches_plain(
        {heads(2, 1, 16), ring, 2, 2 * ring * 37, equal_lengths(2, 2 * ring * 37)});
  }
}

TEST(RingAttention, ChunksOfOneToken) {
  for (const int64_t ring : {2, 3, 4}) {
    expect_matches_plain({heads(2, 2, 8), ring, 3, 2 * ring, equal_lengths(3, 2 * ring)});
  }
}

TEST(RingAttention, ChunksLongerThanTilesAndBlocks) {
  expect_matches_plain({heads(2, 2, 16), 2, 1, 4 * 201, {804}});
  expect_matches_plain({heads(3, 1, 16), 3, 1, 6 * 131, {500, 286}});
}

TEST(RingAttention, SequencesThatCrossChunksAndRows) {
  for (const int64_t ring : {1, 2, 3, 4}) {
    const int64_t row = 12 * 10;
    expect_matches_plain({heads(2, 1, 16), ring, 3, ring == 4 ? 120 : row, {1, 150, 1, 7, 201}});
    expect_matches_plain({heads(2, 1, 16), ring, 3, row, {360, 0, 0}});
    expect_matches_plain({heads(2, 1, 16), ring, 2, row, equal_lengths(240, 1)});
    expect_matches_plain({heads(2, 1, 16), ring, 2, row, {0, 239, 0, 1, 0}});
  }
}

/// Sequences dealt out one by one, of any number of chunks' tokens.
TEST(RingAttention, SequencesDealtOneByOne) {
  Random random(9, 2);
  for (const int64_t ring : {1, 2, 3, 4, 8}) {
    for (const int64_t window : {0, 17}) {
      std::vector<int64_t> lengths = {2 * ring, 0, 2 * ring * 31};
      for (int i = 0; i < 5; ++i)
        lengths.push_back(2 * ring * static_cast<int64_t>(random.next_below(20)));
      const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
      Case test{heads(2, 1, 16, 0, window), ring, 1, total, lengths};
      test.by_sequence = true;
      expect_matches_plain(test);
    }
  }
}

TEST(RingAttention, Windows) {
  for (const int64_t ring : {1, 2, 3, 4}) {
    for (const int64_t window : {1, 2, 15, 16, 17, 40, 1000}) {
      expect_matches_plain({heads(2, 1, 16, 0, window), ring, 2, 120, {100, 140}});
    }
  }
  expect_matches_plain({heads(1, 1, 16, 0, 130), 2, 1, 4 * 150, {600}});
  expect_matches_plain({heads(3, 1, 8, 0, 33), 3, 1, 6 * 50, {299, 1}});
}

TEST(RingAttention, GroupedHeadsAndHeadSizes) {
  for (const int64_t ring : {2, 3}) {
    expect_matches_plain({heads(8, 2, 32), ring, 1, 132, {50, 82}});
    expect_matches_plain({heads(6, 3, 33), ring, 1, 132, {132}});
    expect_matches_plain({heads(2, 2, 24, 40), ring, 1, 132, {132}});
    expect_matches_plain({heads(4, 4, 192, 128), ring, 1, 132, {100, 32}});
    expect_matches_plain({heads(100, 1, 8), ring, 1, 60, {59, 1}});
  }
}

/// Lengths that sum to `total`, some of them 0 or 1.
std::vector<int64_t> random_lengths(int64_t total, Random& random) {
  const auto draw = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  std::vector<int64_t> lengths;
  for (int64_t left = total; left > 0; left -= lengths.back()) {
    lengths.push_back(std::min(left, draw(3) == 0 ? draw(3) : draw(300)));
  }
  for (int64_t i = draw(3); i > 0; --i) lengths.push_back(0);
  return lengths;
}

TEST(RingAttention, RandomCases) {
  Random random(3, 11);
  const auto draw = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (int i = 0; i < 60; ++i) {
    const int64_t kv_heads = 1 + draw(3);
    Case test;
    test.spec = heads(kv_heads * (1 + draw(4)), kv_heads, 1 + draw(50), draw(50));
    if (draw(2) == 0) test.spec.window = 1 + draw(100);
    if (draw(3) == 0) test.spec.scale = 0.01 + random.next_uniform();
    test.ring = 1 + draw(4);
    test.num_rows = 1 + draw(3);
    test.row_length = 2 * test.ring * (1 + draw(40));
    test.lengths = random_lengths(test.tokens().num_tokens(), random);
    expect_matches_plain(test);
  }
}

TEST(RingAttention, NoTokens) {
  expect_matches_plain({heads(2, 1, 8), 2, 0, 8, {}});
  expect_matches_plain({heads(2, 1, 8), 3, 2, 0, {0, 0}});
  expect_matches_plain({heads(2, 1, 8), 1, 1, 0, {}});
}

TEST(RingAttention, RowsOfAnyLengthForARingOfOne) {
  expect_matches_plain({heads(2, 1, 8), 1, 3, 33, {50, 49}});
}

TEST(RingAttention, ScoresOfManyMagnitudesStayFinite) {
  const Problem problem({heads(2, 1, 32), 3, 1, 180, {180}, DType::kF32, 30.0});
  const auto plain = run_plain(problem);
  const auto ring = run_ring(problem);
  testing::expect_rows_near(ring.o, plain.o, 1e-2, "o");
  testing::expect_rows_near(ring.lse, plain.lse, 1e-5, "lse");
  for (const auto& [name, result] : ring.named()) {
    for (const double x : to_doubles(result)) ASSERT_TRUE(std::isfinite(x)) << name;
  }
}

Problem in_f32(const Problem& problem) {
  Case test = problem.test;
  test.dtype = DType::kF32;
  Problem wide(test);
  const auto copy = [](const Tensor& from, const Tensor& to) {
    const auto values = to_doubles(from);
    for (size_t i = 0; i < values.size(); ++i) to.as<float>()[i] = static_cast<float>(values[i]);
  };
  copy(problem.q, wide.q);
  copy(problem.k, wide.k);
  copy(problem.v, wide.v);
  copy(problem.grad_o, wide.grad_o);
  copy(problem.grad_lse, wide.grad_lse);
  return wide;
}

TEST(RingAttention, Bf16ErrsAtMostTwicePlainAttentionsError) {
  for (const Case& test : {Case{heads(2, 2, 64), 2, 2, 120, {130, 1, 0, 109}, DType::kBF16},
                           Case{heads(4, 1, 33, 17), 3, 1, 150, {150}, DType::kBF16},
                           Case{heads(6, 2, 80, 0, 50), 4, 2, 120, {140, 100}, DType::kBF16}}) {
    SCOPED_TRACE(test.to_string());
    const Problem problem(test);
    const auto exact = run_plain(in_f32(problem));
    const auto plain = run_plain(problem);
    const auto ring = run_ring(problem);
    for (size_t i = 0; i < exact.named().size(); ++i) {
      const auto [name, truth] = exact.named()[i];
      const auto allowed = row_errors(plain.named()[i].second, truth);
      const auto errors = row_errors(ring.named()[i].second, truth);
      const auto norms = row_norms(truth);
      // Half a unit of BF16 on top, for rows that plain attention happens to hit exactly.
      for (size_t row = 0; row < errors.size(); ++row) {
        EXPECT_LE(errors[row], 2 * allowed[row] + norms[row] / 512) << name << ", row " << row;
      }
    }
  }
}

TEST(RingAttention, SameBitsAgainAndForAnyNumberOfThreads) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Problem problem({heads(4, 2, 32), 3, 2, 150, {200, 3, 0, 97}, dtype});
    const auto first = run_ring(problem, {}, 1);
    for (const int threads : {1, 2, 3}) {
      const auto again = run_ring(problem, {}, threads);
      for (size_t i = 0; i < first.named().size(); ++i) {
        expect_bitwise_equal(again.named()[i].second, first.named()[i].second,
                             first.named()[i].first);
      }
    }
  }
}

TEST(RingAttention, BytesSent) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t ring : {1, 2, 3, 4}) {
      const Problem problem({heads(4, 2, 24, 40), ring, 2, 48, {90, 6}, dtype});
      const int64_t elements = (ring - 1) * problem.test.tokens().tokens_per_rank() * 2 * (24 + 40);
      // Two forward runs (run_gradients makes one of its own) and one backward.
      const int64_t expected = elements * (3 * dtype_size(dtype) + 4);
      run_ring(problem, [&](const World& world) {
        EXPECT_EQ(world.statistics().count("world", CommKind::kSend).bytes, expected);
        EXPECT_EQ(world.statistics().total_bytes(), expected);
      });
    }
  }
}

TEST(RingAttention, GradientOfTheOutputAlone) {
  const Problem problem({heads(2, 1, 8), 2, 1, 24, {24}});
  const Deal tokens = problem.test.tokens();
  Problem without(problem.test);
  std::memset(without.grad_lse.get().data, 0, without.grad_lse.get().num_bytes());
  const Results expected = run_ring(without);
  run_thread_world(2, [&](World& world) {
    std::vector<TestInput> inputs;
    inputs.push_back({take(problem.q, tokens, world.rank()), Role::kValue, "q"});
    inputs.push_back({take(problem.k, tokens, world.rank()), Role::kConstant, "k"});
    inputs.push_back({take(problem.v, tokens, world.rank()), Role::kValue, "v"});
    inputs.push_back({copy_tensor(problem.cu_seqlens), Role::kConstant, "cu_seqlens"});
    std::vector<OwnedTensor> grad_outputs;
    grad_outputs.push_back(take(problem.grad_o, tokens, world.rank()));
    grad_outputs.emplace_back();
    const auto grads = testing::run_gradients(
        make_ring_attention(problem.test.spec, 1, 24, world.make_world_group()), kernels(), inputs,
        grad_outputs);
    expect_bitwise_equal(grads[0], take(expected.grad_q, tokens, world.rank()), "grad_q");
    expect_bitwise_equal(grads[2], take(expected.grad_v, tokens, world.rank()), "grad_v");
  });
}

std::string message_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const UserError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(RingAttention, RefusesSequencesThatCannotBeDealt) {
  Case test{heads(2, 1, 16), 2, 1, 16, {10, 6}};
  test.by_sequence = true;
  EXPECT_THAT(
      message_of([&] { run_ring(Problem(test)); }),
      ::testing::HasSubstr("sequence 0 has 10 tokens, expected a multiple of 4 for 2 ranks"));
}

TEST(RingAttention, RefusesWhatDoesNotFit) {
  using ::testing::HasSubstr;
  const auto run = [](const Case& test) { return message_of([&] { run_ring(Problem(test)); }); };
  EXPECT_THAT(run({heads(1, 1, 8), 2, 2, 6, {12}}), HasSubstr("take a multiple of 4"));
  EXPECT_THAT(run({heads(1, 1, 8), 2, 2, 8, {15}}),
              HasSubstr("ends at 15, expected the 16 tokens"));
  EXPECT_THAT(run({heads(1, 1, 8), 2, 2, 8, {17}}),
              HasSubstr("ends at 17, expected the 16 tokens"));
  const auto op = make_ring_attention(heads(1, 1, 8), 2, 8, make_single_communicator("cp"));
  const ValueType tokens{DType::kF32, {8, 8}};
  EXPECT_THAT(message_of([&] {
                static_cast<void>(
                    op->infer(std::vector<ValueType>{tokens, tokens, tokens, {DType::kI32, {2}}}));
              }),
              HasSubstr("expected the 16 tokens of one of 1 ranks"));
}

TEST(RingAttention, CostIsTheRanksShare) {
  run_thread_world(2, [](World& world) {
    const AttentionSpec spec = heads(4, 2, 16);
    const auto op = make_ring_attention(spec, 1, 64, world.make_world_group());
    const ValueType q{DType::kF32, {32, 64}};
    const ValueType k{DType::kF32, {32, 32}};
    const std::vector<ValueType> inputs = {q, k, k, {DType::kI32, {2}}};
    EXPECT_EQ(op->cost(inputs, op->infer(inputs)).flops, 4.0 * 16 * 4 * (64 * 65 / 2) / 2);
    EXPECT_THAT(op->attributes(), ::testing::HasSubstr("rows=1x64 group=world size=2"));
  });
}

}  // namespace
}  // namespace tessera
