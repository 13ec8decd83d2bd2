#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/backend.h"
#include "ops/gather.h"
#include "program/compile/recompute.h"
#include "program/compile/split_weights.h"
#include "program/compile/stash_rows.h"
#include "program/rounding/round_operands.h"

namespace tessera {

/// What a program is compiled for.
enum class Goal : uint8_t {
  kTrain,  ///< forward and backward
  kInfer,  ///< forward only, nothing is kept
};
std::string_view goal_name(Goal goal);

/// What the passes are told. Recomputation, gradients and the split are of training alone.
struct CompileOptions {
  DifferentiateRequest gradients = {};
  /// Names that are no saved value of this program are ignored; see check_recompute.
  RecomputePolicy recompute = {};
  GatherFusion gathers = GatherFusion::kAuto;
  bool fuse_activations = false;
  bool split_weights = false;
  /// Where set, rows are not gathered as they are read, but for FP8 products beside weights'
  /// gradients of what is not rounded.
  std::optional<OperandRounding> rounding = std::nullopt;
  /// Saved values of these names, or with "all" every one, get a slab of their own, so that they
  /// can wait elsewhere until they are read. Other names are ignored, and what may not wait there.
  std::vector<std::string> offload = {};
  /// Where set, other saved values wait in pages of a pool; not with `split_weights`.
  std::optional<StashRule> stash = std::nullopt;
};

/// Whether a saved value may be brought elsewhere and back. Numbers of rows are few bytes and stay:
/// the host may know them by where they lie (ops/cuda/host_counts.h).
bool may_wait_elsewhere(const ValueType& type);

/// The size of one program, planned as it is.
struct ProgramFigures {
  int64_t num_nodes = 0;
  int64_t saved_bytes = 0;  ///< outlive a run
  int64_t transient_bytes = 0;

  bool operator==(const ProgramFigures&) const = default;
};

/// The programs' sizes after a pass; all zero for a program that is not there.
struct PassEffect {
  std::string_view pass;  ///< "as built" before the first one
  std::string_view what;  ///< what it does, in one line
  ProgramFigures forward, backward, weights;
};

/// What compiling a program comes to, pass by pass, of the passes that apply.
struct CompileReport {
  std::string program;
  Goal goal = Goal::kTrain;
  std::vector<PassEffect> effects;
};

/// The weights' part of a backward program, where it is split off.
struct CompiledWeights {
  Backward derived;
  std::vector<KeptValue> kept;
};

/// A forward program and what was derived of it, ready to be planned for a back end.
struct Compiled {
  Program forward;
  std::vector<ValueId> saved;      ///< values of the forward program that the backward ones read
  std::vector<ValueId> offloaded;  ///< those of them that CompileOptions::offload names
  std::optional<Backward> backward;
  /// Values of the backward program that the weights' part reads.
  std::vector<ValueId> kept;
  std::optional<CompiledWeights> weights;
  /// Inputs of the programs that are made of weights (OperandRounding::keeps_copies).
  WeightCopies weight_copies = {};
  double model_flops = 0;  ///< forward and backward, without what recomputation runs again
};

/// A program on its way through the passes.
struct Compilation {
  Goal goal;
  const CompileOptions& options;
  const Backend& backend;
  Compiled programs;
};

/// A step of the compiler. Passes keep what the programs compute, to the bit, except fuse_sums,
/// which rounds a sum once, and round_operands.
struct Pass {
  std::string_view name;
  std::string_view what;  ///< in one line
  bool (*applies)(const Compilation& compilation);
  void (*run)(Compilation& compilation);
};

/// All passes in their order, those of training among them.
std::span<const Pass> compile_passes();

/// Runs the passes that apply. Throws InternalError for options of training with another goal, and
/// for a training program without a gradient to begin from.
Compiled compile(Program forward, Goal goal, const CompileOptions& options, const Backend& backend);

/// Compiles likewise and plans the memory of what each pass leaves.
CompileReport report_passes(Program forward, Goal goal, const CompileOptions& options,
                            const Backend& backend);

}  // namespace tessera
