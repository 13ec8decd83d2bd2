#include "hf/config/hf_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/testing/case_share.h"
#include "hf/config/write_config.h"
#include "hf/testing.h"
#include "hf/testing/config_cases.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_with;
using testing::fixture_json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::parse_config;

/// What older versions of transformers wrote for the same model.
json to_old_spelling(json config) {
  json rope = config.at("rope_parameters");
  config.erase("rope_parameters");
  config["rope_theta"] = rope.at("rope_theta");
  if (rope.contains("partial_rotary_factor")) {
    config["partial_rotary_factor"] = rope.at("partial_rotary_factor");
    rope.erase("partial_rotary_factor");
  }
  rope.erase("rope_theta");
  const bool scaled = rope.at("rope_type") != "default";
  rope["type"] = rope.at("rope_type");
  rope.erase("rope_type");
  config["rope_scaling"] = scaled ? rope : json();
  if (config.contains("num_local_experts") && config.at("model_type") != "mixtral") {
    config["num_experts"] = config.at("num_local_experts");
    config.erase("num_local_experts");
  }
  config["torch_dtype"] = config.at("dtype");
  config.erase("dtype");
  return config;
}

TEST(HfConfig, ReadsTheOldSpellingOfEveryFixture) {
  for (const std::string& name : hf_fixtures()) {
    SCOPED_TRACE(name);
    const json config = fixture_json(name);
    if (!config.contains("rope_parameters")) continue;                // no rotation to spell
    if (!config["rope_parameters"].contains("rope_theta")) continue;  // never spelled so
    EXPECT_THAT(find_differences(parse_config(to_old_spelling(config)), parse_config(config)),
                IsEmpty());
  }
}

/// Whatever integer stands in a file: it is refused, or makes a model that a configuration of
/// Tessera can have too.
TEST(HfConfig, NoIntegerOfAnyKeyDoesHarm) {
  constexpr int64_t kOne = 1;
  for (const std::string& name : testing::share_of_cases(hf_fixtures(), 0)) {
    const json config = fixture_json(name);
    for (const auto& [key, value] : config.items()) {
      if (!value.is_number_integer()) continue;
      for (const int64_t number : {int64_t{0}, int64_t{-1}, kOne, kOne << 22, kOne << 31,
                                   kOne << 40, kOne << 62, std::numeric_limits<int64_t>::max()}) {
        SCOPED_TRACE(fmt::format("{}: {} = {}", name, key, number));
        json changed = config;
        changed[key] = number;
        try {
          ModelConfig model = parse_config(changed);
          ConfigSchema schema;
          EXPECT_NO_THROW(add_model_options(schema, model));
        } catch (const UserError&) {
          continue;
        }
      }
    }
  }
}

TEST(HfConfig, RopeParametersMayStandByTypeOfLayer) {
  json config = fixture_json("qwen3");
  const json rope = config.at("rope_parameters");
  config["rope_parameters"] = {{"full_attention", rope}, {"sliding_attention", rope}};
  EXPECT_THAT(find_differences(parse_config(config), parse_config(fixture_json("qwen3"))),
              IsEmpty());
  config["rope_parameters"]["sliding_attention"]["rope_theta"] = 5.0;
  EXPECT_THROW(parse_config(config), UserError);
}

