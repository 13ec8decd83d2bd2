#pragma once

#include <memory>
#include <vector>

#include "model/run/pipeline_executor.h"
#include "train/state/model_state.h"

namespace tessera {

/// Whole optimizer steps of a rank that is alone: all micro-batches forward and backward, the
/// gradients' norm, clipping, and AdamW. The device is given all of a step before the host waits
/// for its losses and norm, once; AdamW then goes on beside what the host does and beside the next
/// step's forward passes. Not thread-safe. All references must outlive it.
///
/// The first step's kernels are launched one by one; the second is recorded, and from then on a
/// step is one launch (RunControl::graphs), with what the host changes from step to step in memory
/// that the device reads: inputs, the learning rate, what clips. What needs the host within a step
/// keeps it from being recorded, which is noted once; so do observers, for their step.
class RecordedSteps {
 public:
  /// REQUIRES state.is_alone(). `records` says whether whole steps may be recorded.
  RecordedSteps(TrainingModel& model, ModelState& state, PipelineExecutor& executor,
                const Backend& backend, bool records);
  ~RecordedSteps();

  struct Result {
    MicroBatchResult parts;
    StepResult update;  ///< a loss that is not finite makes its norm NaN
  };
  Result run(const std::vector<MicroBatch>& batches, const LossScales& scales,
             const StepInput& input, const NodeObserver& observer = {});

 private:
  enum class State : uint8_t {
    kNew,  ///< no step was run: kernels may still make what they keep
    kRun,  ///< one was
    kRecorded,
    kPlain,  ///< steps cannot be recorded
  };

  Device& device() const { return backend_.device(); }
  int64_t kernel_version() const;
  void drop_old_recording();
  void begin();
  /// Whether the device is to repeat what it recorded.
  bool give(const std::vector<MicroBatch>& batches, const LossScales& scales,
            const StepInput& input, const NodeObserver& observer);
  void give_plainly(const std::vector<MicroBatch>& batches, const LossScales& scales,
                    const StepInput& input, const NodeObserver& observer);
  void record(const std::vector<MicroBatch>& batches, const LossScales& scales,
              const StepInput& input);
  void record_update();
  void note(const std::string& why_not);

  TrainingModel& model_;
  ModelState& state_;
  PipelineExecutor& executor_;
  Backend backend_;
  std::unique_ptr<DeviceEvent> given_;  ///< behind the last step's clipping
  std::unique_ptr<RecordedWork> work_;
  std::unique_ptr<RecordedWork> update_;  ///< on the side lane; null where it is not recorded
  State phase_;
  int64_t version_ = 0;        ///< of the kernels' context
  int64_t num_operators_ = 0;  ///< in the recording
};

}  // namespace tessera
