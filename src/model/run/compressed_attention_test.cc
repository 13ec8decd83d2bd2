#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "checkpoint/format/safetensors.h"
#include "comm/planned_world.h"
#include "model/build/layer_builder.h"
#include "model/run/model_testing.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

/// As tools/make_compressed_attention_fixture.py has it.
ModelConfig fixture_config() {
  ModelConfig config;
  config.vocab_size = 37;
  config.hidden_size = 16;
  config.num_layers = 3;
  config.num_heads = 4;
  config.head_size = 12;
  config.window = 5;
  config.attention = AttentionKind::kCompressed;
  config.attention_sinks = true;
  config.norm_eps = 1e-6;
  config.tie_embeddings = false;
  config.layers_without_mlp = {0, 1, 2};
  config.moe.num_experts = 0;
  config.rope = {.base = 100, .interleaved = true};
  config.compressed_rope = {.base = 1000,
                            .interleaved = true,
                            .scaling = RopeScaling::kYarn,
                            .factor = 4,
                            .original_length = 16,
                            .attention_factor = 1};
  config.compressed = {.query_rank = 10,
                       .rope_size = 4,
                       .output_groups = 2,
                       .output_rank = 6,
                       .sparse_rate = 4,
                       .heavy_rate = 6,
                       .sparse_layers = {2},
                       .heavy_layers = {1}};
  config.index = {.top_k = 3, .num_heads = 6, .head_size = 8};
  return config;
}

std::vector<int32_t> read_ids(const SafetensorsReader& file, const char* name) {
  OwnedTensor ids(DType::kI32, file.entry(name).shape);
  file.read(name, ids);
  const auto values = ids.get().span<int32_t>();
  return {values.begin(), values.end()};
}

/// Loss and gradients of all kinds of layers are those of transformers' DeepSeek-V4, whose
/// sequences are rows of a batch and here are packed.
TEST(CompressedAttention, IsThatOfTransformers) {
  const SafetensorsReader file(TESSERA_TEST_DATA "/compressed_attention.safetensors");
  const ModelConfig config = fixture_config();
  validate(config);
  TestBatch batch(config, 2, 29, 1);
  batch.tokens = read_ids(file, "tokens");
  batch.labels = read_ids(file, "labels");
  ModelRig rig(config, tiny_shape(2, 29));
  for (const ModelParameter& p : rig.parameters.all()) file.read(p.spec.name, p.weight);
  rig.parameters.zero_gradients();
  const double loss = rig.run(batch, {.loss = 1.0F / 58});
  OwnedTensor expected(DType::kF32, {1});
  file.read("loss", expected);
  EXPECT_NEAR(loss, expected.get().as<float>()[0], 2e-6);
  int64_t compared = 0;
  for (const ModelParameter& p : rig.parameters.all()) {
    const bool trained = !p.spec.placement.frozen;
    EXPECT_EQ(file.find("grad." + p.spec.name) != nullptr, trained) << p.spec.name;
    if (!trained) continue;
    OwnedTensor grad(DType::kF32, p.grad.shape);
    file.read("grad." + p.spec.name, grad);
    const auto own = to_doubles(p.grad);
    const auto exact = to_doubles(grad);
    double worst = 0;
    double largest = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      worst = std::max(worst, std::abs(own[i] - exact[i]));
      largest = std::max(largest, std::abs(exact[i]));
    }
    EXPECT_GT(largest, 0) << p.spec.name;
    EXPECT_LE(worst, 2e-5 * largest) << p.spec.name;
    ++compared;
  }
  EXPECT_EQ(compared, 3 * 9 + 2 * 4 + 3);
}

/// Ranks that have some of a sequence's tokens cannot compress them.
TEST(CompressedAttention, RefusesTokensThatAreSpread) {
  ModelConfig config = fixture_config();
  const BatchShape shape = tiny_shape(2, 32);
  StageGroups groups = single_rank_groups();
  const CommunicatorPtr two = make_planned_world(0, 2)->make_world_group();
  groups.micro_batch = two;
  const auto expect_refused = [&](const char* message) {
    EXPECT_THAT([&] { check_shares(config, shape, groups); },
                ::testing::ThrowsMessage<UserError>(::testing::HasSubstr(message)));
  };
  expect_refused("compress tokens of whole sequences; set parallel.cp to 1");
  groups.tp = two;
  EXPECT_NO_THROW(check_shares(config, shape, groups));
  groups.policy.replicated_attention = true;
  expect_refused("spread heads instead");
  groups.policy.replicated_attention = false;
  config.compressed.output_groups = 1;
  expect_refused("compressed.output_groups");
}

}  // namespace
}  // namespace tessera::testing
