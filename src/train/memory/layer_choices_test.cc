#include "train/memory/layer_choices.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> write(const std::vector<LayerEntry>& entries) {
  std::vector<std::string> texts;
  for (const LayerEntry& entry : entries) texts.push_back(entry.to_string());
  return texts;
}

TEST(LayerChoices, BecomeRangesOfNeighbours) {
  const LayerChoices choices = {{0, {.recompute = {"a", "b"}}},
                                {1, {.recompute = {"b"}, .offload = {"all"}}},
                                {2, {.recompute = {"a", "b"}}},
                                {3, {.recompute = {"a", "b"}, .offload = {"c"}}}};
  EXPECT_THAT(write(list_entries(choices, &LayerChoice::recompute, 4)),
              ElementsAre("a@0", "a@2-3", "b"));
  EXPECT_THAT(write(list_entries(choices, &LayerChoice::recompute, 5)),
              ElementsAre("a@0", "a@2-3", "b@0-3"));
  EXPECT_THAT(write(list_entries(choices, &LayerChoice::offload, 4)), ElementsAre("all@1", "c@3"));
  EXPECT_THAT(write(list_entries({}, &LayerChoice::offload, 4)), IsEmpty());
  EXPECT_THAT(write(list_entries({{0, {.offload = {"x"}}}}, &LayerChoice::offload, 1)),
              ElementsAre("x"));
}

/// Each layer has again what was chosen for it, behind what was given.
TEST(LayerChoices, MakeAPolicyThatHasThem) {
  const LayerChoices choices = {{1, {.recompute = {"b", "c"}}}, {2, {.recompute = {"b"}}}};
  const SavedPolicy base{.recompute = parse_recompute({"a@2"}),
                         .offload = {.entries = parse_offload({"d"}), .link_bytes = 7}};
  const SavedPolicy policy = make_policy(base, choices, 4);
  EXPECT_THAT(write(policy.recompute), ElementsAre("a@2", "b@1-2", "c@1"));
  EXPECT_THAT(write(policy.offload.entries), ElementsAre("d"));
  EXPECT_EQ(policy.offload.link_bytes, 7);
  EXPECT_THAT(names_of_layer(policy.recompute, 0), IsEmpty());
  EXPECT_THAT(names_of_layer(policy.recompute, 1), ElementsAre("b", "c"));
  EXPECT_THAT(names_of_layer(policy.recompute, 2), ElementsAre("a", "b"));
}

}  // namespace
}  // namespace tessera
