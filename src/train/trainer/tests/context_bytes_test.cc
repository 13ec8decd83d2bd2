#include "train/trainer/tests/comm_bytes_testing.h"

namespace tessera::testing {
namespace {

/// h = N·D, and m = 2 query heads for each key-value head.
Settings head_exchange_settings() {
  Settings settings = small_settings();
  settings.model.num_heads = 8;
  settings.model.num_kv_heads = 4;
  settings.model.head_size = 2;
  return settings;
}

/// Equation 2 counts each element twice; what leaves a rank is (2 + 2/m) · bsh/n · (n-1)/n: queries
/// and results, keys and values. Over n ranks, forward and backward, and `parts` such groups.
int64_t head_exchange_bytes(int64_t num_ranks, int64_t parts = 1) {
  constexpr int64_t kQueriesPerKey = 2;  // m
  const int64_t bsh = kTokens * kHidden / parts;
  const int64_t leaving =
      (2 * kQueriesPerKey + 2) * bsh * (num_ranks - 1) / (kQueriesPerKey * num_ranks * num_ranks);
  return 2 * kLayers * parts * num_ranks * leaving * kF32;
}

TEST(StepBytes, UlyssesAttention) {
  constexpr int64_t kRanks = 4;
  Settings settings = head_exchange_settings();
  settings.parallel.layout.tp = kRanks;
  settings.parallel.attention = AttentionParallel::kUlysses;
  const StepBytes bytes(settings, kRanks);
  EXPECT_EQ(bytes("heads", CommKind::kAllToAll), head_exchange_bytes(kRanks));
}

TEST(StepBytes, ContextByAllToAll) {
  constexpr int64_t kRanks = 4;
  Settings settings = head_exchange_settings();
  settings.parallel.layout.cp = kRanks;
  settings.parallel.context = ContextExchange::kAllToAll;
  const StepBytes bytes(settings, kRanks);
  EXPECT_EQ(bytes("heads", CommKind::kAllToAll), head_exchange_bytes(kRanks));
  EXPECT_EQ(bytes("ring", CommKind::kSend), 0);
}

/// Ring attention (Liu et al., 2023, section 3): each rank's keys and values pass R - 1 times, and
/// backwards again with the sums of their gradients behind them. Sums are F32, as all is here.
int64_t ring_bytes(const ModelConfig& model, int64_t ring, int64_t num_ranks) {
  const int64_t block = kTokens / num_ranks * 2 * model.num_kv_heads * model.head_size;
  return 3 * kLayers * num_ranks * (ring - 1) * block * kF32;
}

TEST(StepBytes, ContextByRing) {
  constexpr int64_t kRanks = 4;
  Settings settings = small_settings();
  settings.parallel.layout.cp = kRanks;
  const StepBytes bytes(settings, kRanks);
  EXPECT_EQ(bytes("ring", CommKind::kSend), ring_bytes(settings.model, kRanks, kRanks));
  EXPECT_EQ(bytes("heads", CommKind::kAllToAll), 0);
}

/// Two rings of four, each over pairs that exchange heads. A ring's rank has the tokens of a pair,
/// and half of the heads.
TEST(StepBytes, ContextHierarchically) {
  constexpr int64_t kRanks = 8;
  constexpr int64_t kInner = 2;
  Settings settings = head_exchange_settings();
  settings.parallel.layout.cp = kRanks;
  settings.parallel.context = ContextExchange::kHierarchical;
  settings.parallel.context_inner = kInner;
  const StepBytes bytes(settings, kRanks);
  EXPECT_EQ(bytes("ring", CommKind::kSend), ring_bytes(settings.model, kRanks / kInner, kRanks));
  EXPECT_EQ(bytes("heads", CommKind::kAllToAll), head_exchange_bytes(kInner, kRanks / kInner));
}

/// Of layers that exchange rows of `width` elements a token over the ranks of a ring, one way and,
/// their gradients, back: (n-1)/n of each leave their rank.
int64_t sequence_exchange_bytes(int64_t width, int64_t num_ranks) {
  return 2 * kLayers * kTokens * width * (num_ranks - 1) / num_ranks * kF32;
}

/// Queries, keys, values and what is read; decays and strengths of heads.
TEST(StepBytes, ContextOfDeltaRules) {
  constexpr int64_t kRanks = 4;
  Settings settings = small_settings();
  settings.model.delta_layers = {0, 1};
  settings.model.delta = {.num_key_heads = 4, .num_value_heads = 8, .key_size = 6, .value_size = 5};
  settings.parallel.layout.cp = kRanks;
  const StepBytes bytes(settings, kRanks);
  EXPECT_EQ(bytes("ring", CommKind::kAllToAll),
            sequence_exchange_bytes(2 * 4 * 6 + 2 * 8 * 5 + 2 * 8, kRanks));
  EXPECT_EQ(bytes("ring", CommKind::kSend), 0);
}

/// x, what is scanned and steps of heads; B and C once for each rank, where one group has all
/// heads.
TEST(StepBytes, ContextOfMamba) {
  constexpr int64_t kRanks = 4;
  Settings settings = small_settings();
  settings.model.mamba_layers = {0, 1};
  settings.model.mamba = {.num_heads = 8, .head_size = 6, .num_groups = 1, .state_size = 5};
  settings.parallel.layout.cp = kRanks;
  const StepBytes bytes(settings, kRanks);
  EXPECT_EQ(bytes("ring", CommKind::kAllToAll),
            sequence_exchange_bytes(2 * 8 * 6 + 8 + 2 * kRanks * 5, kRanks));
}

/// What is convolved.
TEST(StepBytes, ContextOfGatedConvolutions) {
  constexpr int64_t kRanks = 4;
  Settings settings = small_settings();
  settings.model.conv_layers = {0, 1};
  settings.parallel.layout.cp = kRanks;
  settings.parallel.context = ContextExchange::kAllToAll;
  const StepBytes bytes(settings, kRanks);
  EXPECT_EQ(bytes("heads", CommKind::kAllToAll), sequence_exchange_bytes(2 * kHidden, kRanks));
}

}  // namespace
}  // namespace tessera::testing
