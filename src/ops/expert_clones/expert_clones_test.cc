#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "comm/thread/thread_world.h"
#include "ops/expert_clones/clone_split.h"
#include "ops/expert_clones/clone_weights.h"
#include "ops/expert_clones/expert_clones_testing.h"

namespace tessera::testing {
namespace {

KernelTable kernels() {
  KernelTable table;
  add_expert_clones_cpu(table);
  return table;
}

Counts numbers_of(const Tensor& tensor) {
  const auto span = tensor.span<int64_t>();
  return {span.begin(), span.end()};
}

struct Plan {
  Counts slots, begins, ends;
};

Plan plan(const CloneSlots& spec, const Counts& counts) {
  const auto out = run_operator(
      *make_clone_plan(spec), kernels(),
      list_inputs(TestInput{tensor_of_i64({std::ssize(counts)}, counts), Role::kConstant}));
  return {numbers_of(out[0]), numbers_of(out[1]), numbers_of(out[2])};
}

/// The plans of all ranks, which must have the same slots.
std::vector<Plan> plan_everywhere(CloneSlots spec, const Counts& counts) {
  std::vector<Plan> plans;
  for (spec.rank = 0; spec.rank < spec.num_ranks; ++spec.rank) {
    plans.push_back(plan(spec, counts));
    EXPECT_EQ(plans.back().slots, plans.front().slots);
  }
  return plans;
}

/// Tokens of each rank, at home alone.
Counts loads_at_home(const CloneSlots& spec, const Counts& counts) {
  Counts loads(spec.num_ranks, 0);
  for (size_t i = 0; i < counts.size(); ++i)
    loads[spec.home_of(static_cast<int64_t>(i) % spec.num_experts)] += counts[i];
  return loads;
}

/// The same with clones.
Counts loads_with_clones(const CloneSlots& spec, const Counts& counts,
                         const std::vector<Plan>& plans) {
  Counts loads = loads_at_home(spec, counts);
  for (const Plan& of_source : plans) {
    for (int64_t slot = 0; slot < spec.num_slots(); ++slot) {
      const int64_t tokens = of_source.ends[slot] - of_source.begins[slot];
      if (tokens == 0) continue;
      loads[spec.home_of(of_source.slots[slot])] -= tokens;
      loads[slot / spec.slots_per_rank] += tokens;
    }
  }
  return loads;
}

int64_t mean_of(const Counts& loads) {
  const int64_t total = std::accumulate(loads.begin(), loads.end(), int64_t{0});
  return (total + std::ssize(loads) - 1) / std::ssize(loads);
}

/// Slots of a rank: distinct experts of others, rising, empty ones last.
void expect_valid_slots(const CloneSlots& spec, const Counts& slots) {
  for (int64_t slot = 0; slot < spec.num_slots(); ++slot) {
    const int64_t expert = slots[slot];
    ASSERT_GE(expert, -1);
    ASSERT_LT(expert, spec.num_experts);
    if (expert >= 0) {
      EXPECT_NE(spec.home_of(expert), slot / spec.slots_per_rank);
    }
    if (slot % spec.slots_per_rank == 0 || expert < 0) continue;
    EXPECT_GE(slots[slot - 1], 0);
    EXPECT_LT(slots[slot - 1], expert);
  }
}

/// Of a rank's tokens of an expert no two slots get the same, and none gets what is not there.
void expect_apart(const CloneSlots& spec, const Plan& of_source, const Counts& counts) {
  for (int64_t e = 0; e < spec.num_experts; ++e) {
    std::vector<bool> taken(counts[e], false);
    for (int64_t slot = 0; slot < spec.num_slots(); ++slot) {
      if (of_source.slots[slot] != e) continue;
      ASSERT_LE(0, of_source.begins[slot]);
      ASSERT_LE(of_source.begins[slot], of_source.ends[slot]);
      ASSERT_LE(of_source.ends[slot], counts[e]);
      for (int64_t i = of_source.begins[slot]; i < of_source.ends[slot]; ++i) {
        EXPECT_FALSE(taken[i]);
        taken[i] = true;
      }
    }
  }
}

Counts of_rank(const CloneSlots& spec, const Counts& counts, int64_t rank) {
  const auto first = counts.begin() + rank * spec.num_experts;
  return {first, first + spec.num_experts};
}

TEST(ClonePlan, PlacesEveryTokenOnceAndFillsNoRankBeyondTheMean) {
  Random random(3, 1);
  for (int trial = 0; trial < 300; ++trial) {
    const CloneSlots spec = random_slots(random);
    const Counts counts = trial % 2 == 0 ? random_counts(spec, trial % 5 == 0 ? 1 : 40, random)
                                         : skewed_counts(spec, 20, 1 + trial % 9, random);
    SCOPED_TRACE(fmt::format("trial {}: {}", trial, spec.to_string()));
    const std::vector<Plan> plans = plan_everywhere(spec, counts);
    expect_valid_slots(spec, plans[0].slots);
    for (int64_t source = 0; source < spec.num_ranks; ++source)
      expect_apart(spec, plans[source], of_rank(spec, counts, source));
    const Counts before = loads_at_home(spec, counts);
    const Counts after = loads_with_clones(spec, counts, plans);
    const int64_t mean = mean_of(before);
    for (int64_t rank = 0; rank < spec.num_ranks; ++rank) {
      EXPECT_LE(after[rank], std::max(before[rank], mean));
      const bool has_clones = plans[0].slots[rank * spec.slots_per_rank] >= 0;
      if (has_clones) {
        EXPECT_LE(after[rank], mean);
        EXPECT_GT(after[rank], before[rank]);
      }
    }
    const bool all_full =
        std::ranges::all_of(plans[0].slots, [](int64_t expert) { return expert >= 0; });
    if (spec.slots_per_rank >= spec.num_ranks || !all_full) {
      const int64_t most = *std::ranges::max_element(after);
      bool taken = true;  // whoever could take more has no slot left
      for (int64_t rank = 0; rank < spec.num_ranks; ++rank)
        taken &= after[rank] >= mean || plans[0].slots[(rank + 1) * spec.slots_per_rank - 1] >= 0;
      EXPECT_TRUE(taken || most <= mean + mean / kCloneTolerance);
    }
  }
}

/// One expert with 8 times the mean, the others as Zipf has them.
TEST(ClonePlan, BringsTheSlowestRankWithin115PercentOfTheMean) {
  Random random(3, 2);
  for (const int64_t num_ranks : {4, 8}) {
    for (const int64_t local : {4, 16}) {
      double worst = 0;
      double worst_before = 10;
      for (int trial = 0; trial < 20; ++trial) {
        const CloneSlots spec{
            .num_experts = num_ranks * local, .num_ranks = num_ranks, .slots_per_rank = 3};
        const Counts counts = skewed_counts(spec, 60, 8, random);
        const auto mean = static_cast<double>(mean_of(loads_at_home(spec, counts)));
        const Counts after = loads_with_clones(spec, counts, plan_everywhere(spec, counts));
        worst = std::max(worst, static_cast<double>(*std::ranges::max_element(after)) / mean);
        const Counts before = loads_at_home(spec, counts);
        worst_before =
            std::min(worst_before, static_cast<double>(*std::ranges::max_element(before)) / mean);
      }
      EXPECT_LE(worst, 1.15) << num_ranks << " ranks of " << local << " experts";
      EXPECT_GT(worst_before, 1.15);
    }
  }
}

TEST(ClonePlan, ClonesNothingWithoutTokensOrOtherRanks) {
  const CloneSlots many{.num_experts = 6, .num_ranks = 3, .slots_per_rank = 2};
  EXPECT_THAT(plan(many, Counts(18, 0)).slots, ::testing::Each(-1));
  const CloneSlots one{.num_experts = 3};
  EXPECT_THAT(plan(one, {50, 0, 1}).slots, ::testing::Each(-1));
}

/// Rank 0 has one expert with everything. Rank 2 sends its own tokens to the clone that it has.
TEST(ClonePlan, ClonesTheHotExpertToTheEmptiestRanks) {
  const CloneSlots spec{.num_experts = 3, .num_ranks = 3, .rank = 2};
  const Plan found = plan(spec, {4, 0, 0, 4, 0, 0, 4, 0, 0});
  EXPECT_EQ(found.slots, (Counts{-1, 0, 0}));
  EXPECT_EQ(found.begins, (Counts{0, 0, 0}));
  EXPECT_EQ(found.ends, (Counts{0, 0, 4}));
}

TEST(CloneRoute, SendsEachRankTheTokensOfItsRange) {
  Random random(3, 4);
  for (int trial = 0; trial < 60; ++trial) {
    const CloneSlots spec = random_slots(random);
    const Counts counts = skewed_counts(spec, 12, 1 + trial % 9, random);
    const Plan planned = plan(spec, counts);
    const Assignments drawn = draw_assignments(of_rank(spec, counts, spec.rank), random);
    const Shape shape{std::ssize(drawn.expert_idx), 1};
    const auto by_slot = [&](const Counts& values) {
      return TestInput{tensor_of_i64({spec.num_slots()}, values), Role::kConstant};
    };
    const auto out = run_operator(
        *make_clone_route(spec), kernels(),
        list_inputs(
            TestInput{tensor_of_i32(shape, drawn.expert_idx), Role::kConstant},
            TestInput{tensor_of_i32(shape, drawn.row_of), Role::kConstant},
            TestInput{tensor_of_i64({spec.num_experts + 1}, drawn.offsets), Role::kConstant},
            by_slot(planned.slots), by_slot(planned.begins), by_slot(planned.ends)));
    const auto home = out[0].get().span<int32_t>();
    const auto clone = out[1].get().span<int32_t>();
    Counts arrived(spec.num_slots(), 0);
    for (size_t i = 0; i < home.size(); ++i) {
      if (clone[i] < 0) {
        EXPECT_EQ(home[i], drawn.expert_idx[i]);
        continue;
      }
      EXPECT_EQ(home[i], -1);
      EXPECT_EQ(planned.slots[clone[i]], drawn.expert_idx[i]);
      ++arrived[clone[i]];
    }
    for (int64_t slot = 0; slot < spec.num_slots(); ++slot)
      EXPECT_EQ(arrived[slot], planned.ends[slot] - planned.begins[slot]);
  }
}

/// A number that any rank can tell for element i of an expert (or of a slot).
float element(int64_t expert, int64_t i) {
  return static_cast<float>((expert * 37 + i * 5) % 64 - 31);
}

void check_weights(World& world, CloneSlots spec, const Counts& slots, int64_t block_rows,
                   DType dtype) {
  constexpr int64_t kWidth = 3;
  const CommunicatorPtr comm = world.make_world_group();
  spec.rank = comm->rank();
  const int64_t block = block_rows * kWidth;
  std::vector<float> weights;
  for (int64_t i = 0; i < spec.num_local() * block; ++i)
    weights.push_back(element(spec.rank * spec.num_local() + i / block, i % block));
  std::vector<float> grads;
  for (int64_t i = 0; i < spec.slots_per_rank * block; ++i)
    grads.push_back(element(100 + spec.rank * spec.slots_per_rank + i / block, i % block));
  const Shape shape{spec.num_local() * block_rows, kWidth};
  const auto inputs = [&] {
    return list_inputs(
        TestInput{tensor_of(shape, weights, dtype), Role::kWeight, "weight"},
        TestInput{tensor_of_i64({spec.num_slots()}, slots), Role::kConstant, "slots"});
  };
  const auto out = run_operator(*make_clone_weights(comm, spec), kernels(), inputs());
  const std::vector<double> clones = to_doubles(out[0]);
  for (int64_t i = 0; i < std::ssize(clones); ++i) {
    const int64_t expert = slots[spec.rank * spec.slots_per_rank + i / block];
    if (expert >= 0) {
      EXPECT_EQ(clones[i], element(expert, i % block));
    }
  }
  if (dtype != DType::kF32) return;  // gradients of clones are F32
  std::vector<OwnedTensor> given;
  given.push_back(tensor_of({spec.slots_per_rank * block_rows, kWidth}, grads));
  const auto gradients = run_gradients(make_clone_weights(comm, spec), kernels(), inputs(), given);
  const std::vector<double> sums = to_doubles(gradients[0]);
  for (int64_t i = 0; i < std::ssize(sums); ++i) {
    double expected = 0;
    for (int64_t slot = 0; slot < spec.num_slots(); ++slot) {
      if (slots[slot] == spec.rank * spec.num_local() + i / block)
        expected += element(100 + slot, i % block);
    }
    EXPECT_EQ(sums[i], expected);
  }
}

/// Clones have their experts' bits, and experts the sum of their clones' gradients.
TEST(CloneWeights, GoThereAndTheirGradientsBack) {
  Random random(3, 5);
  for (int trial = 0; trial < 12; ++trial) {
    const CloneSlots spec{
        .num_experts = 6, .num_ranks = 1 + trial % 3, .slots_per_rank = 1 + trial % 2};
    if (spec.num_ranks == 1) continue;
    const Counts slots =
        plan(spec, trial == 1 ? Counts(spec.num_ranks * 6, 0) : skewed_counts(spec, 30, 4, random))
            .slots;
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      run_thread_world(spec.num_ranks,
                       [&](World& world) { check_weights(world, spec, slots, trial % 3, dtype); });
    }
  }
}

TEST(CloneWeights, RefusesOtherShapesAndGroups) {
  const CloneSlots spec{.num_experts = 4, .num_ranks = 2};
  EXPECT_THROW(make_clone_weights(make_single_communicator("ep"), spec), InternalError);
  EXPECT_THROW(AddClones(spec).infer(std::vector<ValueType>{{DType::kBF16, {4, 3}},
                                                            {.dtype = DType::kI64, .shape = {2}}}),
               UserError);
  EXPECT_THROW(make_clone_plan({.num_experts = 5, .num_ranks = 2}), InternalError);
}

}  // namespace
}  // namespace tessera::testing
