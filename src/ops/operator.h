#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include "ops/operands.h"
#include "ops/value_type.h"

namespace tessera {

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
/// Immutable. How it runs is a kernel of the same name in a back end's KernelTable. The concrete
/// class names its operands by `enum Input : int` and `enum Output : int`, whose enumerators are
/// their positions, or, where some depend on the attributes, members of its input_set() or
/// output_set() (ops/operands.h); and its name by kName.
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
  /// Of output `idx`, which is the extent of ragged values: what it is where routing is balanced
  /// and the inputs are as large as these types; -1: the bound that infer() gives for them.
  virtual int64_t balanced_extent(int /*output*/, std::span<const ValueType> /*inputs*/) const {
    return -1;
  }
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
};

/// What the kernels of a back end share: a stream, handles of libraries. Each back end has its own.
class KernelContext {
 public:
  KernelContext() = default;
  KernelContext(const KernelContext&) = delete;
  KernelContext& operator=(const KernelContext&) = delete;
  virtual ~KernelContext() = default;

  /// An I64 scalar of the device, once it has come to what writes it.
  virtual int64_t read_count(const Tensor& count);
  /// Another number whenever work that was recorded before must be recorded anew.
  virtual int64_t version() const { return 0; }
};

/// The tensors of one call. On the host ragged dims have their actual extents, but for outputs
/// whose extent this very operator computes: those come at their bound, and the kernel writes the
/// extent. On a GPU all come at their bound, and `extents` has, inputs first, where in the GPU's
/// memory the I64 extent of each ragged one is (null for the others). Outputs that nobody reads may
/// be null views only where they accumulate. `workspace` has at least the bytes that the kernel
/// asks for, 64-byte aligned, undefined content. Where `set_accumulators`, which only kernels that
/// can are given (KernelOptions::sets_accumulators), accumulators hold nothing yet and are written
/// rather than added to; then no input has a bound of 0 elements, nor, on the host, 0 elements.
struct KernelArgs {
  std::span<const Tensor> inputs;
  std::span<const Tensor> outputs;
  std::span<std::byte> workspace;
  std::span<const int64_t* const> extents = {};
  KernelContext* context = nullptr;
  bool set_accumulators = false;

  /// By position.
  const Tensor& in(int64_t idx) const { return inputs[idx]; }
  const Tensor& out(int64_t idx) const { return outputs[idx]; }
  const int64_t* in_extent(int64_t idx) const { return extents[idx]; }
  const int64_t* out_extent(int64_t idx) const { return extents[std::ssize(inputs) + idx]; }
};

/// The same for one class of operators, by the names of its operands.
template <typename Op>
class Args : public KernelArgs {
 public:
  using Input = typename Op::Input;
  using Output = typename Op::Output;

  Args(const Op& op, const KernelArgs& args) : KernelArgs(args), op_(op) {}

  const Tensor& in(Input input) const { return inputs[input_position(op_, input)]; }
  const Tensor& out(Output output) const { return outputs[output_position(op_, output)]; }
  const int64_t* in_extent(Input input) const { return extents[input_position(op_, input)]; }
  const int64_t* out_extent(Output output) const {
    return extents[std::ssize(inputs) + output_position(op_, output)];
  }
  /// An operand that only some operators of the class have; null where this one has not.
  const Tensor* find_in(Input input) const {
    return op_.input_set().has(input) ? &in(input) : nullptr;
  }
  const Tensor* find_out(Output output) const {
    return op_.output_set().has(output) ? &out(output) : nullptr;
  }

 private:
  const Op& op_;
};

/// Bytes of scratch memory for inputs of these types, ragged dims at their bounds.
template <typename Op>
using WorkspaceBytes = std::function<int64_t(const Op& op, std::span<const ValueType> inputs)>;

/// Whether a kernel computes with values of a format.
using FormatRule = bool (*)(const Format& format);

/// Elements without scales, of every type but those of files alone and FP8, which has scales.
bool is_unscaled(const Format& format);
/// Those, and F16.
bool takes_f16(const Format& format);

