#include <gtest/gtest.h>

#include "ops/testing/gpu_test.h"
#include "train/infer/decoding_testing.h"

namespace tessera {
namespace {

class DecodingBatchCuda : public testing::GpuTest {
 protected:
  static void check(DType dtype, double tolerance,
                    const std::function<void(ModelConfig&)>& change = {}) {
    testing::Rig host(dtype, change);
    testing::Rig device(dtype, change, gpu());
    testing::expect_alike(host, device, tolerance);
  }
};

TEST_F(DecodingBatchCuda, WritesWhatTheHostWrites) {
  check(DType::kF32, 1e-3);
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithWindowsSinksAndBiases) {
  check(DType::kF32, 1e-3, [](ModelConfig& model) {
    model.attention_sinks = model.qkv_bias = model.output_bias = true;
    model.window = 4;
    model.window_layers = {0};
    model.activation = Activation::kSwiGLUOai;
    model.moe.mlp_bias = model.moe.router_bias = true;
    model.moe.score_order = ScoreOrder::kAfterTopK;
    model.tie_embeddings = true;
  });
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithLatents) {
  check(DType::kF32, 1e-3, testing::make_latent);
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithChosenKeys) {
  check(DType::kF32, 1e-3, testing::make_indexed);
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithCompressedTokens) {
  check(DType::kF32, 1e-3, testing::make_compressed);
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithLayerNormsAndSparseMixer) {
  check(DType::kF32, 1e-3, testing::make_phi);
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithStates) {
  check(DType::kF32, 1e-3, testing::make_delta);
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithStatesOfKimiDelta) {
  check(DType::kF32, 1e-3, testing::make_kimi);
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithScans) {
  check(DType::kF32, 1e-3, testing::make_mamba);
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithConvolutions) {
  check(DType::kF32, 1e-3, testing::make_conv);
}

TEST_F(DecodingBatchCuda, WritesWhatTheHostWritesWithChunks) {
  check(DType::kF32, 1e-3, testing::make_chunks);
}

/// In BF16 other tokens may be drawn, so only that all end, and with tokens of the vocabulary.
TEST_F(DecodingBatchCuda, WritesInBf16) {
  testing::Rig device(DType::kBF16, {}, gpu());
  DecodingBatch batch = device.batch({.max_sequences = 5, .context = 200, .max_rows = 30});
  for (uint64_t seed = 0; seed < 24; ++seed) batch.add(device.request(seed));
  std::map<int64_t, testing::Written> written;
  testing::run_all(batch, written);
  EXPECT_TRUE(batch.is_idle());
  for (const auto& [sequence, of] : written) {
    EXPECT_NE(of.end, DecodingEnd::kNot) << sequence;
    for (const int32_t id : of.ids) EXPECT_LT(id, device.config.vocab_size);
    for (const double log_probability : of.log_probabilities) EXPECT_LE(log_probability, 0);
  }
}

}  // namespace
}  // namespace tessera
