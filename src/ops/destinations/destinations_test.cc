#include "ops/destinations/destinations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Role;
using testing::TestInput;
using ::testing::ThrowsMessage;

TestInput choices(int64_t tokens, int64_t top_k, const std::vector<int32_t>& experts) {
  return {testing::tensor_of_i32({tokens, top_k}, experts), Role::kConstant, "expert_idx"};
}

std::vector<int32_t> run(const OperatorPtr& op, std::vector<TestInput> inputs) {
  KernelTable kernels;
  add_destinations_cpu(kernels);
  const auto outputs = testing::run_operator(*op, kernels, inputs);
  const auto values = outputs[0].get().span<int32_t>();
  return {values.begin(), values.end()};
}

std::vector<int32_t> members(const DestinationsSpec& spec, int64_t top_k,
                             const std::vector<int32_t>& experts) {
  return run(make_destinations(spec),
             testing::list_inputs(choices(std::ssize(experts) / top_k, top_k, experts)));
}

TEST(Destinations, NamesEachMemberOnce) {
  EXPECT_THAT(members({.members = 3, .experts_each = 2}, 3, {0, 1, 5, /**/ 4, 2, 5, /**/ 3, 3, 2}),
              ElementsAre(0, -1, 2, /**/ 2, 1, -1, /**/ 1, -1, -1));
}

TEST(Destinations, KnowsNoMemberOfOtherExperts) {
  EXPECT_THAT(members({.members = 2, .experts_each = 2, .first_expert = 4}, 2,
                      {3, 4, /**/ 8, 7, /**/ -1, 6, /**/ -1, -1}),
              ElementsAre(-1, 0, /**/ -1, 1, /**/ -1, 1, /**/ -1, -1));
}

TEST(Destinations, ChoicesGoWithTheirRows) {
  const auto chosen = run(make_permute_choices(),
                          testing::list_inputs(choices(2, 3, {4, 5, 6, 7, -1, 9}),
                                               TestInput{testing::tensor_of_i32({4}, {5, -1, 0, 3}),
                                                         Role::kConstant, "source"}));
  EXPECT_THAT(chosen, ElementsAre(7, -1, 9, -1, -1, -1, 4, 5, 6, 7, -1, 9));
}

TEST(Destinations, NoTokensAtAll) {
  EXPECT_THAT(members({.members = 3, .experts_each = 2}, 3, {}), ElementsAre());
}

TEST(Destinations, RefusesWhatCannotBe) {
  EXPECT_THROW(make_destinations({.members = 0}), InternalError);
  EXPECT_THROW(make_destinations({.experts_each = 0}), InternalError);
  EXPECT_THAT(
      [] {
        run(make_destinations({}),
            testing::list_inputs(
                TestInput{testing::tensor_of_i32({2}, {0, 1}), Role::kConstant, "expert_idx"}));
      },
      ThrowsMessage<UserError>(HasSubstr("expert_idx must be i32 [T, K]")));
}

}  // namespace
}  // namespace tessera
