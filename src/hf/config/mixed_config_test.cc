#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "hf/config/hf_config.h"
#include "hf/config/write_config.h"
#include "hf/testing/config_cases.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::Contains;
using ::testing::ElementsAre;
using testing::error_of;
using testing::error_with;
using testing::fixture_json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::parse_config;
using ::testing::ThrowsMessage;

TEST(MixedConfig, ExaoneRotatesWindowsAlone) {
  json config = fixture_json("exaone_moe");
  ModelConfig model = parse_config(config);
  EXPECT_THAT(model.window_layers, ElementsAre(0, 2));
  EXPECT_TRUE(model.own_window_rope);
  EXPECT_EQ(model.rope.fraction, 0);
  EXPECT_EQ(model.window_rope.base, 500);
  EXPECT_THAT(model.moe.dense_layers, ElementsAre(1));
  config.erase("layer_types");
  EXPECT_EQ(parse_config(config).window_layers.size(), 0) << "the first four of a pattern";
  EXPECT_EQ(parse_config(config).rope.base, 500) << "all layers have a window";
  config["sliding_window_pattern"] = 2;
  config.erase("mlp_layer_types");
  EXPECT_THAT(parse_config(config).window_layers, ElementsAre(0, 2));
  EXPECT_EQ(parse_config(config).moe.first_dense_layers, 1);
  config["sliding_window_pattern"] = "LLG";
  EXPECT_THAT(error_of(config), HasSubstr("sliding_window_pattern"))
      << "transformers' arithmetic fails there too";
  config["layer_types"] = {"full_attention", "full_attention", "full_attention"};
  EXPECT_EQ(parse_config(config).rotary_dim(), 0) << "there is a window, though no layer has it";
  config["sliding_window"] = nullptr;
  EXPECT_EQ(parse_config(config).rotary_dim(), 12);
}

TEST(MixedConfig, RopeParametersAreByTypeOfLayer) {
  json config = fixture_json("mellum");
  const ModelConfig model = parse_config(config);
  EXPECT_THAT(model.window_layers, ElementsAre(1));
  EXPECT_EQ(model.rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(model.window_rope.base, 100);
  config["layer_types"] = {"sliding_attention", "sliding_attention", "sliding_attention"};
  config["rope_parameters"].erase("full_attention");
  EXPECT_EQ(parse_config(config).rope.base, 100) << "the type that no layer has may be missing";
  config["layer_types"] = {"sliding_attention", "sliding_attention", "full_attention"};
  EXPECT_THAT(error_of(config), HasSubstr("full_attention is missing"));
  config = fixture_json("mellum");
  config["rope_parameters"]["full_attention"]["truncate"] = false;
  EXPECT_THAT(error_of(config), HasSubstr("'truncate' is false"));
  config = fixture_json("mellum");
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 10.0}};
  EXPECT_THAT(error_of(config), HasSubstr("an object for each type of layer"));
  config = fixture_json("mellum");
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  EXPECT_THAT(error_of(config), HasSubstr("'rope_scaling' is not read by transformers"));
  config = fixture_json("mellum");
  config["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 0.5;
  EXPECT_THAT(error_of(config), HasSubstr("partial_rotary_factor"));
  EXPECT_EQ(parse_config({{"model_type", "mellum"}}).rope.base, 500000) << "the default";
}

TEST(MixedConfig, HeadsMayDependOnTheWindow) {
  json config = fixture_json("laguna");
  const ModelConfig model = parse_config(config);
  EXPECT_EQ(model.num_heads, 4);
  EXPECT_EQ(model.window_heads, 6);
  EXPECT_EQ(model.gate_function, AttentionGate::kSoftplusOfHeads);
  config["num_attention_heads_per_layer"] = {4, 6, 8};
  EXPECT_THAT(error_of(config), HasSubstr("6 and 8 heads in layers of one type"));
  config["num_attention_heads_per_layer"] = {4, 6};
  EXPECT_THAT(error_of(config), HasSubstr("one number for each of the 3 layers"));
  config = fixture_json("laguna");
  config["gating"] = false;
  EXPECT_THAT(error_of(config), HasSubstr("gating"));
  config["gating"] = "per-element";
  EXPECT_EQ(parse_config(config).gate_function, AttentionGate::kSoftplus);
  config["moe_router_logit_softcapping"] = 30.0;
  EXPECT_THAT(error_of(config), HasSubstr("moe_router_logit_softcapping"));
  config = fixture_json("laguna");
  config["attention_bias"] = true;
  EXPECT_THAT(error_of(config), HasSubstr("attention_bias"));
}

