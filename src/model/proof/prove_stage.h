#pragma once

#include <set>
#include <string>
#include <vector>

#include "model/run/stage_programs.h"
#include "sharding/infer_sharding.h"

namespace tessera {

/// One program of a stage, and how its values are spread over the stage's ranks.
struct ProvenProgram {
  std::string title;  ///< "moe_layer, backward"
  Program program;
  Shardings values;
  RankAxes axes;  ///< that they are of: by the key-value heads of its layers

  /// How a value is spread.
  std::string describe(ValueId id) const { return axes.describe(values[id]); }
};

/// The axes over which the gradient of a weight still is a partial sum when a step's backward
/// passes are done: those along which ranks hold the same part.
struct SummedWeight {
  std::string name;
  bool expert = false;    ///< held by the factoring of the experts
  int64_t tp_copies = 1;  ///< WeightPlacement's
  int64_t kv_heads = 1;   ///< of its layer, by which `axes` are of RankAxes
  std::set<RankAxis> axes;
  bool operator==(const SummedWeight&) const = default;
};

struct StageProof {
  std::vector<ProvenProgram> programs;
  std::vector<SummedWeight> weights;
  ShardingFaults faults;
};

/// A program and, where it is trained, what was derived of it.
struct ProgramParts {
  const ModelProgram& layout;
  const Program& forward;
  struct Backwards {
    const Program& program;
    const Backward& links;
  };
  /// The backward program, and behind it the weights' part where that is split off.
  std::vector<Backwards> backwards = {};
  /// Values of the backward program that the weights' part reads.
  std::vector<KeptValue> kept = {};
  /// What makes the copies of weights that these read by their names; null where there are none.
  const Program* copies = nullptr;
};

/// What one rank's program computes is a rank's part of what a single rank computes, whatever the
/// numbers: checked by following from what it is bound to, as ports (what each is) and placements
/// of weights say, to what the ports give, to the gradients of inputs, which must be spread as the
/// inputs' transpose, and likewise to those of weights. Adds to the proof what was found.
void prove_program(const ProgramParts& parts, const RankAxes& axes, const StageGroups& groups,
                   StageProof& proof);

/// The same for all programs of a stage, as they run: after all passes of the compiler. What is
/// left to the caller is that each weight's gradient is summed over SummedWeight::axes, no more and
/// no less.
StageProof prove_stage(const StagePrograms& stage);

}  // namespace tessera
