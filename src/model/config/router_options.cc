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

/// Experts that are not all alike, or not all that a token has chosen.
void validate_choice(const MoeConfig& moe) {
  require(moe.top_p == 1 ||
              (moe.score == ScoreFunction::kSoftmax && moe.score_order == ScoreOrder::kBeforeTopK),
          "moe.top_p {} is a share of the scores of all experts; set moe.score = \"softmax\" and "
          "moe.score_order = \"before_top_k\", or moe.top_p = 1",
          moe.top_p);
  require(moe.router_outputs() <= kMaxExperts,
          "moe.num_experts {} and moe.zero_experts {} are {} together; at most {} are supported",
          moe.num_experts, moe.zero_experts, moe.router_outputs(), kMaxExperts);
  require(moe.zero_experts == 0 || (moe.num_groups == 1 && moe.balance_group_size == 1),
          "moe.zero_experts {} are in no group of experts; set moe.num_groups and "
          "moe.balance_group_size to 1",
          moe.zero_experts);
}

void validate_routing(const MoeConfig& moe) {
  if (moe.routing == Routing::kTopK) return;
  const char* name = moe.experts_choose() ? "expert_choice" : "sinkhorn";
  require(!moe.has_expert_bias(),
          "moe.routing = \"{}\" evens loads out by itself, and an expert bias would do so again; "
          "set moe.bias_update_speed = 0 and moe.expert_bias = false",
          name);
  require(moe.top_groups == moe.num_groups,
          "moe.routing = \"{}\" chooses among all experts, but moe.top_groups is {} of "
          "moe.num_groups {}; set both to 1",
          name, moe.top_groups, moe.num_groups);
}

/// What makes other probabilities, or choices that are not the best logits.
void validate_sparse_mixer(const MoeConfig& moe) {
  if (moe.sparse_mixer == 0) {
    require(!moe.draw_experts,
            "moe.draw_experts draws with the probabilities of moe.sparse_mixer, which is 0; "
            "Phi-3.5-MoE has 0.01");
    return;
  }
  const auto refuse = [](bool is_set, std::string_view key, std::string_view why) {
    require(!is_set, "moe.sparse_mixer with {}: {}", key, why);
  };
  refuse(moe.score != ScoreFunction::kSoftmax || moe.score_order != ScoreOrder::kBeforeTopK,
         "moe.score or moe.score_order",
         "probabilities are of softmaxes; set moe.score = \"softmax\" and moe.score_order = "
         "\"before_top_k\"");
  refuse(moe.normalize_top_k, "moe.normalize_top_k",
         "each choice has a softmax of its own; set moe.normalize_top_k = false");
  refuse(moe.score_scale != 1, "moe.score_scale", "probabilities are not scaled; leave it out");
  refuse(moe.routing != Routing::kTopK, "moe.routing",
         "a token takes the best logits that are left; set moe.routing = \"top_k\"");
  refuse(moe.has_expert_bias(), "moe.expert_bias or moe.bias_update_speed",
         "a choice that is not the best logit left would have a probability of 0; leave them out");
  refuse(moe.top_groups < moe.num_groups, "moe.top_groups",
         "a token chooses among all experts; set moe.top_groups and moe.num_groups to 1");
  refuse(moe.top_p < 1, "moe.top_p", "its probabilities are no shares of 1; set moe.top_p = 1");
  refuse(!moe.hash_layers.empty(), "moe.hash_layers",
         "tables give experts whatever their logits; leave one of them out");
}

/// What says how many experts a token has, or how many tokens an expert.
void validate_expert_choice(const MoeConfig& moe) {
  if (!moe.experts_choose()) return;
  const auto refuse = [](bool is_set, std::string_view key, std::string_view why) {
    require(!is_set, "moe.routing = \"expert_choice\" with {}: {}; leave it out", key, why);
  };
  refuse(moe.capacity_factor > 0, "moe.capacity_factor",
         "every expert takes tokens * top_k / num_experts tokens");
  refuse(moe.capacity_group_size > 1, "moe.capacity_group_size",
         "every expert takes as many tokens by itself");
  refuse(moe.top_p < 1, "moe.top_p", "no token chooses experts");
  refuse(moe.zero_experts > 0, "moe.zero_experts", "an expert that computes nothing has no load");
  refuse(moe.force_balanced, "moe.force_balanced", "loads are always even");
  require(moe.score_order == ScoreOrder::kBeforeTopK,
          "moe.routing = \"expert_choice\" compares the scores of all experts; set "
          "moe.score_order = \"before_top_k\"");
}

}  // namespace

