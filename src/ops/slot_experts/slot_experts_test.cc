#include "ops/slot_experts/slot_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int32_t> run(const SlotExpertsSpec& spec, const std::vector<int64_t>& counts) {
  KernelTable kernels;
  add_slot_experts_cpu(kernels);
  const auto outputs = testing::run_operator(
      *make_slot_experts(spec), kernels,
      testing::list_inputs(testing::TestInput{testing::tensor_of_i64({std::ssize(counts)}, counts),
                                              testing::Role::kConstant, "counts"}));
  const auto experts = outputs[0].get().span<int32_t>();
  return {experts.begin(), experts.end()};
}

TEST(SlotExperts, NamesEachRowsExpert) {
  EXPECT_THAT(run({.num_experts = 3, .slot_rows = 4}, {1, 0, 2, /* slot 1 */ 0, 4, 0}),
              ElementsAre(0, 2, 2, -1, 1, 1, 1, 1));
  EXPECT_THAT(run({.num_experts = 1, .slot_rows = 2}, {0, 1, 2}), ElementsAre(-1, -1, 0, -1, 0, 0));
  EXPECT_THAT(run({.num_experts = 2, .slot_rows = 0}, {0, 0}), ElementsAre());
}

TEST(SlotExperts, RefusesWhatCannotBe) {
  EXPECT_THROW(run({.num_experts = 2, .slot_rows = 2}, {1, 2}), InternalError);
  EXPECT_THROW(run({.num_experts = 2, .slot_rows = 2}, {-1, 2}), InternalError);
  EXPECT_THAT(
      [] {
        run({.num_experts = 2, .slot_rows = 2}, {1, 1, 1});
      },
      ::testing::ThrowsMessage<UserError>(HasSubstr("counts must be i64 [slots * 2]")));
  EXPECT_THROW(make_slot_experts({.num_experts = 0}), InternalError);
}

}  // namespace
}  // namespace tessera