/// What a kernel needs and can.
template <typename Op>
struct KernelOptions {
  /// None: it needs no scratch memory.
  WorkspaceBytes<Op> workspace = {};
  /// It can write accumulators rather than add to them.
  bool sets_accumulators = false;
  /// It gives the host values that it waits for: a device that repeats recorded work runs it anew
  /// each time.
  bool tells_the_host = false;
  FormatRule takes = is_unscaled;
};

/// How an operator runs in a back end: a function that computes the outputs; or, where the operator
/// communicates, one that starts an exchange and returns what to wait for. A started exchange may
/// use the tensors' memory and the scratch memory until it was waited for, but no longer its
/// arguments themselves. Kernels are made by add_kernel, for one class of operators: to be given
/// another is an InternalError.
class Kernel {
 public:
  using Run = std::function<void(const Operator& op, const KernelArgs& args)>;
  using Start = std::function<Pending(const Operator& op, const KernelArgs& args)>;

  Kernel() = default;

  /// The kernel that calls run(const Op&, const Args<Op>&), or run(const Op&, const KernelArgs&),
  /// which returns nothing or a Pending. With Op = Operator it is for operators of any class.
  template <typename Op, typename Function>
  static Kernel of(Function run, const KernelOptions<Op>& options = {});

  bool is_asynchronous() const { return start_ != nullptr; }
  bool tells_the_host() const { return options_.tells_the_host; }
  bool sets_accumulators() const { return options_.sets_accumulators; }
  bool takes(const Format& format) const { return options_.takes(format); }
  FormatRule format_rule() const { return options_.takes; }
  int64_t workspace_bytes(const Operator& op, std::span<const ValueType> inputs) const;
  /// Runs to the end.
  void operator()(const Operator& op, const KernelArgs& args) const;
  /// Runs, or starts, the operator.
  Pending start(const Operator& op, const KernelArgs& args) const;

 private:
  void check_class(const Operator& op) const;

  const std::type_info* class_ = nullptr;
  Run run_;
  Start start_;
  KernelOptions<Operator> options_;
};

template <typename Op, typename Function>
Kernel Kernel::of(Function run, const KernelOptions<Op>& options) {
  // The class was checked before any of these is called.
  const auto call = [run](const Operator& op, const KernelArgs& args) {
    const Op& concrete = static_cast<const Op&>(op);
    if constexpr (std::is_invocable_v<Function, const Op&, const KernelArgs&>) {
      return run(concrete, args);
    } else {
      return run(concrete, Args<Op>(concrete, args));
    }
  };
  Kernel kernel;
  if (!std::is_same_v<Op, Operator>) kernel.class_ = &typeid(Op);
  using Result = std::invoke_result_t<decltype(call), const Operator&, const KernelArgs&>;
  if constexpr (std::is_void_v<Result>) {
    kernel.run_ = call;
  } else {
    kernel.start_ = call;
  }
  kernel.options_ = {.sets_accumulators = options.sets_accumulators,
                     .tells_the_host = options.tells_the_host,
                     .takes = options.takes};
  if (options.workspace) {
    kernel.options_.workspace = [bytes = options.workspace](const Operator& op,
                                                            std::span<const ValueType> inputs) {
      return bytes(static_cast<const Op&>(op), inputs);
    };
  }
  return kernel;
}

/// The kernels of a back end by operator name.
using KernelTable = std::map<std::string, Kernel, std::less<>>;

/// Adds the kernel of the operators of class Op that have this name, in place of any before.
template <typename Op, typename Function>
void add_kernel(KernelTable& table, std::string_view name, Function run,
                const KernelOptions<Op>& options = {}) {
  table.insert_or_assign(std::string(name), Kernel::of<Op>(run, options));
}

/// The same for a class whose operators have one name.
template <typename Op, typename Function>
requires(!std::is_convertible_v<Function, std::string_view>) void add_kernel(
    KernelTable& table, Function run, const KernelOptions<Op>& options = {}) {
  add_kernel<Op>(table, Op::kName, run, options);
}

/// Throws UserError naming the operator unless `ok`: for shape rules.
template <typename... Parts>
void check_shape(const Operator& op, bool ok, fmt::format_string<Parts...> format,
                 Parts&&... parts) {
  if (!ok) user_error("{}: {}", op.name(), fmt::format(format, std::forward<Parts>(parts)...));
}

}  // namespace tessera
