#include <gtest/gtest.h>

#include <cmath>

#include "model/run/forward_model.h"
#include "model/run/model_testing.h"
#include "ops/paged_attention/pages.h"

namespace tessera::testing {
namespace {

constexpr int64_t kContext = 300;

/// All kinds of layers of compressed attention, with residual streams and experts by tables;
/// `top_k` entries are chosen in one.
ModelConfig generating_config(int64_t top_k) {
  ModelConfig config = tiny_config();
  config.num_layers = 3;
  config.moe.hash_layers = {0, 1, 2};  // whose choices no rounding changes
  config.residual_streams = 3;
  config.attention = AttentionKind::kCompressed;
  config.num_kv_heads = 0;
  config.head_size = 6;
  config.window = 5;
  config.attention_sinks = true;
  config.rope.interleaved = true;
  config.compressed_rope = {.base = 100, .interleaved = true};
  config.compressed = {.query_rank = 7,
                       .rope_size = 4,
                       .output_groups = 2,
                       .output_rank = 5,
                       .sparse_rate = 3,
                       .heavy_rate = 7,
                       .sparse_layers = {0},
                       .heavy_layers = {1}};
  config.index = {.top_k = top_k, .num_heads = 9, .head_size = 6};
  return config;
}

/// A model with random weights, and sequences of tokens.
struct GenerationRig {
  ModelConfig config;
  Backend backend = Backend(make_cpu_kernels());
  ParameterSet parameters;
  std::vector<ExpertState> experts;

  explicit GenerationRig(int64_t top_k)
      : config(generating_config(top_k)),
        parameters(list_parameters(config, DType::kF32), false),
        experts(make_expert_states(config)) {
    parameters.initialize(3);
  }

  std::vector<int32_t> draw(int64_t count, uint64_t seed) const {
    Random random(seed, 1);
    std::vector<int32_t> tokens(count);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random.next_below(37));
    return tokens;
  }

  /// -log p of each token but the first, after those before it, by a pass over all of them.
  std::vector<double> losses(std::vector<int32_t> tokens) {
    const int64_t count = std::ssize(tokens) - 1;
    TestBatch batch(config, 1, count, 1);
    batch.labels.assign(tokens.begin() + 1, tokens.end());
    tokens.pop_back();
    batch.tokens = tokens;
    ForwardModel model(config, tiny_shape(1, count), ForwardGoal::kLoss, backend, parameters,
                       experts);
    const auto found = model.run_loss(batch.view()).span<float>();
    return {found.begin(), found.end()};
  }
};

double loss_of(std::span<const float> logits, int32_t token) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  return std::log(sum) - logits[token];
}

void expect_losses(const std::vector<double>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 2e-4) << i;
}

/// Pieces of a text behind a cache, of any lengths, are the text.
TEST(CompressedGeneration, PiecesOfATextAreTheText) {
  for (const int64_t top_k : {4, 1000}) {
    GenerationRig rig(top_k);
    const auto tokens = rig.draw(60, 5);
    const auto expected = rig.losses(tokens);
    for (const std::vector<int64_t>& pieces :
         {std::vector<int64_t>{59}, {20, 1, 1, 1, 2, 30, 4}, {1, 6, 5, 1, 46}}) {
      KeyValueCache cache(rig.config, DType::kF32, kContext);
      std::vector<double> found;
      for (const int64_t piece : pieces) {
        ForwardModel model(rig.config, tiny_shape(1, piece), ForwardGoal::kLogits, rig.backend,
                           rig.parameters, rig.experts, &cache);
        const auto begin = found.size();
        const Tensor logits = model.run_logits(std::span(tokens).subspan(begin, piece));
        for (int64_t i = 0; i < piece; ++i) {
          found.push_back(
              loss_of(logits.span<float>().subspan(i * logits.shape[1], logits.shape[1]),
                      tokens[begin + i + 1]));
        }
      }
      expect_losses(found, expected);
    }
  }
}

/// A sequence that is written in pages, and how far.
struct PagedSequence {
  std::vector<int32_t> tokens;
  std::vector<int32_t> pages;
  int32_t slot = 0;
  int64_t done = 0;
  std::vector<double> found = {};
};

/// Adds the next `count` tokens.
void add_piece(PagedSequence& sequence, int64_t count, SequenceRows& rows) {
  for (int64_t i = sequence.done; i < sequence.done + count; ++i) {
    rows.tokens.push_back(sequence.tokens[i]);
    rows.positions.push_back(static_cast<int32_t>(i));
    rows.cache_rows.push_back(
        static_cast<int32_t>(sequence.pages[i / kPageTokens] * kPageTokens + i % kPageTokens));
    rows.chosen_rows.push_back(static_cast<int32_t>(rows.tokens.size() - 1));
    rows.rules.push_back({.given = sequence.tokens[i + 1]});
  }
  sequence.done += count;
  rows.cu_seqlens.push_back(static_cast<int32_t>(rows.tokens.size()));
  rows.lengths.push_back(static_cast<int32_t>(sequence.done));
  rows.page_table.insert(rows.page_table.end(), sequence.pages.begin(), sequence.pages.end());
  rows.slots.push_back(sequence.slot);
}

/// Several texts are written at once in pages, in pieces.
TEST(CompressedGeneration, SequencesInPagesAreTheTexts) {
  for (const int64_t top_k : {4, 1000}) {
    GenerationRig rig(top_k);
    std::vector<PagedSequence> sequences = {{rig.draw(140, 5), {4, 1, 6}, 2},
                                            {rig.draw(9, 6), {2, -1, -1}, 0},
                                            {rig.draw(31, 7), {0, -1, -1}, 1}};
    const CacheShape shape{.capacity = kContext, .num_pages = 7, .num_slots = 3};
    KeyValueCache cache(rig.config, DType::kF32, shape, host_device());
    BatchShape batch = tiny_shape(1, 70);
    batch.max_sequences = 4;
    ForwardModel model(rig.config, batch, ForwardGoal::kTokens, rig.backend, rig.parameters,
                       rig.experts, &cache, 70);
    Random random(9, 2);
    bool is_done = false;
    while (!is_done) {
      is_done = true;
      SequenceRows rows;
      std::vector<std::pair<size_t, int64_t>> pieces;
      for (size_t s = 0; s < sequences.size(); ++s) {
        const int64_t left = std::ssize(sequences[s].tokens) - 1 - sequences[s].done;
        const auto count =
            std::min<int64_t>(left, static_cast<int64_t>(random.next_below(s == 0 ? 40 : 6)));
        is_done = is_done && left == count;
        if (count == 0) continue;
        add_piece(sequences[s], count, rows);
        pieces.emplace_back(s, count);
      }
      const ChosenTokens chosen = model.run_sequences(rows);
      size_t at = 0;
      for (const auto& [s, count] : pieces) {
        for (int64_t i = 0; i < count; ++i)
          sequences[s].found.push_back(-chosen.log_probabilities[at++]);
      }
    }
    for (const PagedSequence& sequence : sequences)
      expect_losses(sequence.found, rig.losses(sequence.tokens));
  }
}

}  // namespace
}  // namespace tessera::testing