TEST(HfConfig, MissingKeysHaveTheDefaultsOfTransformers) {
  const ModelConfig mixtral = parse_config({{"model_type", "mixtral"}});
  EXPECT_EQ(mixtral.rope.base, 1e6);
  EXPECT_EQ(mixtral.window, 0);
  EXPECT_EQ(mixtral.num_kv_heads, 8);
  EXPECT_EQ(mixtral.moe.balance_coefficient, 0);
  const ModelConfig glm = parse_config({{"model_type", "glm4_moe"}, {"head_dim", 128}});
  EXPECT_EQ(glm.rope.fraction, 0.5);
  EXPECT_EQ(glm.qk_norm, QkNorm::kNone);
  EXPECT_EQ(parse_config({{"model_type", "mistral"}}).window, 4096);
  EXPECT_EQ(parse_config({{"model_type", "qwen3"}}).head_size, 128);
  const ModelConfig oss = parse_config({{"model_type", "gpt_oss"}, {"num_hidden_layers", 4}});
  EXPECT_EQ(oss.rope.base, 150000);
  EXPECT_EQ(oss.rope.scaling, RopeScaling::kYarn);
  EXPECT_FALSE(oss.rope.truncate);
  EXPECT_THAT(oss.window_layers, ElementsAre(0, 2));
  EXPECT_TRUE(oss.attention_sinks && oss.qkv_bias && oss.output_bias);
  EXPECT_TRUE(oss.moe.mlp_bias && oss.moe.router_bias);
  const ModelConfig v3 = parse_config({{"model_type", "deepseek_v3"}});
  EXPECT_EQ(v3.latent.query_rank, 1536);
  EXPECT_EQ(v3.latent.norm_eps, 1e-6);
  EXPECT_EQ(v3.moe.first_dense_layers, 3);
  EXPECT_EQ(v3.moe.score_scale, 2.5);
  EXPECT_TRUE(v3.rope.interleaved);
}

TEST(HfConfig, SlidingWindowsFollowEachFamilysRule) {
  json config = fixture_json("qwen2_moe");
  config.erase("layer_types");
  config["sliding_window"] = 8;
  EXPECT_EQ(parse_config(config).window, 0) << "not switched on";
  config["use_sliding_window"] = true;
  config["max_window_layers"] = 3;
  EXPECT_THAT(parse_config(config).window_layers, ElementsAre(0, 2)) << "even layers";
  config["layer_types"] = {"full_attention", "sliding_attention", "full_attention"};
  EXPECT_THAT(parse_config(config).window_layers, ElementsAre(1));

  config = fixture_json("qwen3");
  config.erase("layer_types");
  config["use_sliding_window"] = true;
  config["sliding_window"] = 8;
  config["max_window_layers"] = 1;
  EXPECT_THAT(parse_config(config).window_layers, ElementsAre(1)) << "later layers";
  config["use_sliding_window"] = false;
  config["layer_types"] = {"full_attention", "sliding_attention"};
  EXPECT_THROW(parse_config(config), UserError) << "a layer without its window";

  config = fixture_json("dots1");
  config.erase("layer_types");
  EXPECT_THAT(parse_config(config).window_layers, ElementsAre(2)) << "the last, without a switch";
  config["sliding_window"] = nullptr;
  EXPECT_EQ(parse_config(config).window, 0);

  config = fixture_json("mixtral");
  config["sliding_window"] = 8;
  EXPECT_EQ(parse_config(config).window, 8);
  EXPECT_THAT(parse_config(config).window_layers, IsEmpty()) << "all layers";
}

TEST(HfConfig, DeepseekV2IgnoresWhatTransformersIgnores) {
  json config = fixture_json("deepseek_v2");
  config["norm_topk_prob"] = true;
  config["n_group"] = 4;
  config["topk_group"] = 2;
  const ImportedConfig greedy = parse_hf_config(config.dump(), "config.json");
  EXPECT_FALSE(greedy.model.moe.normalize_top_k);
  EXPECT_EQ(greedy.model.moe.num_groups, 1);
  EXPECT_THAT(greedy.notes, ElementsAre(HasSubstr("norm_topk_prob")));
  config["topk_method"] = "group_limited_greedy";
  EXPECT_EQ(parse_config(config).moe.num_groups, 4);
  EXPECT_EQ(parse_config(config).moe.group_score, GroupScore::kMax);
}

