#include "model/config/router_options.h"

#include "core/error.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

void validate_groups(const MoeConfig& moe) {
  require(moe.num_experts % moe.num_groups == 0,
          "moe.num_experts {} is not divisible by moe.num_groups {}", moe.num_experts,
          moe.num_groups);
  require(moe.top_groups <= moe.num_groups, "moe.top_groups {} exceeds moe.num_groups {}",
          moe.top_groups, moe.num_groups);
  const int64_t reachable = moe.num_experts / moe.num_groups * moe.top_groups;
  require(moe.top_k <= reachable,
          "moe.top_k {} exceeds the {} experts of the {} groups that a token may choose from",
          moe.top_k, reachable, moe.top_groups);
}

}  // namespace

void add_router_options(ConfigSchema& schema, MoeConfig& moe) {
  schema.add_enum("moe.score", &moe.score,
                  {{"softmax", ScoreFunction::kSoftmax}, {"sigmoid", ScoreFunction::kSigmoid}},
                  "Router scores");
  schema.add_enum(
      "moe.score_order", &moe.score_order,
      {{"before_top_k", ScoreOrder::kBeforeTopK}, {"after_top_k", ScoreOrder::kAfterTopK}},
      "Softmax over all experts before the choice, or over the chosen after it");
  schema.add("moe.normalize_top_k", &moe.normalize_top_k, "Scale the chosen scores to sum 1");
  schema.add("moe.score_scale", &moe.score_scale, "Factor on the probabilities", above(0));
  schema.add("moe.router_bias", &moe.router_bias, "A learnt bias of the router's logits");
  schema.add("moe.num_groups", &moe.num_groups,
             "Groups of experts for group-limited choice; 1: none", between(1, kMaxExperts));
  schema.add("moe.top_groups", &moe.top_groups, "Groups that a token may choose from",
             between(1, kMaxExperts));
  schema.add_enum(
      "moe.group_score", &moe.group_score,
      {{"max", GroupScore::kMax}, {"top_two_sum", GroupScore::kTopTwoSum}},
      "Score of a group: its best expert (DeepSeek-V2) or the sum of its best two (V3)");
  schema.add("moe.force_balanced", &moe.force_balanced,
             "Route round-robin, for measuring with perfect balance");
  schema.add("moe.router_jitter", &moe.router_jitter,
             "In training, routers read tokens times random factors from 1 - this to 1 + this; 0: "
             "off",
             from_below(0, 1));
  schema.add("moe.jitter_experts", &moe.jitter_experts,
             "With moe.router_jitter, routed experts read the jittered tokens too, as in Hugging "
             "Face's Mixtral");
  schema.add("moe.balance_coefficient", &moe.balance_coefficient,
             "Weight of the load-balancing loss", at_least(0));
  schema.add_enum("moe.balance_scope", &moe.balance_scope,
                  {{"micro_batch", BalanceTokens::kMicroBatch},
                   {"sequence", BalanceTokens::kSequence},
                   {"global_batch", BalanceTokens::kGlobalBatch},
                   {"model", BalanceTokens::kModel}},
                  "Tokens over which balance is asked for; model: of all layers together, as "
                  "Hugging Face's models do");
  schema.add("moe.z_loss_coefficient", &moe.z_loss_coefficient, "Weight of the router's z-loss",
             at_least(0));
  schema.add("moe.bias_update_speed", &moe.bias_update_speed,
             "Balancing without a loss: change of the expert bias a step; 0: off", at_least(0));
  schema.add("moe.expert_bias", &moe.expert_bias,
             "An expert bias even where nothing moves it, as in a loaded model");
}

void validate_router(const MoeConfig& moe) {
  require(moe.score_order == ScoreOrder::kBeforeTopK || moe.score == ScoreFunction::kSoftmax,
          "moe.score_order = \"after_top_k\" needs moe.score = \"softmax\"");
  require(!moe.jitter_experts || moe.router_jitter > 0,
          "moe.jitter_experts needs a moe.router_jitter above 0; Switch Transformers have 0.01");
  validate_groups(moe);
}

}  // namespace tessera
