#include "ops/ring_attention/ring_work.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/memory.h"
#include "core/random.h"

namespace tessera::attention {
namespace {

std::vector<int32_t> cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> ends = {0};
  for (const int64_t length : lengths) ends.push_back(ends.back() + static_cast<int32_t>(length));
  return ends;
}

/// What a rank's kernels compute in one step of the ring.
struct StepWork {
  int64_t pairs = 0;  ///< (query, key) that the mask lets through, by the kernels' own tiles
  int64_t area = 0;   ///< (query, key) that the products of the tiles compute
};

StepWork count_step(const WorkList& work, int64_t window) {
  StepWork count;
  for (const QueryBlock& block : work.blocks()) {
    for_each_key_tile(block, work.keys_for(block), 1, window, [&](const TileMask& mask) {
      for (int64_t row = 0; row < mask.num_rows(); ++row) {
        const Columns visible = mask.visible(row);
        count.pairs += visible.end - visible.begin;
      }
      for (int64_t row = mask.first_row(0); row < mask.end_row(); row += tile::kBlockRows) {
        const int64_t end = std::min(row + tile::kBlockRows, mask.end_row());
        count.area += (end - row) * tile::round_up(mask.columns_before(end), tile::kLanes);
      }
    });
  }
  return count;
}

/// By ring rank and step.
std::vector<std::vector<StepWork>> count_work(const Zigzag& tokens,
                                              const std::vector<int32_t>& cu_seqlens,
                                              int64_t window) {
  const Attention op({.window = window});
  std::vector<std::vector<StepWork>> counts;
  for (int64_t rank = 0; rank < tokens.ring; ++rank) {
    const auto num_sequences = static_cast<int64_t>(cu_seqlens.size()) - 1;
    Carver counter(nullptr);
    take_ring_work(op, tokens, num_sequences, counter);
    const Buffer memory(counter.used(), "work lists");
    Carver carver(memory.data());
    WorkList work = take_ring_work(op, tokens, num_sequences, carver);
    for_each_span_of(tokens, cu_seqlens, rank,
                     [&](const TokenSpan& span) { work.add_queries(span); });
    counts.emplace_back();
    for (int64_t step = 0; step < tokens.ring; ++step) {
      take_keys(work, tokens, cu_seqlens, (rank - step + tokens.ring) % tokens.ring);
      counts.back().push_back(count_step(work, window));
    }
  }
  return counts;
}

StepWork sum(const std::vector<StepWork>& steps) {
  StepWork total;
  for (const StepWork& step : steps) {
    total.pairs += step.pairs;
    total.area += step.area;
  }
  return total;
}

/// Pairs by the definition of the mask.
int64_t all_pairs(const std::vector<int64_t>& lengths, int64_t window) {
  int64_t pairs = 0;
  for (const int64_t length : lengths) {
    for (int64_t i = 0; i < length; ++i) pairs += window == 0 ? i + 1 : std::min(i + 1, window);
  }
  return pairs;
}

TEST(RingWork, RanksSeeEquallyManyPairsInEveryStep) {
  for (const int64_t ring : {1, 2, 3, 4, 8}) {
    for (const int64_t chunk : {1, 37, 128, 300}) {
      const int64_t row = 2 * ring * chunk;
      const auto counts = count_work({2, row, ring}, cumulative({row, row}), 0);
      for (const auto& steps : counts) {
        EXPECT_EQ(sum(steps).pairs, all_pairs({row, row}, 0) / ring);
        // Its own chunks' triangles and one square; of any other rank's chunks, two squares.
        EXPECT_EQ(steps[0].pairs, 2 * (chunk * (chunk + 1) + chunk * chunk));
        for (size_t step = 1; step < steps.size(); ++step) {
          EXPECT_EQ(steps[step].pairs, 2 * 2 * chunk * chunk);
        }
      }
    }
  }
}

TEST(RingWork, ARingComputesNoMoreThanPlainAttention) {
  const int64_t row = 4096;
  const int64_t plain = sum(count_work({1, row, 1}, cumulative({row}), 0)[0]).area;
  for (const int64_t ring : {2, 4, 8}) {
    int64_t area = 0;
    for (const auto& steps : count_work({1, row, ring}, cumulative({row}), 0)) {
      area += sum(steps).area;
      EXPECT_NEAR(static_cast<double>(sum(steps).area), static_cast<double>(plain / ring),
                  0.01 * static_cast<double>(plain / ring));
    }
    EXPECT_NEAR(static_cast<double>(area), static_cast<double>(plain),
                0.005 * static_cast<double>(plain));
  }
}

TEST(RingWork, EveryPairOnce) {
  Random random(5, 1);
  const auto draw = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (int i = 0; i < 200; ++i) {
    Zigzag tokens{.num_rows = draw(4), .ring = 1 + draw(5)};
    tokens.row_length = 2 * tokens.ring * draw(90);
    std::vector<int64_t> lengths;
    for (int64_t left = tokens.num_tokens(); left > 0; left -= lengths.back()) {
      lengths.push_back(std::min(left, draw(3) == 0 ? draw(3) : draw(700)));
    }
    const int64_t window = draw(2) * (1 + draw(300));
    int64_t pairs = 0;
    for (const auto& steps : count_work(tokens, cumulative(lengths), window)) {
      pairs += sum(steps).pairs;
    }
    EXPECT_EQ(pairs, all_pairs(lengths, window));
  }
}

}  // namespace
}  // namespace tessera::attention