void add_router_options(ConfigSchema& schema, MoeConfig& moe) {
  schema.add_enum("moe.score", &moe.score,
                  {{"softmax", ScoreFunction::kSoftmax},
                   {"sigmoid", ScoreFunction::kSigmoid},
                   {"sqrtsoftplus", ScoreFunction::kSqrtSoftplus}},
                  "Router scores; sqrtsoftplus: the root of ln(1 + e^logit), as in DeepSeek-V4");
  schema.add_enum(
      "moe.score_order", &moe.score_order,
      {{"before_top_k", ScoreOrder::kBeforeTopK}, {"after_top_k", ScoreOrder::kAfterTopK}},
      "Softmax over all experts before the choice, or over the chosen after it");
  schema.add("moe.normalize_top_k", &moe.normalize_top_k, "Scale the chosen scores to sum 1");
  schema.add("moe.score_scale", &moe.score_scale, "Factor on the probabilities", above(0));
  schema.add("moe.probs_on_input", &moe.probs_on_input,
             "Probabilities multiply what routed experts read instead of what they give, as in "
             "Llama 4");
  schema.add("moe.sparse_mixer", &moe.sparse_mixer,
             "eps of SparseMixer, as Phi-3.5-MoE has it (0.01): each choice's probability is of a "
             "softmax over the experts whose logits are within 2 eps of the best left; 0: off",
             {.min = 0, .max = 1, .max_open = true});
  schema.add("moe.draw_experts", &moe.draw_experts,
             "moe.sparse_mixer in training: experts are drawn with their probabilities");
  schema.add("moe.router_bias", &moe.router_bias, "A learnt bias of the router's logits");
  schema.add("moe.router_norm", &moe.router_norm,
             "The router reads the layer's state by an RMSNorm of its own, divided by the root of "
             "its width, instead of what experts read");
  schema.add("moe.expert_scale", &moe.expert_scale,
             "A learnt factor of each expert on its probabilities");
  schema.add_enum("moe.routing", &moe.routing,
                  {{"top_k", Routing::kTopK},
                   {"sinkhorn", Routing::kSinkhorn},
                   {"expert_choice", Routing::kExpertChoice}},
                  "How experts are chosen: the best of each token; in training after Sinkhorn's "
                  "iteration over the micro-batch has evened loads out; or each expert takes its "
                  "best tokens of the micro-batch, which cannot generate");
  schema.add("moe.hash_layers", &moe.hash_layers,
             "MoE layers, counted from 0, whose experts a fixed table of token ids gives, as the "
             "first of DeepSeek-V4; it is drawn from the seed, each expert as often, or loaded. "
             "They are not balanced",
             between(0, kMaxLayers - 1));
  schema.add("moe.top_p", &moe.top_p,
             "A token takes the fewest of its top_k experts whose scores reach this share of all; "
             "1: all top_k",
             {.min = 0, .max = 1, .min_open = true});
  schema.add("moe.zero_experts", &moe.zero_experts,
             "Experts beside num_experts that give tokens back without computing anything",
             between(0, kMaxExperts));
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
  require(!moe.jitter_experts || !(moe.router_norm || moe.separate_norms),
          "moe.jitter_experts lets experts read what the router reads, which {} makes another; "
          "leave one of them out",
          moe.router_norm ? "moe.router_norm" : "moe.separate_norms");
  validate_groups(moe);
  validate_choice(moe);
  validate_routing(moe);
  validate_expert_choice(moe);
  validate_sparse_mixer(moe);
}

void validate_hash_layers(const ModelConfig& config) {
  const MoeConfig& moe = config.moe;
  for (const int64_t layer : moe.hash_layers) {
    require(layer < config.num_layers,
            "moe.hash_layers lists layer {}; the last of the {} layers is {}", layer,
            config.num_layers, config.num_layers - 1);
    require(config.is_moe_layer(layer), "moe.hash_layers lists layer {}, which has no experts",
            layer);
  }
  if (moe.hash_layers.empty()) return;
  const auto refuse = [](bool is_set, std::string_view key, std::string_view why) {
    require(!is_set, "moe.hash_layers with {}: {}; leave one of them out", key, why);
  };
  refuse(moe.experts_choose(), "moe.routing = \"expert_choice\"",
         "the tables give tokens experts, and there experts choose");
  refuse(moe.zero_experts > 0, "moe.zero_experts", "the tables name experts that compute alone");
  refuse(moe.top_p < 1, "moe.top_p", "the tables give every token moe.top_k experts");
  refuse(moe.num_groups > 1, "moe.num_groups", "the tables know no groups of experts");
  refuse(config.mtp_layers > 0 && config.is_hash_layer(config.num_layers - 1), "model.mtp_layers",
         "layers of multi-token prediction are of the kind of the last layer, which is listed");
}

}  // namespace tessera