TEST(HfConfig, ErnieHasExpertsInARangeOfLayers) {
  json config = fixture_json("ernie4_5_moe");
  EXPECT_EQ(parse_config(config).moe.first_dense_layers, 1);
  EXPECT_THAT(parse_config(config).moe.dense_layers, ElementsAre(3));
  config["moe_layer_end_index"] = -1;
  EXPECT_THAT(parse_config(config).moe.dense_layers, IsEmpty()) << "to the last layer";
  config["moe_layer_start_index"] = 0;
  config["moe_layer_interval"] = 2;
  EXPECT_EQ(parse_config(config).num_moe_layers(), 2) << "counted from the first layer of all";
  EXPECT_TRUE(parse_config(config).is_moe_layer(1) && parse_config(config).is_moe_layer(3));
  config["moe_num_shared_experts"] = 0;
  EXPECT_EQ(parse_config(config).moe.shared_inner_size, 0);
}

TEST(HfConfig, DenseLayersMayBeListed) {
  json config = fixture_json("glm4_moe_lite");
  EXPECT_EQ(parse_config(config).moe.first_dense_layers, 1);
  EXPECT_THAT(parse_config(config).moe.dense_layers, ElementsAre(2));
  config.erase("mlp_layer_types");
  EXPECT_EQ(parse_config(config).num_moe_layers(), 2) << "all but the first";
}

TEST(HfConfig, HunyuanListsOneNumberForEachLayer) {
  json config = fixture_json("hunyuan_v1_moe");
  const ModelConfig model = parse_config(config);
  EXPECT_EQ(model.moe.shared_inner_size, model.moe.inner_size);
  EXPECT_TRUE(model.norm_after_rotation);
  config["moe_topk"] = {2, 2};
  config["num_experts"] = {6, 6};
  EXPECT_THAT(find_differences(parse_config(config), model), IsEmpty());
  EXPECT_THAT(error_with("hunyuan_v1_moe", "moe_topk", {2, 1}), HasSubstr("'moe_topk'"));
}

TEST(HfConfig, HunyuansAlphaStretchesTheBase) {
  json config = fixture_json("hunyuan_v1_moe");
  EXPECT_NEAR(parse_config(config).rope.base, 10000 * std::pow(50.0, 12.0 / 10.0), 1e-6);
  EXPECT_EQ(parse_config(config).rope.scaling, RopeScaling::kNone);
  config["rope_parameters"] = {{"rope_type", "dynamic"}, {"factor", 2.0}};
  EXPECT_EQ(parse_config(config).rope.scaling, RopeScaling::kDynamic) << "without an alpha";
  EXPECT_THAT(error_with("llama", "rope_scaling", {{"type", "dynamic"}, {"alpha", 50.0}}),
              HasSubstr("'alpha' is not supported"));
}

TEST(HfConfig, RotaryDimIsAPartOfTheHead) {
  json config = fixture_json("minimax_m2");
  EXPECT_EQ(parse_config(config).rope.fraction, 0.5);
  config["rope_parameters"].erase("partial_rotary_factor");
  EXPECT_EQ(parse_config(config).rope.fraction, 1.0);
  config["rotary_dim"] = 4;
  EXPECT_EQ(parse_config(config).rotary_dim(), 4);
  config["rotary_dim"] = 16;
  EXPECT_THROW(parse_config(config), UserError) << "of heads of 12";
}

TEST(HfConfig, GranitesMultipliers) {
  const ModelConfig model = parse_config(fixture_json("granitemoe"));
  EXPECT_EQ(model.embedding_multiplier, 12);
  EXPECT_EQ(model.residual_multiplier, 0.22);
  EXPECT_EQ(model.attention_multiplier, 0.2);
  EXPECT_EQ(model.logits_divisor, 6);
  EXPECT_EQ(parse_config({{"model_type", "granitemoe"}}).attention_multiplier, 1) << "by default";
  ModelConfig plain = model;
  plain.attention_multiplier = 0;
  EXPECT_THAT(inexpressible(find_family("granitemoe"), plain), IsEmpty());
  EXPECT_THAT(inexpressible(find_family("mixtral"), model), Not(IsEmpty()));
  EXPECT_THAT(error_with("granitemoe", "logits_scaling", 0.0), HasSubstr("'logits_scaling'"));
  EXPECT_THAT(error_with("granitemoe", "embedding_multiplier", 1e9), HasSubstr("from 1e-06 to"));
}

