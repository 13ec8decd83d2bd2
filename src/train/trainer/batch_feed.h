#pragma once

#include <optional>

#include "core/process/helper_thread.h"
#include "train/setup/context_batches.h"
#include "train/setup/run_layout.h"
#include "train/setup/training_data.h"
#include "train/trainer/step_feed.h"

namespace tessera {

/// This rank's micro-batches of a step, and what is counted of them.
struct StepBatches {
  int64_t step = -1;
  std::vector<Batch> batches;
  std::vector<ContextShare> shares;  ///< of the batches, with dynamic context parallelism
  std::vector<MicroBatch> views;     ///< of the batches
  int64_t num_valid = 0;             ///< labels that count
  int64_t num_mtp_labels = 0;        ///< likewise, of multi-token prediction
  int64_t num_tokens = 0;
};

/// A run's micro-batches, of its data or given. All references must outlive it.
class BatchFeed final : public StepFeed {
 public:
  /// `max_sequences`: the stretches that the model was built for.
  BatchFeed(const Settings& settings, const TrainingData& data, const RunLayout& layout,
            int64_t max_sequences);

  /// Those of the step: `given`, or where these are none the data's.
  const StepBatches& begin(int64_t step, std::vector<Batch> given);
  /// How many the data has for that step, where these depend on the step.
  int64_t count_batches(int64_t step);
  /// The step that began last.
  const StepBatches& current() const { return current_; }

  /// The loss scale that the next steps are taken to have until they begin.
  void expect_loss_scale(double scale) { loss_scale_ = scale; }
  /// Of a step of the run that is not given its batches.
  void read_ahead(Use use) override;
  bool began_with_read() const override { return began_with_read_; }

 private:
  void read(int64_t step, StepBatches& to) const;
  void read_contexts(int64_t step, StepBatches& to) const;
  void count_labels(StepBatches& batches) const;
  void view(StepBatches& batches) const;

  const Settings& settings_;
  const TrainingData& data_;
  const RunLayout& layout_;
  int64_t max_sequences_;
  std::optional<ContextBatches> contexts_;
  StepBatches current_;
  StepBatches next_;  // the thread's while it reads
  bool began_with_read_ = false;
  bool is_given_ = false;  // the current step
  double loss_scale_ = 1;
  HelperThread thread_;  // last: it uses the others
};

}  // namespace tessera
