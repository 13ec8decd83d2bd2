#include "model/run/saved_policy.h"

#include <gmock/gmock.h>

#include "core/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

OffloadPolicy policy_of(const std::vector<std::string>& texts) {
  return {.entries = parse_offload(texts)};
}

TEST(OffloadPolicy, ReadsNamesWithLayers) {
  const OffloadPolicy policy = policy_of({"q", "k@3", "v@0-2", "attn_norm.rstd@2-2"});
  EXPECT_THAT(names_of_layer(policy.entries, 0), ElementsAre("q", "v"));
  EXPECT_THAT(names_of_layer(policy.entries, 2), ElementsAre("attn_norm.rstd", "q", "v"));
  EXPECT_THAT(names_of_layer(policy.entries, 3), ElementsAre("k", "q"));
  EXPECT_EQ(policy.entries[0].to_string(), "q");
  EXPECT_EQ(policy.entries[1].to_string(), "k@3");
  EXPECT_EQ(policy.entries[2].to_string(), "v@0-2");
}

TEST(OffloadPolicy, AllCoversOtherNames) {
  const OffloadPolicy policy = policy_of({"q", "all@1-4"});
  EXPECT_THAT(names_of_layer(policy.entries, 0), ElementsAre("q"));
  EXPECT_THAT(names_of_layer(policy.entries, 1), ElementsAre("all"));
  EXPECT_THAT(names_of_layer(policy_of({"all@1-4"}).entries, 5), IsEmpty());
  EXPECT_THAT(names_of_layer({}, 0), IsEmpty());
}

TEST(OffloadPolicy, RefusesWhatIsNoEntry) {
  for (const char* text : {"", "@3", "q@", "q@-", "q@1-", "q@-1", "q@3-2", "q@x", "q@1 ", "q@1-2-3",
                           "q@99999999999999999999", "q@1.5"}) {
    EXPECT_THAT([&] { parse_offload({text}); },
                ThrowsMessage<UserError>(AllOf(HasSubstr(text), HasSubstr("all@0-5"))))
        << text;
  }
}

TEST(OffloadPolicy, RefusesWhatNoLayerKeeps) {
  const std::vector<std::set<std::string>> kept = {{"q", "mlp_act"}, {"q", "expert_act"}};
  const auto check = [&](const std::vector<std::string>& texts) {
    return [&kept, texts] { check_offload({.offload = policy_of(texts)}, kept); };
  };
  EXPECT_NO_THROW(check({"q", "mlp_act", "expert_act@1", "all@0-1"})());
  EXPECT_THAT(check({"expert_actt"}),
              ThrowsMessage<UserError>(AllOf(HasSubstr("did you mean 'expert_act'?"),
                                             HasSubstr("kept are expert_act, mlp_act, q"))));
  EXPECT_THAT(check({"expert_act@0"}), ThrowsMessage<UserError>(HasSubstr("no layer of these")));
  EXPECT_THAT(check({"all@1-2"}), ThrowsMessage<UserError>(HasSubstr("layers 0 to 1")));
  EXPECT_THAT(
      [&] {
        check_offload({parse_recompute({"q"}), policy_of({"q"})}, kept);
      },
      ThrowsMessage<UserError>(HasSubstr("both name 'q'")));
  EXPECT_NO_THROW(check_offload({parse_recompute({"all"}), policy_of({"all"})}, kept));
}

}  // namespace
}  // namespace tessera