TEST(MixedConfig, MimosWindowsHaveTwiceTheKeyHeads) {
  const json config = fixture_json("mimo_v2_flash");
  const ModelConfig model = parse_config(config);
  EXPECT_EQ(model.num_kv_heads, 2);
  EXPECT_EQ(model.window_kv_heads, 4);
  EXPECT_TRUE(model.window_sinks && !model.attention_sinks);
  EXPECT_EQ(model.value_size, 10);
  EXPECT_EQ(model.value_multiplier, 0.707);
  json changed = config;
  changed["attention_value_scale"] = nullptr;
  changed["routed_scaling_factor"] = nullptr;
  EXPECT_EQ(parse_config(changed).value_multiplier, 1);
  EXPECT_EQ(parse_config(changed).moe.score_scale, 1);
  changed["layer_types"] = {"full_attention", "full_attention", "full_attention"};
  EXPECT_EQ(parse_config(changed).window_kv_heads, 0);
  changed["rope_parameters"]["full_attention"] = {
      {"rope_type", "linear"}, {"rope_theta", 10.0}, {"factor", 2.0}};
  EXPECT_THAT(error_of(changed), HasSubstr("'partial_rotary_factor' is missing"));
  const ModelConfig published = parse_config({{"model_type", "mimo_v2_flash"}});
  EXPECT_EQ(published.window_layers.size(), 39);
  EXPECT_EQ(published.rotary_dim(), 64);
}

TEST(MixedConfig, EqualRotationsAreOne) {
  json config = fixture_json("mellum");
  config["rope_parameters"]["sliding_attention"] = config["rope_parameters"]["full_attention"];
  EXPECT_FALSE(parse_config(config).own_window_rope);
  EXPECT_THAT(inexpressible(find_family("mellum"), parse_config(config)), IsEmpty());
}

TEST(MixedConfig, ConvolutionsStandWhereLayerTypesSay) {
  json config = fixture_json("lfm2_moe");
  const ModelConfig model = parse_config(config);
  EXPECT_THAT(model.conv_layers, ElementsAre(0, 2, 3));
  EXPECT_TRUE(model.moe.expert_bias);
  EXPECT_EQ(model.norm_eps, 1e-3);
  config["layer_types"][0] = "sliding_attention";
  EXPECT_THAT(error_of(config), HasSubstr("supported are full_attention and conv"));
  config.erase("layer_types");
  EXPECT_THAT(error_of(config), HasSubstr("layer_types"));
  config = fixture_json("lfm2_moe");
  config["tie_embedding"] = false;
  EXPECT_FALSE(parse_config(config).tie_embeddings) << "the published name, which comes first";
  config["use_expert_bias"] = false;
  EXPECT_FALSE(parse_config(config).moe.expert_bias);
  config["hidden_act"] = "gelu";
  EXPECT_THAT(error_of(config), HasSubstr("only silu"));
}

TEST(MixedConfig, KimiDeltaAttentionStandsWhereEitherSpellingSays) {
  json config = fixture_json("kimi_linear");
  const ModelConfig model = parse_config(config);
  EXPECT_THAT(model.delta_layers, ElementsAre(0, 1, 3));
  EXPECT_TRUE(model.delta.is_kimi());
  EXPECT_EQ(model.rotary_dim(), 0);
  config["linear_attn_config"] = {{"head_dim", 6},
                                  {"num_heads", 4},
                                  {"short_conv_kernel_size", 3},
                                  {"kda_layers", {1, 2, 4}},
                                  {"full_attn_layers", {3}}};
  EXPECT_THAT(find_differences(parse_config(config), model), IsEmpty());
  for (const char* key :
       {"layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"})
    config.erase(key);
  EXPECT_THAT(find_differences(parse_config(config), model), IsEmpty()) << "as it is published";
  config["linear_attn_config"]["kda_layers"] = {1, 2, 3, 4};
  EXPECT_THAT(error_of(config), HasSubstr("layer 3 must be in one of"));
  config["linear_attn_config"]["kda_layers"] = {1, 2, 5};
  EXPECT_THAT(error_of(config), HasSubstr("lists layer 5; layers are counted from 1 to 4"));
  config["linear_attn_config"].erase("kda_layers");
  EXPECT_THAT(parse_config(config).delta_layers, ElementsAre(0, 1, 2, 3)) << "all but every fourth";
  config["linear_attn_config"]["extra"] = 1;
  EXPECT_THAT(error_of(config), HasSubstr("extra"));
}

