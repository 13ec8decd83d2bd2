#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory.h"
#include "core/tensor.h"
#include "ops/adamw/state_formats.h"
#include "ops/backend.h"
#include "optim/muon_kind.h"
#include "optim/state_windows.h"

namespace tessera {

struct OptimizerOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  /// Whether every parameter is decayed; otherwise only matrices are (rank 2 and more).
  bool decay_all = false;
  /// How the state is kept.
  StateFormats formats = {};
  /// Of parameters that Muon updates; they are decayed alike.
  MuonOptions muon = {};
};

/// The host with the kernels that an optimizer needs.
Backend optimizer_on_host();

/// The tensor's elements in one dim.
inline Tensor flat(Tensor tensor) {
  tensor.shape = {tensor.num_elements()};
  return tensor;
}

/// A parameter as the optimizer sees it: views that must outlive it.
struct Parameter {
  std::string name;
  Tensor weight;  ///< F32: the master itself; BF16: with what StateFormats keeps beside it; E4M3
  Tensor grad;    ///< F32, or BF16 where AdamW updates it, of the weight's shape
  /// Whether it is decayed; unset, OptimizerOptions and its rank decide.
  std::optional<bool> decay = std::nullopt;
  double lr_multiplier = 1.0;
  /// The numbers of rows of the matrices that it consists of, one below the other, where Muon
  /// updates it, matrix by matrix. Empty: AdamW does.
  std::vector<int64_t> matrix_rows = {};
  /// Whether these are but parts of matrices.
  MatrixCut cut = {};
  /// Whether its rows have factors (Optimizer::set_row_factors).
  bool scales_rows = false;
  /// Of a weight in E4M3, each update of whose master it is cast from: one for a block of 128 x 128
  /// (QuantizeBlocks).
  Tensor scales = {};

  bool is_fp8() const { return weight.dtype == DType::kE4M3; }
  /// What ranks gather of it.
  int64_t weight_bytes() const { return weight.num_bytes() + (is_fp8() ? scales.num_bytes() : 0); }
  bool has_second_moment() const { return matrix_rows.empty(); }
  bool is_decayed(bool decay_all) const {
    return decay.value_or(decay_all || weight.shape.rank() >= 2);
  }
  /// How its state is kept where `formats` are asked for.
  StateFormats kept(const StateFormats& formats) const {
    return formats.of_rank(weight.shape.rank());
  }
};

/// Told of an update's operators by name, when the device is next synchronised, with the times at
/// which it did the work.
using UpdateObserver =
    std::function<void(std::string_view what, Device::Time begin, Device::Time end)>;

/// Parameters, by their places in an optimizer's list, that are updated together.
struct UpdateGroups {
  std::vector<std::vector<size_t>> groups = {};  ///< each parameter once; none: all at a time
  /// Whether their state is in the host's memory, from where StateWindows bring that of a group,
  bool on_host = false;
  /// or where the host's threads update it (HostUpdates). REQUIRES on_host, and no matrices.
  bool updated_on_host = false;
};

struct StepInput {
  int64_t step_idx = 0;        ///< updates made before this one
  double lr = 0.0;             ///< before each parameter's multiplier
  double max_grad_norm = 0.0;  ///< the global norm is clipped to this; 0: not clipped
  double grad_scale = 1.0;     ///< what the gradients are multiplied by before anything else
  UpdateObserver observer = {};
};

struct StepResult {
  double grad_norm = 0.0;  ///< the global norm before clipping, grad_scale included
  double clip_factor = 1.0;
  bool updated = false;  ///< false where the norm is NaN or infinite: then nothing has changed
};

class HostUpdates;

