#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace tessera {

/// Index of a value in its program.
using ValueId = int32_t;

/// What is known of a value before it runs. At most one dim is *ragged*: its extent in `shape` is
/// the upper bound, and the actual extent is the I64 scalar value `extent`, which some operator
/// computes at run time. In the result of Operator::infer, `extent` may name one of that operator's
/// own outputs by own_output(i), or one of its inputs by own_input(i).
struct ValueType {
  DType dtype = DType::kF32;
  Shape shape;
  int ragged_dim = -1;
  ValueId extent = -1;

  bool ragged() const { return ragged_dim >= 0; }
  int64_t num_bytes() const { return shape.num_elements() * dtype_size(dtype); }
  bool operator==(const ValueType&) const = default;
  /// "bf16 [<=4096 ragged, 512]".
  std::string to_string() const;
};

/// Marks an extent that is output `output` of the operator being inferred.
constexpr ValueId own_output(int output) {
  return -2 - output;
}
/// Marks an extent that is input `input` of the operator being inferred.
constexpr ValueId own_input(int input) {
  return std::numeric_limits<ValueId>::min() + input;
}
/// The index of an extent made by own_output or own_input; -1 for any other.
constexpr int own_output_index(ValueId extent) {
  return extent <= own_output(0) && extent > own_input(0) / 2 ? own_output(0) - extent : -1;
}
constexpr int own_input_index(ValueId extent) {
  return extent <= own_input(0) / 2 ? extent - own_input(0) : -1;
}

/// `type` with another element type or another shape; raggedness is kept.
ValueType with_dtype(ValueType type, DType dtype);
ValueType with_last_dim(ValueType type, int64_t last);

/// What an operator costs at its bound. `flops` are *model* FLOPs: a multiply-add counts 2, work
/// that an operator does again to save memory (attention's backward scores, say) is not counted.
/// `bytes` are the fewest that must move through memory.
struct Cost {
  double flops = 0;
  double bytes = 0;
  Cost& operator+=(const Cost& other);
};

class Operator;
class Pending;  // comm/communicator.h
using OperatorPtr = std::shared_ptr<const Operator>;

/// What a gradient rule may use. The program that differentiates implements it.
class GradientBuilder {
 public:
  virtual ~GradientBuilder() = default;

  /// The forward values. Asking for one makes it a saved value of the backward program.
  virtual ValueId input(int idx) = 0;
  virtual ValueId output(int idx) = 0;
  /// The gradient that has reached output `idx`; nullopt where none has (then it is zero).
  virtual std::optional<ValueId> grad_output(int idx) = 0;
  /// Whether the gradient of input `idx` is wanted.
  virtual bool needs_grad(int idx) const = 0;
  virtual const ValueType& input_type(int idx) const = 0;
  /// The forward value that is the extent of ragged input `idx`.
  virtual ValueId input_extent(int idx) = 0;

  /// Adds `op` to the backward program and returns its outputs. Outputs for which op->accumulates()
  /// holds are the FP32 gradient accumulators of the forward *weight* inputs listed in
  /// `accumulators`, in the order of those outputs.
  virtual std::vector<ValueId> emit(OperatorPtr op, const std::vector<ValueId>& inputs,
                                    const std::vector<int>& accumulators = {}) = 0;
  /// Gives the gradient of forward input `idx`. Called again for the same value, the gradients are
  /// added.
  virtual void set_grad_input(int idx, ValueId grad) = 0;
};

/// An operator: its attributes (members of the concrete class), shape rule, cost and gradient rule.
/// Immutable. How it runs is a kernel of the same name in a back end's KernelTable.
class Operator {
 public:
  virtual ~Operator() = default;

  /// The name that kernels are registered under, e.g. "rmsnorm".
  virtual std::string_view name() const = 0;
  /// Attributes for the printed program, e.g. "eps=1e-05"; "" where there are none.
  virtual std::string attributes() const { return ""; }
  /// The shape rule. Throws UserError where the inputs do not fit.
  virtual std::vector<ValueType> infer(std::span<const ValueType> inputs) const = 0;
  virtual Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const;
  /// The gradient rule. The default throws InternalError: the operator has none.
  virtual void differentiate(GradientBuilder& builder) const;
  /// Whether output `idx` is a gradient accumulator that the kernel adds into.
  virtual bool accumulates(int /*output*/) const { return false; }
  /// Whether a pass may run the operator again instead of keeping its outputs (routing decisions
  /// may not).
  virtual bool recomputable() const { return true; }
  /// Whether the operator exchanges data with other ranks. All ranks of a group must run such
  /// operators in the same order, so passes keep it. Their kernels may only start the exchange:
  /// memory plans and the interpreter hold inputs, outputs and scratch memory until it is waited
  /// for (program/dependencies.h).
  virtual bool communicates() const { return false; }
  /// Scratch memory that the CPU kernel needs, planned with the values.
  virtual int64_t cpu_workspace_bytes(std::span<const ValueType> /*inputs*/) const { return 0; }
};

