#include "ops/dispatch_plan/dispatch_plan.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/testing/owning_check.h"

namespace tessera {
namespace {

class DispatchPlanCuda : public testing::GpuTest {
 protected:
  void check(const DispatchPlanSpec& spec, const std::vector<int64_t>& counts,
             bool once = false) const {
    testing::OwningCheck check;
    check.dtypes = {DType::kF32};
    check.once = once;
    check.give("counts", testing::tensor_of_i64({std::ssize(counts)}, counts));
    SCOPED_TRACE(make_dispatch_plan(spec)->attributes());
    testing::check_operator_on_gpu(
        make_dispatch_plan(spec),
        [&](DType /*dtype*/) {
          return testing::OperatorInputs{.names = {"counts"},
                                         .types = {{DType::kI64, {std::ssize(counts)}}}};
        },
        {}, cpu(), gpu(), check);
  }
};

/// Two ranks of five experts, each in two parts; one gets no rows.
TEST_F(DispatchPlanCuda, TinyPlan) {
  const std::vector<int64_t> counts{3, 0, 1, 7, 2, 5, 0, 40, 1, 0, 2, 0, 9, 3, 3, 1, 0, 33, 4, 6};
  check({.first_experts = {0, 3, 5},
         .etp_size = 2,
         .ep_rank = 1,
         .max_received = 200,
         .max_gathered = 400},
        counts, true);
}

TEST_F(DispatchPlanCuda, AgreesWithTheCpu) {
  Random random(5, 1);
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (int trial = 0; trial < 40; ++trial) {
    DispatchPlanSpec spec{.first_experts = {0}, .etp_size = 1 + below(4)};
    for (int64_t ranks = 1 + below(5); ranks > 0; --ranks)
      spec.first_experts.push_back(spec.first_experts.back() + 1 + below(9));
    spec.ep_rank = below(spec.ep_size());
    spec.etp_rank = below(spec.etp_size);
    const int64_t most = trial % 5 == 0 ? 2 : 90;
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < spec.ep_size() * spec.etp_size * spec.num_experts(); ++i)
      counts.push_back(below(most) * below(2));
    spec.max_received = most * spec.ep_size() * spec.num_local();
    spec.max_gathered = spec.max_received * spec.etp_size;
    check(spec, counts);
  }
}

}  // namespace
}  // namespace tessera
