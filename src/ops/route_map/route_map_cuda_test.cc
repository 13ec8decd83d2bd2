#include "ops/route_map/capacity_limit.h"
#include "ops/route_map/route_map.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/testing/owning_check.h"

namespace tessera {
namespace {

using testing::GpuTest;
using testing::OperatorInputs;
using testing::OwningCheck;

/// The inputs of one call; indices may be absent (-1).
struct Case {
  RouteMapSpec spec;
  int64_t num_tokens = 0;
  int64_t bound = 0;  ///< of tokens; the extent is num_tokens where it is above
  double skew = 0;    ///< how many tokens choose expert 0 first
  double absent = 0;  ///< how many indices are -1
  bool has_probs = true;
};

int64_t below(Random& random, int64_t bound) {
  return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
}

/// Distinct random experts for every token, and probabilities of which many are equal.
OwningCheck check_of(const Case& c, uint64_t seed) {
  OwningCheck check;
  check.dtypes = {DType::kF32};
  Random random(seed, 1);
  std::vector<int32_t> idx;
  std::vector<float> probs;
  std::vector<int32_t> experts(c.spec.num_experts);
  for (int64_t t = 0; t < c.bound; ++t) {
    for (size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<int32_t>(e);
    const size_t fixed = random.next_uniform() < c.skew ? 1 : 0;
    for (size_t k = 0; k < static_cast<size_t>(c.spec.top_k); ++k) {
      if (k >= fixed) std::swap(experts[k], experts[k + random.next_below(experts.size() - k)]);
      const bool outside = t >= c.num_tokens;
      idx.push_back(outside ? 1 << 30 : random.next_uniform() < c.absent ? -1 : experts[k]);
      probs.push_back(random.next_below(50) == 0
                          ? NAN
                          : static_cast<float>(random.next_below(16)) / 8.0F - 0.5F);
    }
  }
  const Shape shape{c.bound, c.spec.top_k};
  check.give("idx", testing::tensor_of_i32(shape, idx));
  check.give("probs", testing::tensor_of(shape, probs));
  check.give("tokens", testing::tensor_of_i64({1}, {c.num_tokens}));
  return check;
}

class RouteMapCuda : public GpuTest {
 protected:
  void check(const Case& c, uint64_t seed, bool once = false) {
    const OperatorPtr op = make_route_map(c.spec);
    SCOPED_TRACE(
        fmt::format("T={} of {} seed {} {}", c.num_tokens, c.bound, seed, op->attributes()));
    const auto build = [&](DType /*dtype*/) {
      testing::CheckedProgram checked{Program("route"), {}};
      ValueType type{DType::kI32, {c.bound, c.spec.top_k}};
      if (c.bound > c.num_tokens) {
        type.ragged_dim = 0;
        type.extent = checked.program.add_input("tokens", {DType::kI64, {1}});
      }
      std::vector<ValueId> inputs = {checked.program.add_input("idx", type)};
      if (c.has_probs)
        inputs.push_back(checked.program.add_input("probs", with_dtype(type, DType::kF32)));
      checked.program.set_outputs(checked.program.add(op, inputs));
      return checked;
    };
    OwningCheck how = check_of(c, seed);
    how.once = once;
    testing::check_on_gpu(build, cpu(), gpu(), how);
  }
};

TEST_F(RouteMapCuda, SizesOfTraining) {
  check({{.num_experts = 128, .top_k = 8}, 4096, 4096}, 1);
  check({{.num_experts = 8, .top_k = 2, .alignment = 128}, 4096, 4096, 0.9}, 2);
  check({{.num_experts = 128, .top_k = 8, .capacity_factor = 1.0}, 4096, 4096, 0.9}, 3);
  check({{.num_experts = 1024, .top_k = 1, .alignment = 16}, 3001, 3500}, 4);
  check({{.num_experts = 16, .top_k = 8}, 40001, 40001}, 5);
}

/// The most that one block lays out, and a little more than it can: of tokens, of experts, of an
/// alignment.
TEST_F(RouteMapCuda, FewAndMoreThanFew) {
  uint64_t seed = 200;
  for (const int64_t num_experts : {1, 8, 32, 33, 64, 65}) {
    for (const int64_t num_tokens : {0, 1, 1023, 1024, 1025, 2049, 4096, 4097, 8191, 8192, 8193}) {
      check({.spec = {.num_experts = num_experts, .alignment = 1 + num_tokens % 3 * 16},
             .num_tokens = num_tokens,
             .bound = num_tokens,
             .skew = 0.3,
             .absent = 0.1},
            ++seed);
    }
  }
  for (const int64_t alignment : {65536, 65537})
    check({{.num_experts = 64, .top_k = 2, .alignment = alignment}, 700, 701}, ++seed);
}

/// Local experts in the middle of all, tokens of which fewer are there than may be, and experts
/// without any.
TEST_F(RouteMapCuda, FewOfSomeExperts) {
  uint64_t seed = 280;
  for (const int64_t num_tokens : {0, 1, 511, 2047, 2048}) {
    check({.spec = {.num_experts = 100, .top_k = 3, .alignment = 8, .local_experts = {30, 64}},
           .num_tokens = num_tokens,
           .bound = 2100,
           .has_probs = false},
          ++seed);
    check({.spec = {.num_experts = 8, .top_k = 2},
           .num_tokens = num_tokens,
           .bound = 2100,
           .skew = 1,
           .absent = 0.6},
          ++seed);
  }
}

TEST_F(RouteMapCuda, RandomSpecs) {
  Random random(7, 1);
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t experts = 1 + below(random, trial % 4 == 0 ? 150 : 12);
    Case c{.spec = {.num_experts = experts,
                    .top_k = 1 + below(random, std::min<int64_t>(experts, 9)),
                    .alignment = 1 + below(random, 5)}};
    c.num_tokens = below(random, trial % 3 == 0 ? 3000 : 70);
    c.bound = c.num_tokens;
    c.skew = random.next_uniform();
    c.absent = trial % 2 == 0 ? 0.2 : 0.0;
    RouteMapSpec& spec = c.spec;
    if (trial % 3 == 1 || trial % 3 == 0) {
      const double least = static_cast<double>(experts) /
                           static_cast<double>(std::max<int64_t>(c.num_tokens * spec.top_k, 1));
      spec.capacity_factor = std::max(0.3 + random.next_uniform(), 1.001 * least);
      spec.drop_policy = below(random, 2) == 0 ? DropPolicy::kProbs : DropPolicy::kPosition;
      if (experts % 3 == 0 && below(random, 2) == 0) {
        spec.capacity_group_size = 3;
        if (experts > 3) spec.local_experts = {3, experts - 3};
      } else {
        spec.pad_to_capacity = below(random, 2) == 0;
      }
    } else {
      c.bound += below(random, 50);
      c.has_probs = below(random, 2) == 0;
      spec.local_experts = {below(random, experts), 1};
      spec.rows_limit = below(random, 2) * (c.bound + 1);
    }
    check(c, static_cast<uint64_t>(trial + 10));
  }
}

TEST_F(RouteMapCuda, Slots) {
  Random random(8, 1);
  for (int trial = 0; trial < 24; ++trial) {
    const int64_t slots = 1 + below(random, 8);
    const int64_t slot_experts = 1 + below(random, trial % 4 == 0 ? 120 : 8);
    const int64_t experts = slots * slot_experts;
    Case c{.spec = {.num_experts = experts,
                    .top_k = 1 + below(random, std::min<int64_t>(experts, 9)),
                    .slot_experts = slot_experts}};
    c.num_tokens = c.bound = below(random, trial % 3 == 0 ? 3000 : 70);
    c.skew = random.next_uniform();
    c.absent = trial % 2 == 0 ? 0.2 : 0.0;
    c.spec.slot_rows = c.num_tokens * std::min(c.spec.top_k, slot_experts) + below(random, 40);
    check(c, static_cast<uint64_t>(trial + 100));
  }
}

/// Assignments of two runs.
TEST_F(RouteMapCuda, TinyMap) {
  check({{.num_experts = 67, .top_k = 2, .alignment = 4}, 520, 530, 0.5, 0.2}, 300, true);
}

TEST_F(RouteMapCuda, TinyFew) {
  check({{.num_experts = 7, .top_k = 2, .alignment = 4}, 520, 530, 0.5, 0.2}, 303, true);
}

TEST_F(RouteMapCuda, TinyCapacity) {
  check({{.num_experts = 7, .top_k = 2, .capacity_factor = 0.7}, 520, 520, 0.5, 0.2}, 301, true);
}

TEST_F(RouteMapCuda, TinySlots) {
  check({{.num_experts = 6, .top_k = 2, .slot_experts = 3, .slot_rows = 1100}, 520, 520, 0.5, 0.2},
        302, true);
}

TEST_F(RouteMapCuda, RefusesMoreExpertsThanItHolds) {
  EXPECT_THROW(check({{.num_experts = 1025}, 4, 4}, 1), UserError);
}

class CapacityLimitCuda : public GpuTest {
 protected:
  void check(const Case& c, const CapacityLimitSpec& spec, uint64_t seed, bool once = false) const {
    SCOPED_TRACE(make_capacity_limit(spec)->attributes());
    OwningCheck check = check_of(c, seed);
    check.once = once;
    Random random(seed, 2);
    std::vector<int32_t> positions;
    for (int64_t t = 0; t < c.num_tokens; ++t) positions.push_back(static_cast<int32_t>(t));
    for (size_t t = 0; t + 1 < positions.size(); ++t)
      std::swap(positions[t], positions[t + random.next_below(positions.size() - t)]);
    check.give("positions", testing::tensor_of_i32({c.num_tokens}, positions));
    testing::check_operator_on_gpu(
        make_capacity_limit(spec),
        [&](DType /*dtype*/) {
          OperatorInputs inputs{.names = {"idx", "probs"},
                                .types = {{DType::kI32, {c.num_tokens, c.spec.top_k}},
                                          {DType::kF32, {c.num_tokens, c.spec.top_k}}}};
          if (spec.has_positions) {
            inputs.names.push_back("positions");
            inputs.types.push_back({DType::kI32, {c.num_tokens}});
          }
          return inputs;
        },
        {}, cpu(), gpu(), check);
  }
};

TEST_F(CapacityLimitCuda, TinyLimit) {
  const Case c{.spec = {.num_experts = 6, .top_k = 2, .capacity_factor = 0.7},
               .num_tokens = 520,
               .bound = 520,
               .skew = 0.5,
               .absent = 0.1};
  check(c, {.route = c.spec, .tokens = {100, 211}, .has_positions = true}, 400, true);
}

TEST_F(CapacityLimitCuda, AgreesWithTheCpu) {
  Random random(9, 1);
  for (int trial = 0; trial < 30; ++trial) {
    const int64_t experts = 2 + 2 * below(random, trial % 4 == 0 ? 64 : 6);
    Case c{.spec = {.num_experts = experts,
                    .top_k = 1 + below(random, std::min<int64_t>(experts, 8)),
                    .capacity_factor = 0.4 + random.next_uniform(),
                    .drop_policy = trial % 2 == 0 ? DropPolicy::kProbs : DropPolicy::kPosition,
                    .capacity_group_size = trial % 3 == 0 ? 2 : 1},
           .num_tokens = 400 + below(random, 2000)};
    c.bound = c.num_tokens;
    c.skew = random.next_uniform();
    c.absent = 0.1;
    const int64_t begin = below(random, c.num_tokens);
    const CapacityLimitSpec spec{.route = c.spec,
                                 .tokens = {begin, below(random, c.num_tokens - begin)},
                                 .has_positions = trial % 2 == 1 || trial % 4 == 0};
    check(c, spec, static_cast<uint64_t>(trial));
  }
}

}  // namespace
}  // namespace tessera
