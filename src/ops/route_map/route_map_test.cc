#include "ops/route_map/route_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Map {
  std::vector<int32_t> row_of_TK;
  std::vector<int32_t> source_R;
  std::vector<int64_t> offsets;
  int64_t extent = 0;
  int64_t dropped = 0;
  std::vector<int64_t> counts_kept;
};

struct Assignments {
  int64_t num_tokens = 0;
  std::vector<int32_t> expert_idx;
  std::vector<float> probs;
};

template <typename T>
std::vector<T> elements(const OwnedTensor& tensor) {
  const auto span = tensor.get().span<T>();
  return {span.begin(), span.end()};
}

Map run(const RouteMapSpec& spec, const Assignments& assignments) {
  KernelTable kernels;
  add_route_map_cpu(kernels);
  const Shape shape{assignments.num_tokens, spec.top_k};
  const auto outputs = testing::run_operator(
      *make_route_map(spec), kernels,
      testing::list_inputs(testing::TestInput{testing::tensor_of_i32(shape, assignments.expert_idx),
                                              testing::Role::kConstant, "idx"},
                           testing::TestInput{testing::tensor_of(shape, assignments.probs),
                                              testing::Role::kConstant, "probs"}));
  return {elements<int32_t>(outputs[RouteMapOutput::kRowOfTK]),
          elements<int32_t>(outputs[RouteMapOutput::kSourceR]),
          elements<int64_t>(outputs[RouteMapOutput::kOffsets]),
          elements<int64_t>(outputs[RouteMapOutput::kExtent])[0],
          elements<int64_t>(outputs[RouteMapOutput::kDropped])[0],
          elements<int64_t>(outputs[RouteMapOutput::kCountsKept])};
}

/// Distinct random experts for every token; `skew` of the tokens choose expert 0 first.
Assignments random_assignments(const RouteMapSpec& spec, int64_t num_tokens, double skew,
                               Random& random) {
  Assignments result{.num_tokens = num_tokens, .expert_idx = {}, .probs = {}};
  std::vector<int32_t> experts(spec.num_experts);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<int32_t>(e);
    const size_t fixed = random.next_uniform() < skew ? 1 : 0;
    for (size_t k = 0; k < static_cast<size_t>(spec.top_k); ++k) {
      if (k >= fixed) std::swap(experts[k], experts[k + random.next_below(experts.size() - k)]);
      result.expert_idx.push_back(experts[k]);
      result.probs.push_back(static_cast<float>(random.next_below(8)) / 8.0F);  // many ties
    }
  }
  return result;
}

/// The assignments of one expert that are kept, in token order: the rule written down plainly.
std::vector<int32_t> kept_of(const RouteMapSpec& spec, const Assignments& a, int32_t expert,
                             int64_t capacity) {
  const auto group = static_cast<int32_t>(spec.capacity_group_size);
  std::vector<int32_t> all;
  for (size_t i = 0; i < a.expert_idx.size(); ++i) {
    if (a.expert_idx[i] >= 0 && a.expert_idx[i] / group == expert / group)
      all.push_back(static_cast<int32_t>(i));
  }
  if (spec.drop_policy == DropPolicy::kProbs) {
    std::ranges::stable_sort(all, [&](int32_t x, int32_t y) { return a.probs[x] > a.probs[y]; });
  }
  if (static_cast<int64_t>(all.size()) > capacity) all.resize(capacity);
  std::ranges::sort(all);
  std::erase_if(all, [&](int32_t i) { return a.expert_idx[i] != expert; });
  return all;
}

int64_t plain_capacity(const RouteMapSpec& spec, int64_t num_tokens) {
  if (spec.rows_limit > 0) return spec.rows_limit;
  if (spec.capacity_factor == 0) return num_tokens * spec.top_k;
  const double even = static_cast<double>(num_tokens * spec.top_k) /
                      static_cast<double>(spec.num_experts / spec.capacity_group_size);
  return std::min(static_cast<int64_t>(std::ceil(even * spec.capacity_factor)),
                  num_tokens * spec.top_k);
}