TEST(HfConfig, YarnWithoutLengthsTakesThemFromTheContext) {
  json config = fixture_json("qwen3_moe_yarn");
  config["rope_parameters"] = {{"rope_type", "yarn"}, {"factor", 4.0}};
  EXPECT_EQ(parse_config(config).rope.original_length, 256);
  EXPECT_EQ(parse_config(config).rope.base, 10000.0);
  config["rope_parameters"] = {{"rope_type", "yarn"},
                               {"factor", nullptr},
                               {"original_max_position_embeddings", 64},
                               {"beta_fast", 0}};
  EXPECT_EQ(parse_config(config).rope.factor, 4.0);
  EXPECT_EQ(parse_config(config).rope.beta_fast, 32.0) << "0 is 'not given' in transformers";
  config["original_max_position_embeddings"] = 32;
  EXPECT_EQ(parse_config(config).rope.original_length, 32);
}

TEST(HfConfig, BalanceIsThatOfAllLayersTogether) {
  const ModelConfig model = parse_config(fixture_json("qwen3_moe"));
  EXPECT_EQ(model.moe.balance_scope, BalanceTokens::kModel);
  EXPECT_DOUBLE_EQ(model.moe.balance_coefficient, 0.01 * 4);
}

TEST(HfConfig, JitterIsReadAndWritten) {
  for (const char* family : {"mixtral", "minimax_m2"}) {
    json config = fixture_json(family);
    EXPECT_EQ(parse_config(config).moe.router_jitter, 0);
    config["router_jitter_noise"] = 0.01;
    const ModelConfig model = parse_config(config);
    EXPECT_DOUBLE_EQ(model.moe.router_jitter, 0.01);
    EXPECT_TRUE(model.moe.jitter_experts) << "transformers jitters what experts read, too";
    const std::string written = write_hf_config(find_family(family), model, DType::kF32, 64);
    EXPECT_DOUBLE_EQ(parse_config(json::parse(written)).moe.router_jitter, 0.01);
  }
}

TEST(HfConfigRefusal, NamesUnknownKeys) {
  EXPECT_THAT(error_with("llama", "attention_multiplier", 2.0),
              AllOf(HasSubstr("'attention_multiplier' is unknown"), HasSubstr("'llama'")));
  EXPECT_THAT(error_with("llama", "rms_norm_epz", 2.0), HasSubstr("did you mean 'rms_norm_eps'"));
}

TEST(HfConfigRefusal, NamesKeysByTheFamilysSpelling) {
  EXPECT_THAT(error_with("ernie4_5_moe", "moe_k", 0), HasSubstr("'moe_k'"));
  EXPECT_THAT(error_with("ernie4_5_moe", "moe_num_experts", "a"), HasSubstr("'moe_num_experts'"));
  EXPECT_THAT(error_with("hy_v3", "router_scaling_factor", "a"),
              HasSubstr("'router_scaling_factor'"));
  EXPECT_THAT(error_with("hy_v3", "n_shared_experts", 1),
              HasSubstr("'n_shared_experts' is unknown"));
  EXPECT_THAT(error_with("ernie4_5_moe", "num_experts", 4), HasSubstr("differ"));
}

TEST(HfConfig, Qwen3NextHasGatedDeltaNetWhereItSaysSo) {
  json config = fixture_json("qwen3_next");
  EXPECT_THAT(parse_config(config).delta_layers, ElementsAre(0, 2)) << "listed";
  config.erase("layer_types");
  config["full_attention_interval"] = 3;
  EXPECT_THAT(parse_config(config).delta_layers, ElementsAre(0, 1)) << "all but every third";
  config.erase("full_attention_interval");
  EXPECT_THAT(parse_config(config).delta_layers, ElementsAre(0, 1, 2)) << "all but every fourth";
}

