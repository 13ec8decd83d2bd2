#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "hf/testing/config_cases.h"

namespace tessera::testing {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

/// Defaults are DeepSeek-V3.2's and GLM-5's own.
TEST(IndexJson, IsOfEachLayer) {
  const ModelConfig deepseek = parse_config({{"model_type", "deepseek_v32"}});
  EXPECT_EQ(deepseek.index, (IndexConfig{.top_k = 2048, .num_heads = 64, .head_size = 128}));
  EXPECT_TRUE(deepseek.rope.interleaved);
  EXPECT_EQ(deepseek.moe.first_dense_layers, 3);
  const ModelConfig glm = parse_config({{"model_type", "glm_moe_dsa"}});
  EXPECT_EQ(glm.index, (IndexConfig{2048, 32, 128, true}));
  EXPECT_EQ(glm.latent.value_size, 256);
  json config = fixture_json("glm_moe_dsa");
  config.erase("indexer_types");
  config["index_topk_pattern"] = "FF";
  EXPECT_EQ(parse_config(config).index.top_k, 5);
}

/// A layer that sees what another's indexer chose.
TEST(IndexJson, RefusesSharedIndexers) {
  const char* why = "some layers see what an earlier layer's indexer chose";
  EXPECT_THAT(error_with("glm_moe_dsa", "indexer_types", {"full", "shared"}), HasSubstr(why));
  const auto without_types = [](const char* key, const json& value) {
    json config = fixture_json("glm_moe_dsa");
    config.erase("indexer_types");
    config[key] = value;
    return error_of(config);
  };
  EXPECT_THAT(without_types("index_topk_pattern", "FS"), HasSubstr(why));
  EXPECT_THAT(without_types("index_topk_freq", 4), HasSubstr("'index_topk_freq'"));
  EXPECT_THAT(without_types("index_skip_topk_offset", 1), "no error");
  EXPECT_THAT(error_with("deepseek_v32", "layer_types", {"full_attention"}),
              HasSubstr("'layer_types' must be deepseek_sparse_attention"));
  EXPECT_THAT(error_with("deepseek_v32", "q_lora_rank", json()),
              HasSubstr("the indexer reads the query latent"));
  EXPECT_THAT(error_with("deepseek_v32", "indexer_rope_interleave", true),
              HasSubstr("indexer_rope_interleave"));
}

}  // namespace
}  // namespace tessera::testing