/// AdamW over a list of parameters, and Muon over those of them that are made of matrices; owns m,
/// v and what is kept beside BF16 weights. One update:
///   norm = sqrt(Σ over parameters of Σ (grad · grad_scale)²), summed in double in the order of the
///   list; clip = min(1, max_grad_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_;
///   operator `adamw`, or those of MuonKind, on every parameter with scale grad_scale · clip.
/// A parameter with a zero gradient (an expert that saw no token) is decayed all the same. The
/// result does not depend on the number of threads. Not thread-safe.
class Optimizer {
 public:
  /// Weights and gradients are in the memory of the back end's device, and so is the state. Masters
  /// start as the BF16 weights' values, those of weights in FP8, m and v as zeros. Throws UserError
  /// for options out of range or formats that the device has no kernel for, InternalError for
  /// tensors that do not fit together.
  Optimizer(const std::vector<Parameter>& parameters, const OptimizerOptions& options,
            const Backend& backend = optimizer_on_host(), UpdateGroups groups = {});
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// The global norm of grad · grad_scale.
  double grad_norm(double grad_scale);
  /// Clips and updates.
  StepResult step(const StepInput& input);

  /// The parts of a step, each of which gives the device work and returns. The host's part: what
  /// the step is to be, which the device reads when it comes to the clipping. REQUIRES that it has
  /// come to that of the last step.
  void prepare(const StepInput& input);
  /// The norm of tensors, F32 or BF16, of which number i is no larger than parameter i, and what it
  /// and the losses, F32 [1], which the device reaches, make of the step: where one of them is not
  /// finite, update() does nothing. REQUIRES that all updates of the last step come before.
  void give_clip(std::span<const Tensor> grads, std::span<const Tensor> losses = {},
                 const UpdateObserver& observer = {});
  /// What came of it, once the device has come to it. A loss that was not finite makes the norm
  /// NaN.
  StepResult clip_result() const;
  /// What updates multiply the rows of parameters with `scales_rows` by, at their end, until the
  /// next call: `fill` is given the factors of one after the other, F32 [rows], 1 each. Moments
  /// stay as they are. REQUIRES that the device has come to the end of the last update.
  void set_row_factors(const std::function<void(size_t parameter, std::span<float> factors)>& fill);
  /// The update of parameters, by their places in the list. Those of one kind are one operator.
  /// What is FP8 of them is cast behind it.
  void update(std::span<const size_t> parameters, const UpdateObserver& observer = {}) const;

  /// The parts where gradients are updated with, and gone, before all are there: what the host has
  /// prepared;
  void give_factors();
  /// what a group's gradients alone make of its update, which is not to clip, and
  void give_group_clip(size_t group, const UpdateObserver& observer = {});
  /// after all groups the norm for clip_result(), from the same sums, in the order of the groups,
  /// or, for whoever has but a part of the gradients, these sums, which are waited for.
  std::vector<double> group_sums();
  void give_norm(std::span<const Tensor> losses, const UpdateObserver& observer = {});

  /// The update of a group with all that goes around it, for whoever has no plan of it.
  void update_group(size_t group, const UpdateObserver& observer = {});

  /// Where the state is in the host's memory, as StateWindows': a group's is loaded before it is
  /// updated, and stored behind that.
  bool streams_state() const { return windows_ != nullptr; }
  StateWindows& windows() { return *windows_; }

  /// Where the host updates, in place of update(): a group's gradients are brought, updated with,
  /// and its weights taken back, each of which is started, and waited for on the device, as
  /// HostUpdates'. The host's part is told to the observer as kOnHost, when the device is next
  /// synchronised behind wait_updated(), or by finish_updates().
  static constexpr std::string_view kOnHost = "adamw on the host";
  bool updates_on_host() const { return host_ != nullptr; }
  HostUpdates& host_updates() { return *host_; }
  void store_gradients(size_t group);
  void update_on_host(size_t group, const UpdateObserver& observer = {});
  void wait_updated(size_t group);
  /// Returns when no update is under way on the host: before its state or weights are looked at.
  void finish_updates();

  /// The parts for whoever has but a part of the gradients, in place of give_clip(). Σ x² in double
  /// of such tensors, which is waited for;
  std::vector<double> sums_of_squares(std::span<const Tensor> grads,
                                      const UpdateObserver& observer = {});
  /// what a step makes of the sum over all gradients (`updated` says whether it is to go on);
  static StepResult judge(double sum_of_squares, const StepInput& input);
  /// and what update() is to do about it.
  void give_factors(double grad_scale, const StepResult& result);