/// Qwen3.5 as it is published, with encoders of images.
json whole_config() {
  json text = fixture_json("qwen3_5_moe_text");
  text.erase("architectures");
  text["mtp_num_hidden_layers"] = 1;
  text["attn_output_gate"] = true;
  return {{"model_type", "qwen3_5_moe"}, {"architectures", {"Qwen3_5MoeForConditionalGeneration"}},
          {"image_token_id", 60},        {"vision_config", {{"depth", 27}}},
          {"tie_word_embeddings", true}, {"text_config", text}};
}

TEST(HfConfig, OfAModelWithEncodersTheTextPartIsRead) {
  const ImportedConfig whole = parse_hf_config(whole_config().dump(), "config.json");
  EXPECT_TRUE(whole.of_whole);
  const ImportedConfig text =
      parse_hf_config(fixture_json("qwen3_5_moe_text").dump(), "config.json");
  EXPECT_FALSE(text.of_whole);
  EXPECT_EQ(whole.family, text.family);
  EXPECT_THAT(find_differences(whole.model, text.model), ElementsAre());
  EXPECT_THAT(find_differences(parse_hf_config(whole.json, "config.json").model, text.model),
              ElementsAre());
  json untied = whole_config();
  untied.erase("tie_word_embeddings");
  EXPECT_FALSE(parse_config(untied).tie_embeddings);
}

TEST(HfConfigRefusal, NamesWhatAModelWithEncodersMayNotSay) {
  const auto error = [](const json& config) -> std::string {
    try {
      parse_config(config);
    } catch (const UserError& found) {
      return found.what();
    }
    return "no error";
  };
  json config = whole_config();
  config["audio_config"] = json::object();
  EXPECT_THAT(error(config), HasSubstr("audio_config"));
  config = whole_config();
  config.erase("text_config");
  EXPECT_THAT(error(config), HasSubstr("text_config"));
  config["text_config"] = 3;
  EXPECT_THAT(error(config), HasSubstr("must be an object"));
  config = whole_config();
  config["text_config"]["model_type"] = "qwen3_5_text";
  EXPECT_THAT(error(config), HasSubstr("expected \"qwen3_5_moe_text\""));
  config = whole_config();
  config["text_config"]["attn_output_gate"] = false;
  EXPECT_THAT(error(config), HasSubstr("attn_output_gate"));
  config = whole_config();
  config["architectures"] = {"Qwen3_5MoeForCausalLM"};
  EXPECT_THAT(error(config), HasSubstr("Qwen3_5MoeForConditionalGeneration"));
}

TEST(HfConfig, GraniteHybridsHaveMambaWhereTheySaySo) {
  json config = fixture_json("granitemoehybrid");
  EXPECT_THAT(parse_config(config).mamba_layers, ElementsAre(0, 2));
  EXPECT_EQ(parse_config(config).rotary_dim(), 0);
  config["layer_types"] = {"attention", "mamba", "attention"};
  config["position_embedding_type"] = "rope";
  EXPECT_THAT(parse_config(config).mamba_layers, ElementsAre(1)) << "the published names";
  EXPECT_EQ(parse_config(config).rotary_dim(), 8);
  config.erase("layer_types");
  EXPECT_THAT(parse_config(config).mamba_layers, ElementsAre(0, 1, 2));
  config["time_step_limit"] = json::array({0.0, {{"__float__", "Infinity"}}});
  EXPECT_EQ(parse_config(config).mamba.max_step, 0);
}

TEST(HfConfig, NemotronsLayersAreListedOrSpelled) {
  json config = fixture_json("nemotron_h");
  const ModelConfig listed = parse_config(config);
  EXPECT_THAT(listed.mamba_layers, ElementsAre(0, 4));
  EXPECT_THAT(listed.layers_without_mixer, ElementsAre(1, 3, 5));
  EXPECT_EQ(listed.num_moe_layers(), 2);
  config.erase("layers_block_type");
  config["hybrid_override_pattern"] = "ME*-ME";
  config["num_hidden_layers"] = 6;
  EXPECT_THAT(find_differences(parse_config(config), listed), IsEmpty());
}

