#include "ops/slot_experts/slot_experts.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/testing/owning_check.h"

namespace tessera {
namespace {

class SlotExpertsCuda : public testing::GpuTest {
 protected:
  void check(const SlotExpertsSpec& spec, const std::vector<int64_t>& counts,
             bool once = false) const {
    testing::OwningCheck check;
    check.dtypes = {DType::kF32};
    check.once = once;
    check.give("counts", testing::tensor_of_i64({std::ssize(counts)}, counts));
    SCOPED_TRACE(make_slot_experts(spec)->attributes());
    testing::check_operator_on_gpu(
        make_slot_experts(spec),
        [&](DType /*dtype*/) {
          return testing::OperatorInputs{.names = {"counts"},
                                         .types = {{DType::kI64, {std::ssize(counts)}}}};
        },
        {}, cpu(), gpu(), check);
  }
};

TEST_F(SlotExpertsCuda, TinySlots) {
  check({.num_experts = 3, .slot_rows = 300}, {7, 0, 280, 1, 0, 0}, true);
}

TEST_F(SlotExpertsCuda, AgreesWithTheCpu) {
  Random random(5, 2);
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (int trial = 0; trial < 40; ++trial) {
    SlotExpertsSpec spec{.num_experts = 1 + below(trial % 4 == 0 ? 1024 : 9)};
    const int64_t num_slots = 1 + below(6);
    const int64_t most = trial % 5 == 0 ? 1 : 300;
    std::vector<int64_t> counts;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      int64_t rows = 0;
      for (int64_t e = 0; e < spec.num_experts; ++e) {
        counts.push_back(below(most) * below(2));
        rows += counts.back();
      }
      spec.slot_rows = std::max(spec.slot_rows, rows);
    }
    spec.slot_rows += below(2) * below(400);
    check(spec, counts);
  }
}

}  // namespace
}  // namespace tessera