/// What the kernels of a back end share: a stream, handles of libraries. Each back end has its own.
class KernelContext {
 public:
  KernelContext() = default;
  KernelContext(const KernelContext&) = delete;
  KernelContext& operator=(const KernelContext&) = delete;
  virtual ~KernelContext() = default;

  /// Another number whenever work that was recorded before must be recorded anew.
  virtual int64_t version() const { return 0; }
};

/// The tensors of one call. On the host ragged dims have their actual extents, but for outputs
/// whose extent this very operator computes: those come at their bound, and the kernel writes the
/// extent. On a GPU all come at their bound, and `extents` has, inputs first, where in the GPU's
/// memory the I64 extent of each ragged one is (null for the others). Outputs that nobody reads may
/// be null views only where they accumulate. `workspace` has at least the bytes that the kernel
/// asks for, 64-byte aligned, undefined content. Where `set_accumulators`, which only kernels that
/// can are given (Kernel::setting_accumulators), accumulators hold nothing yet and are written
/// rather than added to; then no input has a bound of 0 elements, nor, on the host, 0 elements.
struct KernelArgs {
  std::span<const Tensor> inputs;
  std::span<const Tensor> outputs;
  std::span<std::byte> workspace;
  std::span<const int64_t* const> extents = {};
  KernelContext* context = nullptr;
  bool set_accumulators = false;

  const Tensor& in(size_t idx) const { return inputs[idx]; }
  const Tensor& out(size_t idx) const { return outputs[idx]; }
  const int64_t* in_extent(size_t idx) const { return extents[idx]; }
  const int64_t* out_extent(size_t idx) const { return extents[inputs.size() + idx]; }
};

/// How an operator runs in a back end: a function that casts `op` to the concrete operator that its
/// name stands for, and computes the outputs; or, where the operator communicates, one that starts
/// an exchange and returns what to wait for. A started exchange may use the tensors' memory and the
/// scratch memory until it was waited for, but no longer `args` itself.
class Kernel {
 public:
  using Run = void (*)(const Operator& op, const KernelArgs& args);
  using Start = Pending (*)(const Operator& op, const KernelArgs& args);
  /// Bytes of scratch memory for inputs of these types, ragged dims at their bounds.
  using WorkspaceBytes = int64_t (*)(const Operator& op, std::span<const ValueType> inputs);

  Kernel() = default;
  Kernel(Run run) : run_(run) {}
  /// With scratch memory of its own size, rather than Operator::cpu_workspace_bytes.
  Kernel(Run run, WorkspaceBytes workspace) : run_(run), workspace_(workspace) {}
  Kernel(Start start) : start_(start) {}
  Kernel(Start start, WorkspaceBytes workspace) : start_(start), workspace_(workspace) {}

  /// This kernel, which can write accumulators rather than add to them.
  Kernel setting_accumulators() const {
    Kernel kernel = *this;
    kernel.sets_accumulators_ = true;
    return kernel;
  }

  /// This kernel, which gives the host values that it waits for: a device that repeats recorded
  /// work runs it anew each time.
  Kernel telling_the_host() const {
    Kernel kernel = *this;
    kernel.tells_the_host_ = true;
    return kernel;
  }

  bool is_asynchronous() const { return start_ != nullptr; }
  bool tells_the_host() const { return tells_the_host_; }
  bool sets_accumulators() const { return sets_accumulators_; }
  WorkspaceBytes workspace() const { return workspace_; }
  /// Runs to the end.
  void operator()(const Operator& op, const KernelArgs& args) const;
  /// Runs, or starts, the operator.
  Pending start(const Operator& op, const KernelArgs& args) const;

 private:
  Run run_ = nullptr;
  Start start_ = nullptr;
  WorkspaceBytes workspace_ = nullptr;
  bool sets_accumulators_ = false;
  bool tells_the_host_ = false;
};

/// The kernels of a back end by operator name.
using KernelTable = std::map<std::string, Kernel, std::less<>>;

/// Throws UserError naming the operator unless `ok`: for shape rules.
template <typename... Args>
void check_shape(const Operator& op, bool ok, fmt::format_string<Args...> format, Args&&... args) {
  if (!ok) user_error("{}: {}", op.name(), fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace tessera