TEST(MixedConfig, KimiLinearIsReadAsItIsPublished) {
  const ModelConfig model = parse_config({{"model_type", "kimi_linear"},
                                          {"head_dim", 72},
                                          {"mla_use_nope", true},
                                          {"rope_theta", 10000.0},
                                          {"num_expert_group", 1},
                                          {"moe_renormalize", true},
                                          {"use_grouped_topk", true}});
  EXPECT_EQ(model.num_layers, 27);
  EXPECT_THAT(model.delta_layers, Not(Contains(4)));
  EXPECT_NEAR(static_cast<double>(count_parameters(model).total), 49.1e9, 0.2e9);
  EXPECT_THAT(error_with("kimi_linear", "mla_use_nope", false), HasSubstr("mla_use_nope"));
}

TEST(MixedConfig, AfmoeRotatesInWindowsAlone) {
  json config = fixture_json("afmoe");
  const ModelConfig model = parse_config(config);
  EXPECT_THAT(model.window_layers, ElementsAre(0, 1, 3));
  EXPECT_EQ(model.rotary_dim(), 0);
  EXPECT_EQ(model.of_layer({.window = true}).rotary_dim(), 12);
  EXPECT_TRUE(model.post_norms && model.attention_gate);
  EXPECT_NEAR(model.embedding_multiplier, std::sqrt(32.0), 1e-12);
  config.erase("layer_types");
  EXPECT_THAT(parse_config(config).window_layers, ElementsAre(0, 1, 3)) << "all but every third";
  config["mup_enabled"] = false;
  EXPECT_EQ(parse_config(config).embedding_multiplier, 1);
  config["sliding_window"] = nullptr;
  EXPECT_THAT(error_of(config), HasSubstr("'sliding_window' is null"));
  EXPECT_THAT(error_with("afmoe", "attention_bias", true), HasSubstr("attention_bias"));
}

TEST(MixedConfig, GraniteHasABaseForEachLayer) {
  json config = fixture_json("granitemoe_swa");
  const ModelConfig model = parse_config(config);
  EXPECT_THAT(model.window_layers, ElementsAre(1, 2));
  EXPECT_EQ(model.rope.fraction, 0);
  EXPECT_EQ(model.window_rope.base, 500);
  EXPECT_EQ(model.window_rope.scaling, RopeScaling::kLinear);
  config["layer_rope_theta"] = {7, 0, 0};
  EXPECT_EQ(parse_config(config).rope.base, 7);
  EXPECT_EQ(parse_config(config).window_rope.fraction, 0);
  EXPECT_THAT(inexpressible(find_family("granitemoe_swa"), parse_config(config)), IsEmpty());
  config["layer_rope_theta"] = {7, 0, 5};
  EXPECT_THAT(error_of(config), HasSubstr("0 and 5 in layers of one type"));
  config["layer_rope_theta"] = {7, 0};
  EXPECT_THAT(error_of(config), HasSubstr("one number for each of the 3 layers"));
  config.erase("layer_rope_theta");
  EXPECT_FALSE(parse_config(config).own_window_rope);
  config.erase("layer_types");
  EXPECT_THAT(parse_config(config).window_layers, ElementsAre(1, 2)) << "all but every fourth";
  EXPECT_THAT(error_with("granitemoe_swa", "output_router_logits", true),
              HasSubstr("output_router_logits"));
}

