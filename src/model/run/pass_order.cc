#include "model/run/pass_order.h"

#include <algorithm>

namespace tessera {
namespace {

using enum ProgramPart;
using enum PassDirection;

bool predicts(const PipelineChunk& chunk, int64_t layer) {
  return layer >= chunk.num_layers;
}

std::vector<ProgramRef> list_forward(const StagePrograms& programs, const PipelineChunk& chunk) {
  std::vector<ProgramRef> pass;
  if (chunk.embedding) pass.push_back({kEmbedding, kForward, 0});
  for (int64_t i = 0; i < chunk.all_layers(); ++i) {
    if (predicts(chunk, i)) pass.push_back({kLayerEmbedding, kForward, i});
    pass.push_back({kLayer, kForward, i});
  }
  if (!chunk.loss) return pass;
  for (int64_t depth = 0; depth <= programs.config.mtp_layers; ++depth)
    pass.push_back({kHead, kForward, depth});
  return pass;
}

/// The forward pass the other way round, the heads in front: a layer's embeddings get their
/// gradient from the layer.
std::vector<ProgramRef> list_backward(const StagePrograms& programs, const PipelineChunk& chunk) {
  std::vector<ProgramRef> pass = list_forward(programs, chunk);
  std::ranges::reverse(pass);
  for (ProgramRef& ref : pass) ref.direction = kBackward;
  return pass;
}

std::vector<ProgramRef> list_weights(const StagePrograms& programs, const PipelineChunk& chunk) {
  std::vector<ProgramRef> pass;
  for (int64_t i = chunk.all_layers(); i-- > 0;) {
    if (programs.kind_of(chunk.first_layer + i).derived.weights)
      pass.push_back({kLayer, kWeights, i});
  }
  return pass;
}

const Executable& choose(const DerivedProgram& derived, PassDirection direction) {
  if (direction == kForward) return derived.forward;
  if (direction == kBackward) return derived.backward;
  ensure(derived.weights.has_value(), "weight gradients are not split off");
  return derived.weights->program;
}

/// The programs that an accumulating one belongs to.
struct Origin {
  const ModelProgram& layout;
  const DerivedProgram& derived;
  PassDirection direction;

  const std::vector<Link>& accumulators() const {
    if (direction == kForward) return layout.accumulators;
    return direction == kBackward ? derived.derived.accumulators
                                  : derived.weights->derived.accumulators;
  }
};

ProgramParameters find_parameters(const Program& run, const Origin& origin,
                                  const ParameterSet& parameters, const WeightNames& names = {}) {
  return tessera::find_parameters(run, origin.derived.forward.program(), origin.accumulators(),
                                  parameters, names);
}

std::string_view direction_name(PassDirection direction) {
  return direction == kForward    ? "forward"
         : direction == kBackward ? "backward"
                                  : "weight gradients";
}

std::string describe_part(const PipelineChunk& chunk, const ProgramRef& ref) {
  switch (ref.part) {
    case kEmbedding:
      return "embedding";
    case kLayer:
      return fmt::format("layer {}", chunk.first_layer + ref.idx);
    case kLayerEmbedding:
      return fmt::format("embedding of layer {}", chunk.first_layer + ref.idx);
    case kHead:
      return ref.idx == 0 ? "head" : fmt::format("head of prediction {}", ref.idx);
    case kEvaluationHead:
      break;
  }
  return "head without gradients";
}

}  // namespace

std::vector<ProgramRef> list_pass(const StagePrograms& programs, const PipelineChunk& chunk,
                                  PassDirection direction) {
  if (direction == kForward) return list_forward(programs, chunk);
  return direction == kBackward ? list_backward(programs, chunk) : list_weights(programs, chunk);
}

std::vector<ProgramRef> list_evaluation(const PipelineChunk& chunk) {
  std::vector<ProgramRef> pass;
  if (chunk.embedding) pass.push_back({kEmbedding, kForward, 0});
  for (int64_t i = 0; i < chunk.num_layers; ++i) pass.push_back({kLayer, kForward, i});
  if (chunk.loss) pass.push_back({kEvaluationHead, kForward, 0});
  return pass;
}

const Executable& find_executable(const StagePrograms& programs, const PipelineChunk& chunk,
                                  const ProgramRef& ref) {
  switch (ref.part) {
    case kEmbedding:
    case kLayerEmbedding:
      return choose(*programs.embedding, ref.direction);
    case kLayer:
      return choose(programs.kind_of(chunk.first_layer + ref.idx).derived, ref.direction);
    case kHead:
      return choose(programs.heads.at(ref.idx).derived, ref.direction);
    case kEvaluationHead:
      break;
  }
  return *programs.evaluation_head;
}

ProgramParameters find_parameters(const StagePrograms& programs, const PipelineChunk& chunk,
                                  const ProgramRef& ref, const ParameterSet& parameters) {
  const Program& run = find_executable(programs, chunk, ref).program();
  const int64_t layer = chunk.first_layer + ref.idx;
  switch (ref.part) {
    case kEmbedding:
    case kLayerEmbedding:
      return find_parameters(run, {programs.embedding_layout, *programs.embedding, ref.direction},
                             parameters);
    case kLayer:
      return find_parameters(
          run, {programs.kind_of(layer).layout, programs.kind_of(layer).derived, ref.direction},
          parameters, {&programs.config, layer});
    case kHead:
      break;
    case kEvaluationHead:
      return tessera::find_parameters(run, run, programs.evaluation_layout.accumulators,
                                      parameters);
  }
  const HeadPasses& head = programs.heads.at(ref.idx);
  return find_parameters(run, {head.layout, head.derived, ref.direction}, parameters);
}

std::string describe(const PipelineChunk& chunk, const ProgramRef& ref) {
  return fmt::format("{}, {}", direction_name(ref.direction), describe_part(chunk, ref));
}

}  // namespace tessera
