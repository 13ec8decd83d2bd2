#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "hf/config/hf_config.h"
#include "hf/config/v4_json.h"
#include "hf/config/write_config.h"
#include "hf/testing/config_cases.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using testing::error_of;
using testing::fixture_json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::parse_config;

TEST(V4Config, ReadsLayersAndSizes) {
  const ModelConfig model = parse_config(fixture_json("deepseek_v4"));
  EXPECT_TRUE(model.is_compressed());
  EXPECT_THAT(model.compressed.sparse_layers, ElementsAre(1, 3));
  EXPECT_THAT(model.compressed.heavy_layers, ElementsAre(2));
  EXPECT_EQ(model.compressed.heavy_rate, 7);
  EXPECT_EQ(model.compressed.rope_size, 6);
  EXPECT_EQ(model.rope.base, 500);
  EXPECT_EQ(model.compressed_rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(model.residual_streams, 3);
  EXPECT_EQ(model.residual_sinkhorn_iterations, 4);
  EXPECT_THAT(model.moe.hash_layers, ElementsAre(0, 2));
  EXPECT_EQ(model.moe.score, ScoreFunction::kSqrtSoftplus);
  EXPECT_EQ(model.moe.shared_inner_size, 16);
  EXPECT_EQ(model.activation, Activation::kSwiGLUClamped);
  EXPECT_EQ(model.swiglu_limit, 10);
  EXPECT_EQ(find_family_for(model).model_type, "deepseek_v4");
}

TEST(V4Config, ReadsOlderKeys) {
  json config = fixture_json("deepseek_v4_older");
  const ModelConfig model = parse_config(config);
  EXPECT_THAT(model.compressed.sparse_layers, ElementsAre(0));
  EXPECT_THAT(model.compressed.heavy_layers, IsEmpty());
  EXPECT_EQ(model.compressed.sparse_rate, 3);
  EXPECT_EQ(model.compressed_rope.base, 160000);
  EXPECT_EQ(model.swiglu_limit, 1.5);
  EXPECT_THAT(model.moe.hash_layers, ElementsAre(0));
  EXPECT_THAT(inexpressible(find_family("deepseek_v4"), model), IsEmpty());
  config["rope_scaling"] = {
      {"type", "yarn"}, {"factor", 16}, {"original_max_position_embeddings", 64}};
  const ModelConfig scaled = parse_config(config);
  EXPECT_EQ(scaled.rope.scaling, RopeScaling::kNone);
  EXPECT_EQ(scaled.compressed_rope.scaling, RopeScaling::kYarn);
  EXPECT_EQ(scaled.compressed_rope.attention_factor, 1) << "transformers forces it";
}

TEST(V4Config, LayersAreThoseOfTheLargerModelWhereNoListSays) {
  json config = fixture_json("deepseek_v4_older");
  config["num_hidden_layers"] = 6;
  for (const char* key : {"compress_ratios", "num_hash_layers"}) config.erase(key);
  const ModelConfig model = parse_config(config);
  EXPECT_THAT(model.compressed.heavy_layers, ElementsAre(0, 1, 2, 4));
  EXPECT_THAT(model.compressed.sparse_layers, ElementsAre(3, 5));
  EXPECT_THAT(model.moe.hash_layers, ElementsAre(0, 1, 2));
}

TEST(V4Config, AllLayersMaySeeAWindowAlone) {
  json config = fixture_json("deepseek_v4");
  config["layer_types"] = json(4, "sliding_attention");
  const ModelConfig model = parse_config(config);
  EXPECT_FALSE(model.compressed.has_entries());
  EXPECT_THAT(inexpressible(find_family("deepseek_v4"), model), IsEmpty());
}

TEST(V4Config, NamesWhatIsNotSupported) {
  const auto error_with = [](const char* key, const json& value) {
    return testing::error_with("deepseek_v4", key, value);
  };
  EXPECT_THAT(error_with("layer_types", json(4, "full_attention")), HasSubstr("heavily"));
  EXPECT_THAT(error_with("layer_types", json(3, "sliding_attention")), HasSubstr("4 layers"));
  EXPECT_THAT(error_with("mlp_layer_types", json(4, "dense")), HasSubstr("hash_moe and moe"));
  EXPECT_THAT(error_with("hc_mult", 1), HasSubstr("'hc_mult' is 1"));
  EXPECT_THAT(error_with("hc_sinkhorn_iters", 65), HasSubstr("at most 64"));
  EXPECT_THAT(error_with("scoring_func", "relu"), HasSubstr("sqrtsoftplus"));
  EXPECT_THAT(error_with("swiglu_limit", 0.0), HasSubstr("'swiglu_limit'"));
  EXPECT_THAT(error_with("swiglu_limit", 1e9), HasSubstr("model.swiglu_limit is 1000000000"));
  EXPECT_THAT(error_with("num_key_value_heads", 2), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(error_with("n_shared_experts", 2), HasSubstr("n_shared_experts"));
  EXPECT_THAT(error_with("partial_rotary_factor", 0.25), HasSubstr("6 elements of a head"));
  EXPECT_THAT(error_with("compress_rates", {{"compressed_sparse_attention", 0}}),
              HasSubstr("compress_rates"));
  json config = fixture_json("deepseek_v4_older");
  config["compress_ratios"] = {8, 0};
  EXPECT_THAT(error_of(config), HasSubstr("0, 4 and 128"));
}

/// transformers' gpt-oss has 7 built in.
TEST(V4Config, LimitsAreWhatAFamilyHas) {
  ModelConfig model = parse_config(fixture_json("gpt_oss"));
  const Family& family = find_family("gpt_oss");
  model.swiglu_limit = 7;
  EXPECT_THAT(inexpressible(family, model), IsEmpty());
  model.swiglu_limit = 5;
  EXPECT_THAT(inexpressible(family, model),
              ElementsAre(HasSubstr("model.swiglu_limit: 5.0 here, 7.0 there")));
}

TEST(V4Config, PublishedNamesAreThoseThatAreSavedToo) {
  EXPECT_EQ(saved_v4_name("embed.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(saved_v4_name("head.weight"), "head.weight");
  EXPECT_EQ(saved_v4_name("hc_head_fn"), "model.hc_head.hc_fn");
  EXPECT_EQ(saved_v4_name("layers.3.attn.wq_a.weight"), "model.layers.3.attn.wq_a.weight");
  EXPECT_EQ(saved_v4_name("model.layers.3.hc_attn_fn"), "model.layers.3.hc_attn_fn");
  EXPECT_EQ(saved_v4_name("layers.3.hc_attn_scale"), "model.layers.3.hc_attn_scale");
  EXPECT_EQ(saved_v4_name("layers.3.attn.kv_norm.weight"), "model.layers.3.attn.norm.weight");
  EXPECT_EQ(saved_v4_name("layers.3.attn.compressor.norm.weight"),
            "model.layers.3.attn.compressor.norm.weight");
  EXPECT_EQ(saved_v4_name("layers.3.attn.wq_a.scale"), "model.layers.3.attn.wq_a.weight_scale_inv");
}

}  // namespace
}  // namespace tessera
