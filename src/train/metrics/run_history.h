#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "train/metrics/step_record.h"

namespace tessera {

/// Expert loads summed over consecutive steps.
struct LoadWindow {
  struct Layer {
    int64_t layer = 0;
    std::vector<double> tokens;  ///< [E]
  };
  int64_t first_step = 0;
  int64_t last_step = 0;
  int64_t num_records = 0;
  std::vector<Layer> layers;

  /// The share of an expert relative to a perfect one (1.0); 0 for all experts of a layer that got
  /// nothing.
  double relative_load(size_t layer_idx, size_t expert) const;
  /// Adds the loads of a later window of the same shape.
  void merge(const LoadWindow& later);
};

/// All that the report needs of a run. The numbers of each step are kept; the expert loads, which
/// are larger, are summed over windows whose number stays bounded: when there are too many,
/// neighbours are merged and later windows are as long.
class RunHistory {
 public:
  static constexpr size_t kMaxWindows = 48;

  /// Throws UserError when the layers or experts are not those of the earlier steps.
  void add(const StepRecord& record);
  void add(const ValidationRecord& record) { validations_.push_back(record); }

  /// The steps without their expert loads and layers' roundings.
  const std::vector<StepRecord>& steps() const { return steps_; }
  const std::vector<ValidationRecord>& validations() const { return validations_; }
  const std::vector<LoadWindow>& windows() const { return windows_; }
  /// The newest loads: the last window, with the one before where it has only begun. Empty for a
  /// dense model.
  std::optional<LoadWindow> recent_load() const;
  bool is_moe() const {
    return !windows_.empty() || (!steps_.empty() && steps_.back().balance_loss.has_value());
  }

  /// Seconds spent in steps up to each step.
  std::vector<double> elapsed_seconds() const;
  double total_dropped() const;
  /// Of each layer with values beyond their scales in any step, the most of each kind.
  const std::vector<LayerRoundings>& most_rounded() const { return most_rounded_; }
  int64_t peak_memory() const;
  std::optional<ValidationRecord> best_validation() const;

 private:
  void add_load(const StepRecord& record);
  void add_roundings(const StepRecord& record);
  void halve_windows();

  std::vector<StepRecord> steps_;
  std::vector<ValidationRecord> validations_;
  std::vector<LoadWindow> windows_;
  std::vector<LayerRoundings> most_rounded_;
  int64_t records_per_window_ = 1;
};

}  // namespace tessera