Map plain_map(const RouteMapSpec& spec, const Assignments& a) {
  Map map;
  map.row_of_TK.assign(a.expert_idx.size(), -1);
  const int64_t capacity = plain_capacity(spec, a.num_tokens);
  const auto is_local = [&](int32_t e) {
    return e >= spec.first_local() && e < spec.first_local() + spec.num_local();
  };
  for (int32_t e = 0; e < spec.num_experts; ++e) {
    if (!is_local(e)) continue;
    const auto local = static_cast<int64_t>(map.offsets.size());
    if (spec.has_slots() && local % spec.slot_experts == 0)
      map.source_R.resize(local / spec.slot_experts * spec.slot_rows, -1);
    map.offsets.push_back(static_cast<int64_t>(map.source_R.size()));
    const auto kept = kept_of(spec, a, e, capacity);
    for (const int32_t i : kept) {
      map.row_of_TK[i] = static_cast<int32_t>(map.source_R.size());
      map.source_R.push_back(i);
    }
    size_t rows = spec.pad_to_capacity ? static_cast<size_t>(capacity) : kept.size();
    while (rows % static_cast<size_t>(spec.alignment) != 0) ++rows;
    map.source_R.resize(static_cast<size_t>(map.offsets.back()) + rows, -1);
    map.counts_kept.push_back(static_cast<int64_t>(kept.size()));
    map.dropped -= map.counts_kept.back();
  }
  map.dropped += std::ranges::count_if(a.expert_idx, is_local);
  if (spec.has_slots()) map.source_R.resize(spec.num_slots() * spec.slot_rows, -1);
  map.extent = static_cast<int64_t>(map.source_R.size());
  map.offsets.push_back(map.extent);
  return map;
}

void expect_equal(const Map& actual, const Map& expected) {
  EXPECT_EQ(actual.row_of_TK, expected.row_of_TK);
  EXPECT_EQ(actual.source_R, expected.source_R);
  EXPECT_EQ(actual.offsets, expected.offsets);
  EXPECT_EQ(actual.extent, expected.extent);
  EXPECT_EQ(actual.dropped, expected.dropped);
  EXPECT_EQ(actual.counts_kept, expected.counts_kept);
}

void expect_refused(const RouteMapSpec& spec, int64_t num_tokens, const std::string& message) {
  try {
    const OperatorPtr op = make_route_map(spec);
    const ValueType idx{.dtype = DType::kI32, .shape = {num_tokens, spec.top_k}};
    op->infer(std::vector<ValueType>{idx, with_dtype(idx, DType::kF32)});
    ADD_FAILURE() << "accepted; expected: " << message;
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr(message));
  }
}

TEST(RouteMap, LaysRowsOutByExpertInTokenOrder) {
  const RouteMapSpec spec{.num_experts = 3, .top_k = 2, .alignment = 2};
  const Map map = run(spec, {3, {2, 0, 0, 2, 2, 0}, {1, 1, 1, 1, 1, 1}});
  EXPECT_THAT(map.source_R, ElementsAre(1, 2, 5, -1, 0, 3, 4, -1));
  EXPECT_THAT(map.row_of_TK, ElementsAre(4, 0, 1, 5, 6, 2));
  EXPECT_THAT(map.offsets, ElementsAre(0, 4, 4, 8));
  EXPECT_THAT(map.counts_kept, ElementsAre(3, 0, 3));
}

TEST(RouteMap, CapacityKeepsTheHighestProbabilitiesAndTheEarlierOfEqualOnes) {
  const RouteMapSpec spec{.num_experts = 2, .top_k = 1, .capacity_factor = 1.0};
  const Map map = run(spec, {4, {0, 0, 0, 0}, {0.1F, 0.5F, 0.5F, 0.5F}});
  EXPECT_THAT(map.row_of_TK, ElementsAre(-1, 0, 1, -1));
  EXPECT_EQ(map.dropped, 2);
  EXPECT_EQ(map.extent, 2);
}

TEST(RouteMap, CapacityByPositionKeepsTheFirstTokens) {
  const RouteMapSpec spec{.num_experts = 2,
                          .top_k = 1,
                          .capacity_factor = 1.0,
                          .pad_to_capacity = true,
                          .drop_policy = DropPolicy::kPosition};
  const Map map = run(spec, {4, {0, 0, 0, 0}, {0.1F, 0.5F, 0.6F, 0.7F}});
  EXPECT_THAT(map.row_of_TK, ElementsAre(0, 1, -1, -1));
  EXPECT_THAT(map.source_R, ElementsAre(0, 1, -1, -1));
}

TEST(RouteMap, NanProbabilitiesAreDroppedFirst) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const RouteMapSpec spec{.num_experts = 2, .top_k = 1, .capacity_factor = 1.0};
  const Map map = run(spec, {4, {0, 0, 0, 0}, {nan, 0.5F, nan, 0.1F}});
  EXPECT_THAT(map.row_of_TK, ElementsAre(-1, 0, -1, 1));
}

