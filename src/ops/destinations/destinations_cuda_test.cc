#include "ops/destinations/destinations.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/testing/owning_check.h"

namespace tessera {
namespace {

struct Case {
  DestinationsSpec spec;
  int64_t num_tokens = 0;
  int64_t bound = 0;  ///< of tokens; the extent is num_tokens where it is above
  int64_t num_rows = 0;
  int64_t top_k = 1;
};

class DestinationsCuda : public testing::GpuTest {
 protected:
  static testing::CheckedProgram build(const Case& c) {
    testing::CheckedProgram checked{Program("destinations"), {}};
    Program& program = checked.program;
    ValueType choices{DType::kI32, {c.bound, c.top_k}};
    if (c.bound > c.num_tokens) {
      choices.ragged_dim = 0;
      choices.extent = program.add_input("tokens", {DType::kI64, {1}});
    }
    const ValueId idx = program.add_input("idx", choices);
    const ValueId source = program.add_input("source", {DType::kI32, {c.num_rows}});
    program.set_outputs({program.add1(make_destinations(c.spec), {idx}, "members"),
                         program.add1(make_permute_choices(), {idx, source}, "choices")});
    return checked;
  }

  void check(const Case& c, uint64_t seed) const {
    testing::OwningCheck check;
    check.dtypes = {DType::kF32};
    check.seed = seed;
    Random random(seed, 1);
    const int64_t num_experts = c.spec.first_expert + (c.spec.members + 1) * c.spec.experts_each;
    std::vector<int32_t> idx;
    for (int64_t i = 0; i < c.bound * c.top_k; ++i) {
      idx.push_back(
          static_cast<int32_t>(random.next_below(static_cast<uint64_t>(num_experts) + 1)) - 1);
    }
    std::vector<int32_t> source;
    for (int64_t r = 0; r < c.num_rows; ++r) {
      const auto places = static_cast<uint64_t>(c.num_tokens * c.top_k);
      source.push_back(static_cast<int32_t>(random.next_below(places + 1)) - 1);
    }
    check.give("idx", testing::tensor_of_i32({c.bound, c.top_k}, idx));
    check.give("tokens", testing::tensor_of_i64({1}, {c.num_tokens}));
    check.give("source", testing::tensor_of_i32({c.num_rows}, source));
    testing::check_on_gpu([&](DType /*dtype*/) { return build(c); }, cpu(), gpu(), check);
  }
};

TEST_F(DestinationsCuda, AgreesWithTheCpu) {
  Random random(5, 2);
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (uint64_t trial = 0; trial < 40; ++trial) {
    Case c{.spec = {.members = 1 + below(9),
                    .experts_each = 1 + below(16),
                    .first_expert = below(2) * below(20)},
           .num_tokens = below(trial % 5 == 0 ? 2 : 700),
           .num_rows = below(2000),
           .top_k = 1 + below(10)};
    c.bound = c.num_tokens + below(2) * (1 + below(300));
    SCOPED_TRACE(fmt::format("trial {}", trial));
    check(c, trial);
  }
}

}  // namespace
}  // namespace tessera
