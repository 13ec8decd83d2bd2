#include "model/weights/qk_clip.h"

#include <gtest/gtest.h>

#include <cmath>

#include "model/run/model_testing.h"

namespace tessera {
namespace {

using testing::ModelRig;
using testing::TestBatch;

constexpr double kLeast = 1e-3;  ///< logits above it are known exactly

/// One layer, since a clipped layer changes what the next one sees.
ModelConfig one_layer() {
  ModelConfig config = testing::tiny_config();
  config.num_layers = 1;
  config.init_deviation = 0.8;
  return config;
}

ModelConfig with_heads(int64_t kv_heads, QkNorm norm = QkNorm::kNone) {
  ModelConfig config = one_layer();
  config.num_kv_heads = kv_heads;
  config.qkv_bias = true;
  config.qk_norm = norm;
  return config;
}

ModelConfig latent(int64_t query_rank) {
  ModelConfig config = one_layer();
  config.attention = AttentionKind::kLatent;
  config.num_kv_heads = 0;
  config.head_size = 0;
  config.latent = {
      .query_rank = query_rank, .kv_rank = 8, .nope_size = 6, .rope_size = 4, .value_size = 5};
  return config;
}

struct ClipCase {
  const char* name;
  ModelConfig config;
};

void PrintTo(const ClipCase& c, std::ostream* out) {
  *out << c.name;
}

class QkClipKinds : public ::testing::TestWithParam<ClipCase> {};

/// Biases and norms of queries and keys start as constants.
void vary(ModelRig& rig) {
  Random random(11, 1);
  for (ModelParameter& p : rig.parameters.all()) {
    if (p.weight.shape.rank() != 1 || p.spec.name.find("attn.") == std::string::npos) continue;
    for (float& x : p.weight.span<float>()) x += static_cast<float>(random.next_normal());
  }
}

void scale_weights(ModelRig& rig, const QkClip& clip) {
  for (const ModelParameter& p : rig.parameters.all()) {
    if (!p.spec.layer) continue;
    std::vector<float> factors(p.weight.shape[0]);
    clip.fill_factors(*p.spec.layer, layer_weight_name(rig.config, p.spec), 0, factors);
    const auto values = p.weight.span<float>();
    const size_t columns = values.size() / factors.size();
    for (size_t i = 0; i < values.size(); ++i) values[i] *= factors[i / columns];
  }
}

/// Heads above the limit come to it, all others keep their logits.
TEST_P(QkClipKinds, BringHeadsToTheLimit) {
  const ModelConfig& config = GetParam().config;
  BatchShape shape = testing::tiny_shape(3, 9);
  shape.qk_clip = kLeast;
  ModelRig rig(config, shape);
  vary(rig);
  TestBatch batch(config, 3, 9, 5);
  const std::vector<float> before = rig.model.run(batch.view(), {.loss = 1}).max_logits;
  ASSERT_EQ(std::ssize(before), config.num_heads);
  std::vector<float> sorted = before;
  std::ranges::sort(sorted);
  ASSERT_GT(sorted[1], 2 * kLeast);
  const double limit = 0.5 * (sorted[1] + sorted[2]);
  const QkClip clip(config, limit, before);
  EXPECT_EQ(clip.num_clipped(), 2);
  EXPECT_EQ(clip.max_logit(), sorted.back());
  scale_weights(rig, clip);
  const std::vector<float> after = rig.model.run(batch.view(), {.loss = 1}).max_logits;
  for (size_t head = 0; head < before.size(); ++head) {
    EXPECT_NEAR(after[head], std::min<double>(before[head], limit), 1e-5 * limit)
        << "head " << head << " had " << before[head];
  }
}

INSTANTIATE_TEST_SUITE_P(All, QkClipKinds,
                         ::testing::Values(ClipCase{"heads_of_their_own", with_heads(4)},
                                           ClipCase{"grouped", with_heads(2)},
                                           ClipCase{"one_key_head", with_heads(1)},
                                           ClipCase{"normed", with_heads(4, QkNorm::kAll)},
                                           ClipCase{"normed_grouped", with_heads(2, QkNorm::kAll)},
                                           ClipCase{"latent", latent(8)},
                                           ClipCase{"latent_plain_queries", latent(0)},
                                           ClipCase{"windowed",
                                                    [] {
                                                      ModelConfig config = with_heads(2);
                                                      config.window = 3;
                                                      return config;
                                                    }()}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(QkClip, SharesFactorsAsTheTechnicalReportSays) {
  const ModelConfig config = latent(8);
  const std::vector<float> logits = {50, 400, 0, 100};
  const QkClip clip(config, 100, logits);
  EXPECT_EQ(clip.num_clipped(), 1);
  const auto factors = [&](std::string_view weight, int64_t first, int64_t count) {
    std::vector<float> result(count);
    clip.fill_factors(0, weight, first, result);
    return result;
  };
  using Floats = std::vector<float>;
  // Six rows of a query head are its own, four are rotated.
  EXPECT_EQ(factors("attn.q_up.weight", 8, 4), Floats({1, 1, 0.5F, 0.5F}));
  EXPECT_EQ(factors("attn.q_up.weight", 15, 6), Floats({0.5F, 0.25F, 0.25F, 0.25F, 0.25F, 1}));
  // Behind six of a key head come five of the value.
  EXPECT_EQ(factors("attn.kv_up.weight", 10, 3), Floats({1, 0.5F, 0.5F}));
  EXPECT_EQ(factors("attn.kv_up.weight", 16, 3), Floats({0.5F, 1, 1}));
  EXPECT_EQ(factors("attn.k_rope.weight", 0, 4), Floats({1, 1, 1, 1}));
  EXPECT_EQ(factors("attn.q_down.weight", 0, 2), Floats({1, 1}));
}

TEST(QkClip, LeavesWhatIsNoNumberAlone) {
  const ModelConfig config = with_heads(4);
  const std::vector<float> logits = {NAN, INFINITY, 5, -3};
  EXPECT_EQ(QkClip(config, 10, logits).num_clipped(), 0);
  EXPECT_THROW(QkClip(config, 10, std::vector<float>{1}), InternalError);
  EXPECT_THROW(find_clipped_rows(with_heads(4, QkNorm::kHead), "attn.q.weight"), InternalError);
}

/// The largest of several micro-batches counts, and without a limit nothing is measured.
TEST(QkClip, MeasuresMicroBatchesTogether) {
  const ModelConfig config = with_heads(2);
  BatchShape shape = testing::tiny_shape(2, 6);
  shape.qk_clip = kLeast;
  ModelRig rig(config, shape);
  TestBatch first(config, 2, 6, 5);
  TestBatch second(config, 2, 6, 6);
  MicroBatchResult sum;
  const MicroBatchResult one = rig.model.run(first.view(), {.loss = 1});
  const MicroBatchResult other = rig.model.run(second.view(), {.loss = 1});
  sum += one;
  sum += other;
  for (size_t head = 0; head < sum.max_logits.size(); ++head)
    EXPECT_EQ(sum.max_logits[head], std::max(one.max_logits[head], other.max_logits[head]));
  ModelRig plain(config, testing::tiny_shape(2, 6));
  EXPECT_TRUE(plain.model.run(first.view(), {.loss = 1}).max_logits.empty());
}

}  // namespace
}  // namespace tessera