TEST(RouteMap, AgreesWithThePlainRuleOnRandomAssignments) {
  Random random(7, 1);
  for (int trial = 0; trial < 400; ++trial) {
    const auto experts = static_cast<int64_t>(1 + random.next_below(12));
    RouteMapSpec spec{
        .num_experts = experts,
        .top_k = 1 + static_cast<int64_t>(random.next_below(static_cast<uint64_t>(experts)))};
    const auto num_tokens = static_cast<int64_t>(random.next_below(70));
    if (random.next_below(2) == 0) {
      const double least = static_cast<double>(experts) /
                           static_cast<double>(std::max<int64_t>(num_tokens * spec.top_k, 1));
      spec.capacity_factor = std::max(0.5 + random.next_uniform(), least);
      spec.pad_to_capacity = random.next_below(2) == 0;
      spec.drop_policy = random.next_below(2) == 0 ? DropPolicy::kProbs : DropPolicy::kPosition;
    }
    spec.alignment = 1 + static_cast<int64_t>(random.next_below(5));
    SCOPED_TRACE(
        fmt::format("trial {}: T={} {}", trial, num_tokens, make_route_map(spec)->attributes()));
    const Assignments a = random_assignments(spec, num_tokens, random.next_uniform(), random);
    expect_equal(run(spec, a), plain_map(spec, a));
  }
}

/// A random divisor of `n`.
int64_t random_divisor(int64_t n, Random& random) {
  int64_t divisor = 1;
  for (int64_t d = 2; d <= n; ++d) {
    if (n % d == 0 && random.next_below(3) == 0) divisor = d;
  }
  return divisor;
}

/// Some whole groups of the experts.
IndexRange random_range(const RouteMapSpec& spec, Random& random) {
  const int64_t size = spec.capacity_group_size;
  const auto num_groups = static_cast<uint64_t>(spec.num_experts / size);
  const auto first = static_cast<int64_t>(random.next_below(num_groups));
  const auto left = num_groups - static_cast<uint64_t>(first);
  return {first * size, size * (1 + static_cast<int64_t>(random.next_below(left)))};
}

TEST(RouteMap, LocalExpertsGroupsAndAbsentIndicesAgreeWithThePlainRule) {
  Random random(8, 1);
  for (int trial = 0; trial < 200; ++trial) {
    const auto experts = static_cast<int64_t>(1 + random.next_below(12));
    RouteMapSpec spec{
        .num_experts = experts,
        .top_k = 1 + static_cast<int64_t>(random.next_below(static_cast<uint64_t>(experts))),
        .alignment = 1 + static_cast<int64_t>(random.next_below(5)),
        .capacity_group_size = random_divisor(experts, random)};
    const auto num_tokens = static_cast<int64_t>(random.next_below(70));
    if (random.next_below(2) == 0) {
      spec.capacity_factor = 1e-3 + random.next_uniform() +
                             static_cast<double>(experts) /
                                 static_cast<double>(std::max<int64_t>(num_tokens * spec.top_k, 1));
      spec.drop_policy = random.next_below(2) == 0 ? DropPolicy::kProbs : DropPolicy::kPosition;
    } else if (random.next_below(2) == 0) {
      spec.rows_limit = 1 + num_tokens * std::min(spec.top_k, spec.capacity_group_size);
      spec.pad_to_capacity = spec.capacity_group_size == 1;
    }
    spec.local_experts = random_range(spec, random);
    SCOPED_TRACE(
        fmt::format("trial {}: T={} {}", trial, num_tokens, make_route_map(spec)->attributes()));
    Assignments a = random_assignments(spec, num_tokens, random.next_uniform(), random);
    for (int32_t& expert : a.expert_idx) {
      if (random.next_below(5) == 0) expert = -1;
    }
    const Map map = run(spec, a);
    expect_equal(map, plain_map(spec, a));
    EXPECT_LE(map.extent, RouteMap(spec).max_rows(num_tokens));
  }
}