TEST(HfConfigRefusal, NamesWhatIsNotSupportedOfHybrids) {
  EXPECT_THAT(error_with("granitemoehybrid", "layer_types", {"mamba", "mamba", "conv"}),
              HasSubstr("supported are mamba and attention"));
  EXPECT_THAT(error_with("granitemoehybrid", "mamba_d_head", 3),
              HasSubstr("mamba_n_heads 4 of 3 make 12, and mamba_expand times hidden_size is 32"));
  EXPECT_THAT(error_with("granitemoehybrid", "position_embedding_type", "alibi"),
              HasSubstr("supported are rope, nope and null"));
  EXPECT_THAT(error_with("granitemoehybrid", "time_step_limit", {0.0, 0.0}),
              HasSubstr("leaves no step above 0"));
  EXPECT_THAT(error_with("nemotron_h", "num_hidden_layers", 5), HasSubstr("6 layers are listed"));
  EXPECT_THAT(error_with("nemotron_h", "mlp_hidden_act", "silu"),
              HasSubstr("'mlp_hidden_act' is 'silu'; supported are relu2"));
  EXPECT_THAT(error_with("nemotron_h", "rms_norm_eps", 1e-5),
              HasSubstr("did you mean 'layer_norm_epsilon'?"));
  EXPECT_THAT(error_with("nemotron_h_latent", "mlp_bias", true), HasSubstr("moe_latent_size"));
}

TEST(HfConfigRefusal, NamesValuesThatChangeTheResult) {
  EXPECT_THAT(error_with("qwen3_next", "layer_types",
                         {"full_attention", "sliding_attention", "full_attention"}),
              HasSubstr("supported are full_attention and linear_attention"));
  EXPECT_THAT(error_with("qwen3_next", "hidden_act", "gelu"), HasSubstr("only silu is supported"));
  EXPECT_THAT(error_with("dots1", "scoring_func", "softmax"),
              HasSubstr(R"(only ["sigmoid","noaux_tc"] is supported)"));
  EXPECT_THAT(error_with("dots1", "scoring_func", "noaux_tc"), "no error");
  EXPECT_THAT(error_with("ernie4_5_moe", "use_bias", true), HasSubstr("'use_bias' is 'true'"));
  EXPECT_THAT(error_with("minimax_m2", "output_router_logits", true), HasSubstr("router_logits"));
  EXPECT_THAT(error_with("glm4_moe_lite", "mlp_layer_types", {"dense", "dense", "moe"}),
              HasSubstr("mlp_layer_types"));
  EXPECT_THAT(error_with("glm4_moe_lite", "first_k_dense_replace", 2), HasSubstr("first_k_dense"));
  EXPECT_THAT(error_with("olmoe", "clip_qkv", 8.0), HasSubstr("'clip_qkv' is '8.0'"));
  EXPECT_THAT(error_with("llama", "attention_dropout", 0.1), HasSubstr("'attention_dropout'"));
  EXPECT_THAT(error_with("mixtral", "router_jitter_noise", 1.5), HasSubstr("router_jitter_noise"));
  EXPECT_THAT(error_with("llama", "router_jitter_noise", 0.1), HasSubstr("router_jitter_noise"));
  EXPECT_THAT(error_with("llama", "hidden_act", "relu"), HasSubstr("'hidden_act' is 'relu'"));
  EXPECT_THAT(error_with("deepseek_v3", "scoring_func", "softmax"), HasSubstr("scoring_func"));
  EXPECT_THAT(error_with("deepseek_v3", "moe_layer_freq", 2), HasSubstr("moe_layer_freq"));
  EXPECT_THAT(error_with("deepseek_v2", "topk_method", "noaux_tc"), HasSubstr("topk_method"));
  EXPECT_THAT(error_with("llama", "partial_rotary_factor", 0.5),
              HasSubstr("partial_rotary_factor"));
  EXPECT_THAT(error_with("llama", "sliding_window", 64), HasSubstr("sliding_window"));
  EXPECT_THAT(error_with("deepseek_v3", "quantization_config", {{"quant_method", "fp8"}}),
              HasSubstr("expected two sizes, such as [128, 128]"));
  EXPECT_THAT(error_with("llama", "architectures", {"LlamaForSequenceClassification"}),
              HasSubstr("LlamaForSequenceClassification"));
  EXPECT_THAT(error_with("llama", "model_type", "lama"), HasSubstr("did you mean 'llama'"));
}

