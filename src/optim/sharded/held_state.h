#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/slice.h"
#include "optim/optimizer.h"

namespace tessera {

/// kHeld: all that a rank has. kOwned: its part if each element of the model is to be named by
/// exactly one rank, as for saving.
enum class HeldPart : uint8_t { kHeld, kOwned };

/// Sets what neighbouring rows of a parameter are multiplied by behind updates; `first_row` is the
/// first one's number in the global tensor.
using FillRowFactors =
    std::function<void(const std::string& parameter, int64_t first_row, std::span<float> factors)>;

/// Rows of a parameter whose optimizer state one rank keeps.
struct HeldParameter {
  Parameter parameter;  ///< weight and gradient: the held rows alone
  Slice slice;          ///< the held rows' part of the global tensor
  IndexRange owned;     ///< those of the held rows that no other rank owns
  /// Whether this rank is the one that names a global tensor without elements.
  bool names_empty = false;
};

/// The optimizer of what one rank holds of a model, with the norm and the names of the whole model:
/// what all ways of sharding have in common.
class HeldState {
 public:
  /// Memory of the parameters must outlive it.
  HeldState(std::vector<HeldParameter> parameters, CommunicatorPtr world,
            const OptimizerOptions& options, const Backend& backend = optimizer_on_host(),
            UpdateGroups groups = {});

  /// Whether this is the only rank, which needs no other to know the norm.
  bool is_alone() const { return world_->size() == 1; }
  /// What a step makes of the gradients of all ranks of the world, each owned element counting
  /// once: the same bits on all ranks, who all call it. update() does nothing where it is not to.
  StepResult judge(const StepInput& input);
  /// The same of gradients that are gone, from what the updates of all groups found.
  StepResult judge_updated(const StepInput& input);
  /// The same without waiting for it, as Optimizer's. REQUIRES is_alone().
  void prepare(const StepInput& input) { optimizer_.prepare(input); }
  void give_clip(std::span<const Tensor> losses, const UpdateObserver& observer);
  StepResult clip_result() const { return optimizer_.clip_result(); }
  /// The parts of an update of groups, or from the host's memory.
  Optimizer& optimizer() { return optimizer_; }
  /// Updates the held rows of parameters, by their places in the list.
  void update(std::span<const size_t> parameters, const UpdateObserver& observer) const {
    optimizer_.update(parameters, observer);
  }

  /// As Optimizer's.
  std::vector<NamedSlice> state_slices(HeldPart part) const;
  /// Optimizer's change_masters, under the names of the parameters.
  void change_masters(const std::function<void(const NamedSlice& master)>& change) const;
  /// As Optimizer's, of the held rows.
  void set_row_factors(const FillRowFactors& fill);
  std::vector<NamedSlice> weight_slices(HeldPart part) const;
  std::vector<NamedSlice> gradient_slices(HeldPart part) const;

  /// As Optimizer's.
  void round_masters() const { optimizer_.round_masters(); }
  void reset_masters() const { optimizer_.reset_masters(); }
  int64_t state_bytes() const { return optimizer_.state_bytes(); }
  int64_t workspace_bytes() const { return optimizer_.workspace_bytes(); }

 private:
  std::vector<Tensor> owned_gradients() const;
  double sum_over_ranks(const std::vector<double>& sums) const;
  void append(std::vector<NamedSlice>& slices, size_t idx, HeldPart part,
              const NamedTensor& tensor) const;

  std::vector<HeldParameter> parameters_;
  CommunicatorPtr world_;
  Optimizer optimizer_;
};

}  // namespace tessera
