#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// Which dataset a sample is drawn from, and how many were drawn from that one before.
struct Draw {
  int64_t dataset = 0;
  int64_t index = 0;
  bool operator==(const Draw&) const = default;
};

/// An order in which datasets are drawn in fixed proportions: after any number n of samples, a
/// dataset of share w has been drawn floor(w n) or ceil(w n) times. Each draw of a dataset has a
/// window of samples in which it must fall, and of the open windows the one that closes first is
/// served: earliest deadline first, which keeps all of them (Tijdeman, "The chairman assignment
/// problem", 1980; Baruah et al., "Proportionate progress", 1996). The order is periodic, so one
/// period is computed and kept: 6 bytes a sample.
class DrawOrder {
 public:
  /// The longest period. Weights whose ratio does not fit are rounded to parts of so much.
  static constexpr int64_t kMaxPeriod = int64_t{1} << 20;

  /// One weight a dataset, at least 0, not all 0, in any unit. A dataset of weight 0 is never
  /// drawn.
  explicit DrawOrder(const std::vector<double>& weights);

  Draw at(int64_t sample) const;
  /// Draws of the dataset among the first `num_samples`.
  int64_t count(int64_t dataset, int64_t num_samples) const;
  int64_t period() const { return static_cast<int64_t>(order_.size()); }

 private:
  std::vector<uint16_t> order_;                // the dataset at each place of the period
  std::vector<std::vector<uint32_t>> places_;  // of each dataset in the period, ascending
};

/// The same weights as integers without a common factor whose sum is at most `max_sum`; a weight
/// above 0 stays above 0.
std::vector<int64_t> integer_weights(const std::vector<double>& weights, int64_t max_sum);

/// Weights that hold from a sample on.
struct BlendPhase {
  int64_t first_sample = 0;
  std::vector<double> weights;  ///< one a dataset
};

/// A mixture of datasets whose weights may change at given samples; a dataset goes on in a later
/// phase where the earlier ones have left it. A pure function of the sample's number.
class Blend {
 public:
  /// Phases in order, the first from sample 0 on.
  explicit Blend(const std::vector<BlendPhase>& phases);
  /// One dataset alone.
  Blend() : Blend(std::vector<BlendPhase>{{.first_sample = 0, .weights = {1.0}}}) {}

  int64_t num_datasets() const { return num_datasets_; }
  Draw at(int64_t sample) const;
  int64_t count(int64_t dataset, int64_t num_samples) const;

 private:
  struct Phase {
    int64_t first_sample = 0;
    DrawOrder order;
    std::vector<int64_t> drawn_before;  // of each dataset, in earlier phases
  };
  const Phase& phase_of(int64_t sample) const;

  int64_t num_datasets_ = 0;
  std::vector<Phase> phases_;
};

}  // namespace tessera