TEST(RouteMap, TheBoundOfLocalExpertsIsWhatTheyCanGet) {
  EXPECT_EQ(RouteMap({.num_experts = 8, .top_k = 4, .local_experts = {2, 2}}).max_rows(10), 20);
  EXPECT_EQ(RouteMap({.num_experts = 8, .top_k = 1, .local_experts = {2, 2}}).max_rows(10), 10);
  EXPECT_EQ(RouteMap({.num_experts = 8, .top_k = 1, .rows_limit = 3}).max_rows(100), 24);
  EXPECT_EQ(RouteMap({.num_experts = 8, .top_k = 1, .alignment = 16, .local_experts = {2, 2}})
                .max_rows(10),
            32);
  // Two groups of four of ceil(10 · 4 / 2 · 0.5) rows each, one of them here.
  EXPECT_EQ(RouteMap({.num_experts = 8,
                      .top_k = 4,
                      .capacity_factor = 0.5,
                      .capacity_group_size = 4,
                      .local_experts = {4, 4}})
                .max_rows(10),
            10);
}

TEST(RouteMap, AGroupDropsByItsTotalNotByExpert) {
  RouteMapSpec spec{.num_experts = 4, .top_k = 1, .capacity_factor = 1.0, .capacity_group_size = 2};
  // Capacity 2 for each pair: expert 0 alone may fill it.
  const Assignments a{4, {0, 1, 0, 3}, {0.5F, 0.1F, 0.4F, 0.2F}};
  const Map by_probs = run(spec, a);
  EXPECT_THAT(by_probs.row_of_TK, ElementsAre(0, -1, 1, 2));
  EXPECT_THAT(by_probs.counts_kept, ElementsAre(2, 0, 0, 1));
  EXPECT_EQ(by_probs.dropped, 1);
  spec.drop_policy = DropPolicy::kPosition;
  EXPECT_THAT(run(spec, a).row_of_TK, ElementsAre(0, 1, -1, 2));
}

TEST(RouteMap, SlotsBeginWhereTheyWould) {
  const RouteMapSpec spec{.num_experts = 4, .top_k = 1, .slot_experts = 2, .slot_rows = 3};
  const Map map = run(spec, {4, {3, 1, 0, 1}, {1, 1, 1, 1}});
  EXPECT_THAT(map.source_R, ElementsAre(2, 1, 3, 0, -1, -1));
  EXPECT_THAT(map.row_of_TK, ElementsAre(3, 1, 0, 2));
  EXPECT_THAT(map.offsets, ElementsAre(0, 1, 3, 3, 6));
  EXPECT_THAT(map.counts_kept, ElementsAre(1, 2, 0, 1));
}

TEST(RouteMap, SlotsAgreeWithThePlainRule) {
  Random random(9, 1);
  for (int trial = 0; trial < 200; ++trial) {
    const auto experts = static_cast<int64_t>(1 + random.next_below(12));
    RouteMapSpec spec{
        .num_experts = experts,
        .top_k = 1 + static_cast<int64_t>(random.next_below(static_cast<uint64_t>(experts))),
        .slot_experts = random_divisor(experts, random)};
    const auto num_tokens = static_cast<int64_t>(random.next_below(70));
    spec.slot_rows = num_tokens * std::min(spec.top_k, spec.slot_experts) +
                     static_cast<int64_t>(random.next_below(3));
    if (random.next_below(2) == 0) {
      spec.capacity_factor =
          1 + static_cast<double>(experts) / static_cast<double>(std::max<int64_t>(num_tokens, 1));
    }
    SCOPED_TRACE(
        fmt::format("trial {}: T={} {}", trial, num_tokens, make_route_map(spec)->attributes()));
    const Assignments a = random_assignments(spec, num_tokens, random.next_uniform(), random);
    expect_equal(run(spec, a), plain_map(spec, a));
  }
}

TEST(RouteMap, RaggedTokensOfOneExpertEach) {
  Program program("ragged");
  const ValueId extent = program.add_input("extent", {DType::kI64, {1}});
  const ValueId idx = program.add_input("idx", {DType::kI32, {6}, 0, extent});
  const auto map = program.add(make_route_map({.num_experts = 3, .alignment = 2}), {idx});
  EXPECT_EQ(program.type(map[RouteMapOutput::kRowOfTK]), program.type(idx));
  program.set_outputs({map[RouteMapOutput::kRowOfTK], map[RouteMapOutput::kSourceR],
                       map[RouteMapOutput::kOffsets]});
  KernelTable kernels;
  add_route_map_cpu(kernels);
  const testing::ProgramRun run(program, {}, kernels);
  *run.value(extent).as<int64_t>() = 4;
  std::ranges::copy(std::vector<int32_t>{2, 0, 2, 2, 99, 99}, run.value(idx).as<int32_t>());
  run.run_forward();
  const auto first = [&](ValueId id, size_t count) {
    return run.value(id).span<int32_t>().first(count);
  };
  EXPECT_THAT(first(map[RouteMapOutput::kRowOfTK], 4), ElementsAre(2, 0, 3, 4));
  EXPECT_THAT(first(map[RouteMapOutput::kSourceR], 6), ElementsAre(1, -1, 0, 2, 3, -1));
  EXPECT_THAT(run.value(map[RouteMapOutput::kOffsets]).span<int64_t>(), ElementsAre(0, 2, 2, 6));
}

