#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "model/config/config.h"

namespace tessera {

/// What a head's factor does to the rows of a weight that belong to the head: the first `num_first`
/// of each `head_rows` are multiplied by the factor to this power, the others to that one.
struct ClippedRows {
  int64_t head_rows = 1;
  int64_t num_first = 1;
  double first_power = 0;
  double other_power = 0;
};

/// The same of a layer's weight by its name in the layer's program ("attn.q.weight"); nothing where
/// QK clip leaves it as it is. Powers of queries and keys add up to one, so logits are multiplied
/// by the factor:
/// - as many key heads as query heads: the root on both, their biases too;
/// - key heads that several query heads share: queries alone, since the key's own factor would be
///   that of no other head;
/// - latent attention: the root on the heads' own parts of queries and keys, and all of it on the
///   queries' rotated part, whose key all heads share;
/// - queries and keys that are normed over all heads: the norms' weights in place of the matrices.
/// REQUIRES that heads are not normed one by one.
std::optional<ClippedRows> find_clipped_rows(const ModelConfig& config, std::string_view weight);

/// QK clip (Kimi K2 technical report, 2025, section 2.1, algorithm 1): a head whose largest logit S
/// in a step, softmax scale included, exceeds `limit` has the factor limit / S, all others have 1.
class QkClip {
 public:
  /// `max_logits` [all layers, heads]: S, or where that is at most the limit anything up to it.
  QkClip(const ModelConfig& config, double limit, std::span<const float> max_logits);

  int64_t num_clipped() const { return num_clipped_; }
  /// The largest of max_logits.
  double max_logit() const { return max_logit_; }
  /// The factors of rows `first_row` and following of a layer's weight.
  void fill_factors(int64_t layer, std::string_view weight, int64_t first_row,
                    std::span<float> factors) const;

 private:
  const ModelConfig& config_;
  std::vector<double> factors_;  // [all layers, heads]
  int64_t num_clipped_ = 0;
  double max_logit_ = 0;
};

}  // namespace tessera
