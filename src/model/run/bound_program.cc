#include "model/run/bound_program.h"

namespace tessera {

BoundProgram& BoundChunk::find(const ProgramRef& ref) {
  const auto choose = [&](BoundPasses& passes) -> BoundProgram& {
    return ref.direction == PassDirection::kForward ? passes.forward : passes.backward;
  };
  switch (ref.part) {
    case ProgramPart::kEmbedding:
      return choose(embedding);
    case ProgramPart::kLayerEmbedding:
      return choose(layers.at(ref.idx).embedding);
    case ProgramPart::kHead:
      return choose(heads.at(ref.idx));
    case ProgramPart::kEvaluationHead:
      return evaluation;
    case ProgramPart::kLayer:
      break;
  }
  BoundLayer& layer = layers.at(ref.idx);
  return ref.direction == PassDirection::kForward    ? layer.forward
         : ref.direction == PassDirection::kBackward ? layer.backward
                                                     : layer.weights;
}

}  // namespace tessera