TEST(HfConfigRefusal, NamesRopeThatIsNotSupported) {
  EXPECT_THAT(error_with("llama", "rope_scaling", {{"type", "longrope"}}), HasSubstr("'longrope'"));
  EXPECT_THAT(error_with("llama", "rope_scaling", {{"type", "linear"}, {"factorr", 2}}),
              HasSubstr("did you mean 'factor'"));
  EXPECT_THAT(error_with("llama", "rope_scaling", {{"type", "linear"}}),
              HasSubstr("'factor' must be a number"));
  EXPECT_THAT(error_with("llama", "rope_scaling", {{"type", "linear"}, {"factor", 0.5}}),
              HasSubstr("'factor' must be at least 1"));
  EXPECT_THAT(error_with("deepseek_v3", "rope_scaling",
                         {{"type", "linear"}, {"factor", 2}, {"mscale_all_dim", 1.0}}),
              HasSubstr("mscale_all_dim"));
  EXPECT_THAT(error_with("llama", "rope_scaling", "yarn"), HasSubstr("must be an object"));
}

TEST(HfConfigRefusal, NamesNumbersThatFitNoModel) {
  EXPECT_THAT(error_with("llama", "hidden_size", -1), HasSubstr("'hidden_size'"));
  EXPECT_THAT(error_with("llama", "hidden_size", 32.5), HasSubstr("'hidden_size'"));
  EXPECT_THAT(error_with("llama", "vocab_size", 1e300), HasSubstr("'vocab_size'"));
  EXPECT_THAT(error_with("llama", "num_hidden_layers", 2000000000), HasSubstr("num_hidden_layers"));
  EXPECT_THAT(error_with("mixtral", "num_local_experts", 2000000000),
              HasSubstr("num_local_experts"));
  EXPECT_THAT(error_with("mixtral", "num_experts", 4), HasSubstr("differ"));
  EXPECT_THAT(error_with("mixtral", "num_experts_per_tok", 9), HasSubstr("top_k 9"));
  EXPECT_THAT(error_with("llama", "num_key_value_heads", 3), HasSubstr("num_kv_heads 3"));
  EXPECT_THAT(error_with("deepseek_v3", "num_key_value_heads", 2),
              HasSubstr("num_key_value_heads"));
  EXPECT_THAT(error_with("deepseek_v3", "head_dim", 64), HasSubstr("'head_dim' is 64"));
  EXPECT_THAT(error_with("llama", "rms_norm_eps", 0), HasSubstr("'rms_norm_eps'"));
  EXPECT_THAT(error_with("qwen3", "layer_types", {"full_attention"}), HasSubstr("each of the 2"));
  EXPECT_THAT(error_with("qwen2_moe", "mlp_only_layers", {"a"}), HasSubstr("mlp_only_layers"));
  EXPECT_THAT(error_with("deepseek_v2", "n_shared_experts", 0), HasSubstr("n_shared_experts"));
}

TEST(HfConfigRefusal, TextThatIsNoConfiguration) {
  for (const char* text : {"", "[]", "{}", "{\"model_type\": 3}", "{\"model_type\": \"llama\"",
                           "{\"model_type\": \"llama\", \"model_type\": \"llama\"}", "null"}) {
    EXPECT_THROW(parse_hf_config(text, "config.json"), UserError) << text;
  }
}

}  // namespace
}  // namespace tessera
