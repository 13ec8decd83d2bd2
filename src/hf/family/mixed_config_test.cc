#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file/file.h"
#include "hf/family/hf_config.h"
#include "hf/family/write_config.h"
#include "hf/testing.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

json fixture_json(const std::string& name) {
  return json::parse(read_text_file(hf_fixture(name) / "config.json"));
}

ModelConfig parse(const json& config) {
  return parse_hf_config(config.dump(), "config.json").model;
}

std::string error_of(const json& config) {
  try {
    parse(config);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(MixedConfig, ExaoneRotatesWindowsAlone) {
  json config = fixture_json("exaone_moe");
  ModelConfig model = parse(config);
  EXPECT_THAT(model.window_layers, ElementsAre(0, 2));
  EXPECT_TRUE(model.own_window_rope);
  EXPECT_EQ(model.rope.fraction, 0);
  EXPECT_EQ(model.window_rope.base, 500);
  EXPECT_THAT(model.moe.dense_layers, ElementsAre(1));
  config.erase("layer_types");
  EXPECT_EQ(parse(config).window_layers.size(), 0) << "the first four of a pattern";
  EXPECT_EQ(parse(config).rope.base, 500) << "all layers have a window";
  config["sliding_window_pattern"] = 2;
  config.erase("mlp_layer_types");
  EXPECT_THAT(parse(config).window_layers, ElementsAre(0, 2));
  EXPECT_EQ(parse(config).moe.first_dense_layers, 1);
  config["sliding_window_pattern"] = "LLG";
  EXPECT_THAT(error_of(config), HasSubstr("sliding_window_pattern"))
      << "transformers' arithmetic fails there too";
  config["layer_types"] = {"full_attention", "full_attention", "full_attention"};
  EXPECT_EQ(parse(config).rotary_dim(), 0) << "there is a window, though no layer has it";
  config["sliding_window"] = nullptr;
  EXPECT_EQ(parse(config).rotary_dim(), 12);
}

TEST(MixedConfig, RopeParametersAreByTypeOfLayer) {
  json config = fixture_json("mellum");
  const ModelConfig model = parse(config);
  EXPECT_THAT(model.window_layers, ElementsAre(1));
  EXPECT_EQ(model.rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(model.window_rope.base, 100);
  config["layer_types"] = {"sliding_attention", "sliding_attention", "sliding_attention"};
  config["rope_parameters"].erase("full_attention");
  EXPECT_EQ(parse(config).rope.base, 100) << "the type that no layer has may be missing";
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
  EXPECT_EQ(parse({{"model_type", "mellum"}}).rope.base, 500000) << "the default";
}

TEST(MixedConfig, HeadsMayDependOnTheWindow) {
  json config = fixture_json("laguna");
  const ModelConfig model = parse(config);
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
  EXPECT_EQ(parse(config).gate_function, AttentionGate::kSoftplus);
  config["moe_router_logit_softcapping"] = 30.0;
  EXPECT_THAT(error_of(config), HasSubstr("moe_router_logit_softcapping"));
  config = fixture_json("laguna");
  config["attention_bias"] = true;
  EXPECT_THAT(error_of(config), HasSubstr("attention_bias"));
}

TEST(MixedConfig, MimosWindowsHaveTwiceTheKeyHeads) {
  const json config = fixture_json("mimo_v2_flash");
  const ModelConfig model = parse(config);
  EXPECT_EQ(model.num_kv_heads, 2);
  EXPECT_EQ(model.window_kv_heads, 4);
  EXPECT_TRUE(model.window_sinks && !model.attention_sinks);
  EXPECT_EQ(model.value_size, 10);
  EXPECT_EQ(model.value_multiplier, 0.707);
  json changed = config;
  changed["attention_value_scale"] = nullptr;
  changed["routed_scaling_factor"] = nullptr;
  EXPECT_EQ(parse(changed).value_multiplier, 1);
  EXPECT_EQ(parse(changed).moe.score_scale, 1);
  changed["layer_types"] = {"full_attention", "full_attention", "full_attention"};
  EXPECT_EQ(parse(changed).window_kv_heads, 0);
  changed["rope_parameters"]["full_attention"] = {
      {"rope_type", "linear"}, {"rope_theta", 10.0}, {"factor", 2.0}};
  EXPECT_THAT(error_of(changed), HasSubstr("'partial_rotary_factor' is missing"));
  const ModelConfig published = parse({{"model_type", "mimo_v2_flash"}});
  EXPECT_EQ(published.window_layers.size(), 39);
  EXPECT_EQ(published.rotary_dim(), 64);
}

TEST(MixedConfig, EqualRotationsAreOne) {
  json config = fixture_json("mellum");
  config["rope_parameters"]["sliding_attention"] = config["rope_parameters"]["full_attention"];
  EXPECT_FALSE(parse(config).own_window_rope);
  EXPECT_THAT(inexpressible(find_family("mellum"), parse(config)), IsEmpty());
}

TEST(MixedConfig, ConvolutionsStandWhereLayerTypesSay) {
  json config = fixture_json("lfm2_moe");
  const ModelConfig model = parse(config);
  EXPECT_THAT(model.conv_layers, ElementsAre(0, 2, 3));
  EXPECT_TRUE(model.moe.expert_bias);
  EXPECT_EQ(model.norm_eps, 1e-3);
  config["layer_types"][0] = "sliding_attention";
  EXPECT_THAT(error_of(config), HasSubstr("supported are full_attention and conv"));
  config.erase("layer_types");
  EXPECT_THAT(error_of(config), HasSubstr("layer_types"));
  config = fixture_json("lfm2_moe");
  config["tie_embedding"] = false;
  EXPECT_FALSE(parse(config).tie_embeddings) << "the published name, which comes first";
  config["use_expert_bias"] = false;
  EXPECT_FALSE(parse(config).moe.expert_bias);
  config["hidden_act"] = "gelu";
  EXPECT_THAT(error_of(config), HasSubstr("only silu"));
}

TEST(MixedConfig, Llamas4ChunksStandWhereItRotates) {
  json config = fixture_json("llama4");
  const ModelConfig model = parse(config);
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
  EXPECT_THAT(parse(config).window_layers, ElementsAre(0, 1, 2)) << "all but every fourth";
  config["no_rope_layers"] = {1, 1, 1, 1};
  EXPECT_EQ(parse(config).rope.base, 500);
  EXPECT_EQ(parse(config).temperature_scale, 0) << "all layers are rotated";
  EXPECT_THAT(inexpressible(find_family("llama4_text"), parse(config)), IsEmpty());
  config["no_rope_layers"] = {0, 0, 0, 0};
  EXPECT_EQ(parse(config).window, 0);
  EXPECT_EQ(parse(config).rotary_dim(), 0);
  EXPECT_THAT(inexpressible(find_family("llama4_text"), parse(config)), IsEmpty());
  config = fixture_json("llama4");
  config["attention_chunk_size"] = nullptr;
  EXPECT_THAT(error_of(config), HasSubstr("'attention_chunk_size' must be an integer"))
      << "transformers fails there too";
  config = fixture_json("llama4");
  config["moe_layers"] = nullptr;
  config["interleave_moe_layer_step"] = 2;
  EXPECT_EQ(parse(config).moe.first_dense_layers, 1);
  EXPECT_THAT(parse(config).moe.dense_layers, ElementsAre(2));
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
  EXPECT_THAT(find_differences(imported.model, parse(fixture_json("llama4"))), IsEmpty());
}

/// A model says in some family's words what it is, or is refused by name.
TEST(MixedConfig, ModelsOfMixedLayersFindTheirFamilies) {
  for (const char* name : {"exaone_moe", "mellum", "lfm2_moe", "lfm2_moe_biases", "mimo_v2_flash",
                           "laguna", "laguna_elements", "llama4", "llama4_top2"}) {
    SCOPED_TRACE(name);
    const ImportedConfig imported = parse_hf_config(fixture_json(name).dump(), "config.json");
    EXPECT_THAT(inexpressible(*imported.family, imported.model), IsEmpty());
    EXPECT_EQ(find_family_for(imported.model).model_type, imported.family->model_type);
  }
  ModelConfig model = parse(fixture_json("lfm2_moe"));
  model.window = 4;
  model.window_layers = {1};
  model.own_window_rope = true;
  model.window_rope.base = 5;
  EXPECT_THROW(find_family_for(model), UserError);
}

}  // namespace
}  // namespace tessera
