#pragma once

#include <string>
#include <vector>

#include "model/run/stage_programs.h"
#include "model/weights/weight_store.h"

namespace tessera {

/// What a program of a chunk's pass computes.
enum class ProgramPart : uint8_t {
  kEmbedding,
  kLayer,           ///< `idx` among the chunk's layers, those of multi-token prediction behind
  kLayerEmbedding,  ///< the embeddings that a layer of multi-token prediction reads; `idx` likewise
  kHead,            ///< `idx` is its depth
  kEvaluationHead,
};

enum class PassDirection : uint8_t {
  kForward,
  kBackward,
  kWeights,  ///< the weights' gradients, where they are split off
};

/// One program of a chunk.
struct ProgramRef {
  ProgramPart part = ProgramPart::kEmbedding;
  PassDirection direction = PassDirection::kForward;
  int64_t idx = 0;

  bool operator==(const ProgramRef&) const = default;
};

/// The programs of a pass over a chunk in the order in which they run. The weights' pass has none
/// unless StagePrograms::part splits weights.
std::vector<ProgramRef> list_pass(const StagePrograms& programs, const PipelineChunk& chunk,
                                  PassDirection direction);
/// The same for a forward pass whose loss is all that is wanted: without multi-token prediction.
std::vector<ProgramRef> list_evaluation(const PipelineChunk& chunk);

const Executable& find_executable(const StagePrograms& programs, const PipelineChunk& chunk,
                                  const ProgramRef& ref);
/// The parameters that it touches. Of `parameters` only names are read.
ProgramParameters find_parameters(const StagePrograms& programs, const PipelineChunk& chunk,
                                  const ProgramRef& ref, const ParameterSet& parameters);
/// "forward, layer 7"; layers counted in the model.
std::string describe(const PipelineChunk& chunk, const ProgramRef& ref);

}  // namespace tessera