  /// Views of all state, parameter by parameter, of the weight's shape: "<parameter>.m",
  /// "<parameter>.v" where AdamW updates it and, beside a BF16 weight, "<parameter>." and its
  /// master_suffix. Behind a moment that has scales come these, "<parameter>.m_scale" or
  /// "<parameter>.v_scale", of shape_of_scales. After filling masters call round_masters.
  std::vector<NamedTensor> state() const;
  /// How many of these are of one parameter, by its place in the list.
  int num_state_tensors(size_t parameter) const;
  /// What a checkpoint has as the weight: of one in FP8 the F32 master, which state() leaves out.
  const Tensor& weight(size_t parameter) const { return slots_[parameter].parameter.weight; }
  /// Casts all weights in FP8 anew: after their masters were filled.
  void cast_weights() const;
  /// Gives the masters, F32 of the weight's shape in the host's memory, to `change` one by one, and
  /// keeps what it makes of them. The weights must be these rounded, or become so.
  void change_masters(
      const std::function<void(size_t parameter, const Tensor& master)>& change) const;
  /// Sets the BF16 weights to their masters, rounded, where these are F32.
  void round_masters() const;
  /// Sets the masters to the BF16 weights, exactly but for the sign of zeros: after the weights
  /// were loaded or initialised without masters.
  void reset_masters() const;

  /// The bytes of state for such parameters: exactly what an optimizer allocates for it. Only dtype
  /// and shape of the weights are read, and of what matrices they are.
  static int64_t state_bytes(std::span<const Parameter> parameters,
                             const StateFormats& formats = {});
  int64_t state_bytes() const { return state_memory().num_bytes(); }
  /// Of the device's memory, where such groups' state is in the host's: exactly what is allocated
  /// to update in.
  static int64_t window_bytes(std::span<const Parameter> parameters, const StateFormats& formats,
                              const UpdateGroups& groups);
  /// Of the host's memory, where it updates such groups: what is allocated beside their state.
  static int64_t host_window_bytes(std::span<const Parameter> parameters,
                                   const UpdateGroups& groups);
  /// The same of the scratch memory in which Muon updates matrices.
  static int64_t workspace_bytes(std::span<const Parameter> parameters,
                                 const OptimizerOptions& options, const Backend& backend);
  int64_t workspace_bytes() const { return muon_workspace_.num_bytes(); }
  /// What Muon multiplies in an update of such parameters; the rest of an update is moving bytes.
  static double update_flops(std::span<const Parameter> parameters,
                             const OptimizerOptions& options);

 private:
  /// A parameter with its state and its operator.
  struct Slot {
    Parameter parameter;  // of a weight in FP8 as if it were the master
    Tensor cast = {};     // that weight, and its scales
    Tensor cast_scales = {};
    Tensor master;  // or the remainder; the weight itself where nothing is beside it
    Tensor m;
    Tensor v;                   // of AdamW alone
    Tensor m_scale, v_scale;    // of moments that have scales
    std::vector<size_t> kinds;  // of each matrix; of AdamW one
    MasterKind beside;
    StateFormats formats;
    size_t group = 0;
    Tensor row_factors = {};            // F32 [rows]; null where rows have none
    OperatorPtr row_scaling = nullptr;  // likewise
    bool scales_now = false;            // whether one of them is not 1

    template <typename Remainder>
    void change_remainder(const std::function<void(const Tensor& master)>& change) const;
  };

  /// What parameters, or matrices, that are updated with the same factors share.
  struct Kind {
    OperatorPtr adamw;             // or
    std::optional<MuonKind> muon;  // where that is null
    double lr_multiplier;
    int64_t num_matrices = 0;
  };

  /// Who updates, with what: the device, or the host on its behalf.
  struct Updater {
    const Backend& backend;
    Tensor factors;     ///< as StepTensors'
    Tensor grad_scale;  ///< likewise
  };
  Updater on_device() const { return {backend_, own_.factors, own_.grad_scale}; }
  /// Whose memory at_work() tells.
  const Backend& worker() const { return host_ ? host_backend_ : backend_; }