TEST(RouteMap, RefusesWhatCannotWork) {
  expect_refused({.num_experts = 4, .top_k = 0}, 8, "top_k is 0");
  expect_refused({.num_experts = 4, .capacity_factor = -1}, 8, "the capacity factor is -1");
  expect_refused({.num_experts = 4, .pad_to_capacity = true}, 8, "needs a capacity factor above 0");
  expect_refused({.num_experts = 4, .alignment = 0}, 8, "alignment of an expert's rows is 0");
  expect_refused({.num_experts = 64, .top_k = 2, .capacity_factor = 0.5}, 16,
                 "leaves 0.25 tokens to an expert (16 tokens, top_k 2, 64 experts); it must be at "
                 "least 2 here");
  expect_refused({.num_experts = 8, .top_k = 8}, int64_t{1} << 29, "more than 2^31 - 1");
  expect_refused({.num_experts = 8, .capacity_factor = 1, .rows_limit = 3}, 8,
                 "a limit of 3 rows stands beside a capacity factor of 1");
  expect_refused({.num_experts = 8, .local_experts = {6, 4}}, 8,
                 "experts 6 to 9 are not among the 8");
  expect_refused({.num_experts = 6, .capacity_group_size = 4}, 8,
                 "6 experts do not fall into groups of 4");
  expect_refused({.num_experts = 8, .capacity_group_size = 4, .local_experts = {2, 4}}, 8,
                 "experts 2 to 5 are not whole groups of 4");
  expect_refused(
      {.num_experts = 8, .capacity_factor = 1, .pad_to_capacity = true, .capacity_group_size = 4},
      8, "switch padding to the capacity off");
  expect_refused({.num_experts = 8, .slot_experts = 3, .slot_rows = 8}, 8,
                 "8 experts do not fall into slots of 3 experts");
  expect_refused({.num_experts = 8, .alignment = 2, .slot_experts = 4, .slot_rows = 8}, 8,
                 "neither aligned nor padded");
}

TEST(RouteMap, RefusesWrongShapesAndCatchesWrongIndices) {
  const OperatorPtr op = make_route_map({.num_experts = 4, .top_k = 2});
  const ValueType idx{.dtype = DType::kI32, .shape = {3, 2}};
  const ValueType probs{.dtype = DType::kF32, .shape = {3, 2}};
  EXPECT_THROW(op->infer(std::vector<ValueType>{probs, probs}), UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{with_last_dim(idx, 3), probs}), UserError);
  EXPECT_THROW(op->infer(std::vector<ValueType>{idx, with_last_dim(probs, 1)}), UserError);
  EXPECT_THROW(run({.num_experts = 2, .top_k = 1}, {1, {2}, {1}}), InternalError);
  EXPECT_THROW(run({.num_experts = 2, .top_k = 1}, {1, {-2}, {1}}), InternalError);
  EXPECT_THROW(run({.num_experts = 2, .top_k = 1, .rows_limit = 1}, {2, {1, 1}, {1, 1}}),
               InternalError);
  EXPECT_THROW(run({.num_experts = 2, .slot_experts = 1, .slot_rows = 1}, {2, {1, 1}, {1, 1}}),
               InternalError);
  EXPECT_THROW(run({.num_experts = 2, .slot_experts = 1, .slot_rows = 1}, {2, {0, 0}, {1, 1}}),
               InternalError);
  const OperatorPtr limited = make_route_map({.num_experts = 4, .top_k = 2, .capacity_factor = 1});
  EXPECT_THROW(limited->infer(std::vector<ValueType>{idx}), UserError) << "drops by probability";
  ValueType ragged = idx;
  ragged.ragged_dim = 0;
  ragged.extent = 0;
  EXPECT_THROW(limited->infer(std::vector<ValueType>{ragged, probs}), UserError);
}

}  // namespace
}  // namespace tessera
