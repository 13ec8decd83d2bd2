#include "ops/expert_clones/clone_weights.h"
#include "ops/expert_clones/expert_clones_testing.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/owning_check.h"

namespace tessera {
namespace {

using testing::Counts;

class ExpertClonesCuda : public testing::GpuTest {
 protected:
  void check_plan(const CloneSlots& spec, const Counts& counts, bool once = false) const {
    testing::OwningCheck check = constant_check(once);
    check.give("counts", testing::tensor_of_i64({std::ssize(counts)}, counts));
    SCOPED_TRACE(spec.to_string());
    testing::check_operator_on_gpu(
        make_clone_plan(spec),
        [&](DType /*dtype*/) {
          return testing::OperatorInputs{.names = {"counts"},
                                         .types = {{DType::kI64, {std::ssize(counts)}}}};
        },
        {}, cpu(), gpu(), check);
  }

  void check_route(const CloneSlots& spec, const Counts& counts, Random& random) const {
    const auto first = counts.begin() + spec.rank * spec.num_experts;
    const testing::Assignments drawn =
        testing::draw_assignments(Counts(first, first + spec.num_experts), random);
    const auto planned = plan_on_cpu(spec, counts);
    testing::OwningCheck check = constant_check(false);
    const Shape shape{std::ssize(drawn.expert_idx), 1};
    check.give("expert_idx", testing::tensor_of_i32(shape, drawn.expert_idx));
    check.give("row_of", testing::tensor_of_i32(shape, drawn.row_of));
    check.give("offsets", testing::tensor_of_i64({spec.num_experts + 1}, drawn.offsets));
    check.give("slots", testing::tensor_of_i64({spec.num_slots()}, planned[0]));
    check.give("begins", testing::tensor_of_i64({spec.num_slots()}, planned[1]));
    check.give("ends", testing::tensor_of_i64({spec.num_slots()}, planned[2]));
    const ValueType by_slot{DType::kI64, {spec.num_slots()}};
    testing::check_operator_on_gpu(
        make_clone_route(spec),
        [&](DType /*dtype*/) {
          return testing::OperatorInputs{
              .names = {"expert_idx", "row_of", "offsets", "slots", "begins", "ends"},
              .types = {{DType::kI32, shape},
                        {DType::kI32, shape},
                        {DType::kI64, {spec.num_experts + 1}},
                        by_slot,
                        by_slot,
                        by_slot}};
        },
        {}, cpu(), gpu(), check);
  }

  /// Forward alone: the sum over zeros.
  void check_sum(const CloneSlots& spec, const Counts& counts, int64_t rows, int64_t width) const {
    testing::OwningCheck check = constant_check(false);
    check.give("slots", testing::tensor_of_i64({spec.num_slots()}, plan_on_cpu(spec, counts)[0]));
    testing::check_on_gpu(
        [&](DType /*dtype*/) {
          Program program("sum");
          const ValueId returned =
              program.add_input("returned", {DType::kF32, {spec.max_clones() * rows, width}});
          const ValueId slots = program.add_input("slots", {DType::kI64, {spec.num_slots()}});
          const ValueId sum =
              program.add_accumulator("sum", {DType::kF32, {spec.num_local() * rows, width}});
          program.add(std::make_shared<AddClones>(spec), {returned, slots}, {}, {sum});
          return testing::CheckedProgram{.program = std::move(program), .request = {}};
        },
        cpu(), gpu(), check);
  }

 private:
  static testing::OwningCheck constant_check(bool once) {
    testing::OwningCheck check;
    check.dtypes = {DType::kF32};
    check.once = once;
    return check;
  }

  static std::vector<Counts> plan_on_cpu(const CloneSlots& spec, const Counts& counts) {
    KernelTable kernels;
    add_expert_clones_cpu(kernels);
    const auto out = testing::run_operator(
        *make_clone_plan(spec), kernels,
        testing::list_inputs(testing::TestInput{
            testing::tensor_of_i64({std::ssize(counts)}, counts), testing::Role::kConstant}));
    std::vector<Counts> values;
    for (const OwnedTensor& tensor : out) {
      const auto span = tensor.get().span<int64_t>();
      values.emplace_back(span.begin(), span.end());
    }
    return values;
  }
};

/// Two ranks; an expert of the first goes to the second.
TEST_F(ExpertClonesCuda, TinyPlan) {
  check_plan({.num_experts = 4, .num_ranks = 2, .rank = 1, .slots_per_rank = 2},
             {9, 70, 0, 3, 1, 60, 5, 0}, true);
}

TEST_F(ExpertClonesCuda, PlanAgreesWithTheCpu) {
  Random random(5, 1);
  for (int trial = 0; trial < 60; ++trial) {
    CloneSlots spec = testing::random_slots(random);
    if (trial % 10 == 0)
      spec = {.num_experts = 320, .num_ranks = 64, .rank = 63, .slots_per_rank = 16};
    check_plan(spec, trial % 3 == 0 ? testing::random_counts(spec, trial % 2 == 0 ? 1 : 50, random)
                                    : testing::skewed_counts(spec, 20, 1 + trial % 9, random));
  }
}

TEST_F(ExpertClonesCuda, RouteAgreesWithTheCpu) {
  Random random(5, 2);
  for (int trial = 0; trial < 40; ++trial) {
    const CloneSlots spec = testing::random_slots(random);
    check_route(spec,
                testing::skewed_counts(spec, trial % 4 == 0 ? 400 : 12, 1 + trial % 9, random),
                random);
  }
}

TEST_F(ExpertClonesCuda, SumAgreesWithTheCpu) {
  Random random(5, 3);
  for (int trial = 0; trial < 20; ++trial) {
    const CloneSlots spec = testing::random_slots(random);
    if (spec.num_ranks == 1) continue;
    check_sum(spec, testing::skewed_counts(spec, 20, 1 + trial % 9, random), trial % 3,
              1 + 37 * (trial % 5));
  }
}

}  // namespace
}  // namespace tessera