TEST(MixedConfig, Llamas4ChunksStandWhereItRotates) {
  json config = fixture_json("llama4");
  const ModelConfig model = parse_config(config);
  EXPECT_EQ(model.window, 7);
  EXPECT_EQ(model.window_kind, WindowKind::kChunked);
  EXPECT_THAT(model.window_layers, ElementsAre(0, 2, 3));
  EXPECT_EQ(model.rope.fraction, 0);
  EXPECT_EQ(model.window_rope.base, 500);
  EXPECT_TRUE(model.window_rope.interleaved);
  EXPECT_EQ(model.temperature_scale, 0.4);
  EXPECT_EQ(model.temperature_length, 4);
  EXPECT_EQ(model.qk_norm, QkNorm::kL2);
  EXPECT_EQ(model.moe.first_dense_layers, 1);
  EXPECT_THAT(model.moe.dense_layers, ElementsAre(3));
  EXPECT_EQ(model.inner_size, 40);
  EXPECT_EQ(model.moe.shared_inner_size, 16);
  EXPECT_TRUE(model.moe.probs_on_input);
  config["layer_types"][1] = "chunked_attention";
  EXPECT_THAT(error_of(config), HasSubstr("'layer_types' must be chunked_attention in the layers"));
  config.erase("layer_types");
  config["no_rope_layers"] = {1, 0, 1};
  EXPECT_THAT(error_of(config), HasSubstr("a number for each of the 4 layers"));
  config["no_rope_layers"] = json::array();
  EXPECT_THAT(parse_config(config).window_layers, ElementsAre(0, 1, 2)) << "all but every fourth";
  config["no_rope_layers"] = {1, 1, 1, 1};
  EXPECT_EQ(parse_config(config).rope.base, 500);
  EXPECT_EQ(parse_config(config).temperature_scale, 0) << "all layers are rotated";
  EXPECT_THAT(inexpressible(find_family("llama4_text"), parse_config(config)), IsEmpty());
  config["no_rope_layers"] = {0, 0, 0, 0};
  EXPECT_EQ(parse_config(config).window, 0);
  EXPECT_EQ(parse_config(config).rotary_dim(), 0);
  EXPECT_THAT(inexpressible(find_family("llama4_text"), parse_config(config)), IsEmpty());
  config = fixture_json("llama4");
  config["attention_chunk_size"] = nullptr;
  EXPECT_THAT(error_of(config), HasSubstr("'attention_chunk_size' must be an integer"))
      << "transformers fails there too";
  config = fixture_json("llama4");
  config["moe_layers"] = nullptr;
  config["interleave_moe_layer_step"] = 2;
  EXPECT_EQ(parse_config(config).moe.first_dense_layers, 1);
  EXPECT_THAT(parse_config(config).moe.dense_layers, ElementsAre(2));
}

TEST(MixedConfig, OfLlama4WithEncodersTheTextPartIsRead) {
  json text = fixture_json("llama4");
  text.erase("architectures");
  const json whole = {{"model_type", "llama4"},
                      {"architectures", {"Llama4ForConditionalGeneration"}},
                      {"boi_token_index", 60},
                      {"vision_config", {{"hidden_size", 27}}},
                      {"text_config", text}};
  const ImportedConfig imported = parse_hf_config(whole.dump(), "config.json");
  EXPECT_TRUE(imported.of_whole);
  EXPECT_THAT(find_differences(imported.model, parse_config(fixture_json("llama4"))), IsEmpty());
}

TEST(MixedConfig, GemmasLayersWithoutAWindowHaveHeadsOfTheirOwn) {
  const json config = fixture_json("gemma4_text");
  const ModelConfig model = parse_config(config);
  EXPECT_EQ(model.head_size, 16);
  EXPECT_EQ(model.num_kv_heads, 1);
  EXPECT_EQ(model.window_head_size, 8);
  EXPECT_EQ(model.window_kv_heads, 2);
  EXPECT_TRUE(model.keys_as_values && model.value_norm && model.post_norms && model.layer_scalars);
  EXPECT_TRUE(model.rope.proportional && !model.window_rope.proportional);
  EXPECT_EQ(model.rope.fraction, 0.25);
  EXPECT_EQ(model.attention_multiplier, 1);
  EXPECT_EQ(model.embedding_multiplier, std::sqrt(32.0));
  EXPECT_EQ(model.logit_softcap, 8);
  EXPECT_EQ(model.moe.shared_inner_size, 40);
  EXPECT_TRUE(model.moe.router_norm && model.moe.expert_scale && model.moe.separate_norms);
  json older = config;  // as transformers 5.5 has it
  older.erase("per_layer_config");
  older["global_head_dim"] = 16;
  older["num_global_key_value_heads"] = 1;
  EXPECT_THAT(find_differences(parse_config(older), model), IsEmpty());
  older["attention_k_eq_v"] = false;
  EXPECT_EQ(parse_config(older).num_kv_heads, 2) << "what transformers does not read then";
  const ModelConfig dense = parse_config(fixture_json("gemma4_text_dense"));
  EXPECT_EQ(dense.moe.num_experts, 0);
  EXPECT_EQ(dense.inner_size, 40);
  EXPECT_EQ(dense.window_head_size, 0);
}