  void find_kinds(Slot& slot);
  size_t find_adamw(const Parameter& parameter);
  static std::vector<size_t> find_muon(const Parameter& parameter, const OptimizerOptions& options,
                                       const Backend& backend, std::vector<Kind>& kinds);
  static int64_t workspace_bytes(std::span<const Kind> kinds);
  static Tensor factors_of(size_t kind, const Tensor& all);
  void update(const Updater& updater, std::span<const size_t> parameters,
              const UpdateObserver& observer) const;
  void update_in_window(size_t group, std::span<const float> factors) const;
  void update_by_adamw(const Updater& updater, size_t kind, std::span<const size_t> parameters,
                       const UpdateObserver& observer) const;
  void update_by_muon(size_t kind, std::span<const size_t> parameters,
                      const UpdateObserver& observer) const;
  static void append_matrices(const Slot& slot, size_t kind, std::vector<MuonMatrix>& matrices);
  void scale_rows(size_t parameter, const UpdateObserver& observer) const;
  void cast_weight(size_t parameter, const UpdateObserver& observer) const;
  /// Gives each parameter to `change`, whose state is at work then, and is kept. It reads weights,
  /// or writes them.
  enum class WeightUse : uint8_t { kRead, kWrite };
  void change_state(WeightUse use, const std::function<void(size_t parameter)>& change) const;
  void change_in_windows(WeightUse use, const std::function<void(size_t parameter)>& change) const;
  void reset_master(size_t parameter) const;
  void place_slots(const std::vector<Parameter>& parameters);
  void place_row_factors();
  const Buffer& state_memory() const;
  Slot at_work(size_t parameter) const;
  Slot in_window(Slot slot, size_t parameter) const;
  Tensor give_sums(std::span<const Tensor> grads, const UpdateObserver& observer,
                   int64_t first = 0);
  std::vector<double> read_sums(const Tensor& sums);
  std::vector<Tensor> all_grads() const;
  Slot make_slot(const Parameter& parameter, int64_t state_offset) const;

  static void run_kernel(const Backend& backend, const Operator& op, std::span<const Tensor> inputs,
                         std::span<const Tensor> outputs, std::span<std::byte> workspace,
                         const UpdateObserver& observer);
  void run_kernel(const Operator& op, std::span<const Tensor> inputs,
                  std::span<const Tensor> outputs, std::span<std::byte> workspace,
                  const UpdateObserver& observer) const {
    run_kernel(backend_, op, inputs, outputs, workspace, observer);
  }

  Backend backend_;
  Backend host_backend_;  // of updates on the host
  OptimizerOptions options_;
  OperatorPtr sum_of_squares_;
  OperatorPtr grad_clip_;
  OperatorPtr cast_;
  OperatorPtr widen_;        // adds BF16 to F32
  std::vector<Kind> kinds_;  // before the memory, which is kept until the device is past it
  UpdateGroups groups_;
  Buffer state_;                           // or
  std::unique_ptr<StateWindows> windows_;  // where the host has it
  Buffer workspace_;
  Buffer muon_workspace_;
  Buffer row_factors_;  // which the host and the device reach
  /// Small tensors of a step. Of the host's and the device's part, one is a copy of the other.
  struct StepTensors {
    Buffer memory;
    Tensor sums;        ///< F64, of each parameter
    Tensor limits;      ///< F64 [2], as GradClip's
    Tensor norm;        ///< F64 [2], likewise
    Tensor grad_scale;  ///< F32 [2], likewise
    Tensor factors;     ///< F32 [kinds, 8]: AdamWFactors or MuonFactors
  };
  StepTensors make_step_tensors(MemoryKind kind) const;

  StepTensors shared_;  ///< which the host reaches
  StepTensors own_;     ///< the device's
  std::vector<Slot> slots_;

  /// When the host did a group's update, for whoever is to be told.
  struct HostTimes {
    UpdateObserver observer;
    Device::Time begin, end;
  };
  static void tell(const HostTimes& times) { times.observer(kOnHost, times.begin, times.end); }
  std::vector<std::shared_ptr<HostTimes>> host_times_;  // by group, until they are told
  std::unique_ptr<HostUpdates> host_;  // null elsewhere; last, since its work uses all of the above
};

}  // namespace tessera