TEST(MixedConfig, GemmasLastLayerHasNoWindow) {
  json config = fixture_json("gemma4_text");
  config["layer_types"] = {"full_attention", "full_attention", "sliding_attention"};
  config["per_layer_config"] = json::object();
  EXPECT_EQ(parse_config(config).window, 0);
  config["num_hidden_layers"] = 9;
  config.erase("layer_types");
  EXPECT_THAT(parse_config(config).window_layers, ElementsAre(0, 1, 2, 3, 4, 6, 7));
}

TEST(MixedConfig, NamesWhatOfGemmaIsNotSupported) {
  const auto error_with = [](const char* key, const json& value) {
    return testing::error_with("gemma4_text", key, value);
  };
  EXPECT_THAT(error_with("hidden_size_per_layer_input", 8), HasSubstr("inputs of each layer"));
  EXPECT_THAT(error_with("num_kv_shared_layers", 1), HasSubstr("num_kv_shared_layers"));
  EXPECT_THAT(error_with("use_double_wide_mlp", true), HasSubstr("use_double_wide_mlp"));
  EXPECT_THAT(error_with("use_bidirectional_attention", "all"),
              HasSubstr("use_bidirectional_attention"));
  EXPECT_THAT(error_with("per_layer_config", {{"0", {{"head_dim", 4}}}}),
              HasSubstr("layers of one type heads of"));
  EXPECT_THAT(error_with("per_layer_config", {{"3", {{"head_dim", 4}}}}),
              HasSubstr("an entry '3'; expected the number of a layer, from 0 to 2"));
  EXPECT_THAT(error_with("per_layer_config", {{"2", {{"sliding_window", 4}}}}),
              HasSubstr("supported are head_dim and num_key_value_heads"));
  json config = fixture_json("gemma4_text");
  config.erase("hidden_size_per_layer_input");
  EXPECT_THAT(error_of(config), HasSubstr("256 where it is missing"));
  config = fixture_json("gemma4_text");
  config["rope_parameters"]["full_attention"]["rope_type"] = "longrope";
  EXPECT_THAT(error_of(config), HasSubstr("llama3 and proportional"));
  config = fixture_json("gemma4_text");
  config["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = 0.5;
  EXPECT_THAT(error_of(config), HasSubstr("only 1 is supported"));
  config = fixture_json("mellum");
  config["rope_parameters"]["full_attention"]["rope_type"] = "proportional";
  EXPECT_THAT(error_of(config), HasSubstr("proportional"));
}

/// A model says in some family's words what it is, or is refused by name.
TEST(MixedConfig, ModelsOfMixedLayersFindTheirFamilies) {
  for (const char* name :
       {"exaone_moe", "mellum", "lfm2_moe", "lfm2_moe_biases", "mimo_v2_flash", "laguna",
        "laguna_elements", "llama4", "llama4_top2", "gemma4_text", "gemma4_text_values",
        "gemma4_text_dense", "kimi_linear", "kimi_linear_queries", "afmoe", "granitemoe_swa"}) {
    SCOPED_TRACE(name);
    const ImportedConfig imported = parse_hf_config(fixture_json(name).dump(), "config.json");
    EXPECT_THAT(inexpressible(*imported.family, imported.model), IsEmpty());
    EXPECT_EQ(find_family_for(imported.model).model_type, imported.family->model_type);
  }
  ModelConfig model = parse_config(fixture_json("lfm2_moe"));
  model.window = 4;
  model.window_layers = {1};
  model.own_window_rope = true;
  model.window_rope.base = 5;
  EXPECT_THROW(find_family_for(model), UserError);
}

/// Not a family whose reader refuses what is written for it, whatever it says first.
TEST(MixedConfig, TheNearestFamilyIsOneThatDiffersInAKey) {
  ModelConfig model = parse_config(fixture_json("gemma4_text"));
  model.embedding_multiplier = 7;
  EXPECT_THAT([&] { find_family_for(model); },
              ThrowsMessage<UserError>(
                  HasSubstr("the nearest is gemma4_text (model.embedding_multiplier: 7.0 here")));
}

}  // namespace
}  // namespace tessera
