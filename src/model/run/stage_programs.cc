#include "model/run/stage_programs.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "model/batch/model_balance.h"
#include "model/build/layer_builder.h"
#include "model/layers/layer_program.h"
#include "model/layers/vocabulary_program.h"

namespace tessera {
namespace {

/// Which gradients a layer is given and which it gives.
DifferentiateRequest layer_gradients(const ModelProgram& layout, bool balances_whole) {
  DifferentiateRequest request{
      {layout.at(Port::kHiddenOut)}, {layout.at(Port::kHidden)}, frozen_weights(layout)};
  if (layout.has(Port::kZLoss)) {
    const Port balance = balances_whole ? Port::kScoreMeans : Port::kBalanceLoss;
    request.outputs.push_back(layout.at(Port::kZLoss));
    if (layout.has(balance)) request.outputs.push_back(layout.at(balance));
  }
  if (layout.has(Port::kEmbedded)) {
    request.inputs.push_back(layout.at(Port::kEmbedded));
    // Other readers of the hidden states have given their gradient already.
    request.outputs.push_back(layout.at(Port::kHidden));
  }
  return request;
}

/// What rows are gathered from is as large as the worst routing, and what was permuted can be
/// stashed.
GatherFusion find_gathers(const StagePrograms& stage, const LayerProgramKey& key) {
  const GatherFusion asked = stage.config.moe.fuse_gather;
  return key.stashes && asked == GatherFusion::kAuto ? GatherFusion::kNever : asked;
}

/// A program as the model has it, and how it is compiled.
struct CompileRequest {
  ModelProgram layout;
  CompileOptions options;
};

CompileRequest request_layer(const StagePrograms& stage, const LayerProgramKey& key) {
  ModelProgram layout = build_layer(stage.config, key.kind, stage.shape, stage.part.groups);
  CompileOptions options{.gradients = layer_gradients(layout, balances_whole_model(stage.config)),
                         .recompute = key.recomputed,
                         .gathers = find_gathers(stage, key),
                         .fuse_activations = stage.config.moe.fuse_activation,
                         .split_weights = stage.part.split_weights,
                         .rounding = stage.shape.products.rounding(key.plain),
                         .offload = key.offloaded,
                         .stash = key.stashes ? stage.stash_rule() : std::nullopt};
  return {std::move(layout), std::move(options)};
}

CompileRequest request_embedding(const StagePrograms& stage) {
  ModelProgram layout = build_embedding(stage.config, stage.shape, stage.part.groups);
  CompileOptions options{.gradients = {{layout.at(Port::kHiddenOut)}, {}, frozen_weights(layout)}};
  return {std::move(layout), std::move(options)};
}

CompileRequest request_head(const StagePrograms& stage, int64_t depth) {
  ModelProgram layout = build_head(stage.config, stage.shape, stage.part.groups, true, depth);
  CompileOptions options{
      .gradients = {{layout.at(Port::kLoss)}, {layout.at(Port::kHidden)}, frozen_weights(layout)}};
  return {std::move(layout), std::move(options)};
}

/// Takes the request's program away.
DerivedProgram derive(CompileRequest& request, const Backend& backend) {
  return derive(std::exchange(request.layout.forward, Program()), request.options, backend);
}

CompileReport report(CompileRequest request, const Backend& backend) {
  return report_passes(std::move(request.layout.forward), Goal::kTrain, request.options, backend);
}

/// Completes what the caller left open.
ModelPart complete(ModelPart part, const ModelConfig& config) {
  if (part.chunks.empty()) part.chunks = {whole_model(config)};
  if (part.in_flight.empty()) part.in_flight.resize(part.chunks.size(), 1);
  ensure(part.in_flight.size() == part.chunks.size(), "{} chunks with {} depths",
         part.chunks.size(), part.in_flight.size());
  return part;
}

void build_embedding_program(StagePrograms& stage, const Backend& backend) {
  if (stage.embedding) return;
  CompileRequest request = request_embedding(stage);
  stage.embedding = std::make_shared<const DerivedProgram>(derive(request, backend));
  stage.embedding_layout = std::move(request.layout);
}

void build_head_programs(StagePrograms& stage, const Backend& backend) {
  for (int64_t depth = 0; depth <= stage.config.mtp_layers; ++depth) {
    CompileRequest request = request_head(stage, depth);
    DerivedProgram derived = derive(request, backend);
    stage.heads.push_back({std::move(request.layout), std::move(derived)});
  }
  stage.evaluation_layout = build_head(stage.config, stage.shape, stage.part.groups, false);
  Compiled evaluation =
      compile(std::exchange(stage.evaluation_layout.forward, Program()), Goal::kInfer, {}, backend);
  stage.evaluation_head =
      std::make_shared<const Executable>(std::move(evaluation.forward), backend);
}

/// The names of what a layer's forward program computes.
std::set<std::string> names_computed(const Program& forward) {
  std::set<std::string> names;
  for (const Value& value : forward.values()) {
    if (value.kind == ValueKind::kIntermediate) names.insert(value.name);
  }
  return names;
}

/// Layers are those of the whole model: a stage need not have every kind.
void check_recompute(const StagePrograms& stage) {
  if (stage.policy.recompute.empty()) return;
  std::map<LayerKind, std::set<std::string>> of_kinds;
  std::vector<std::set<std::string>> values;
  for (int64_t i = 0; i < stage.config.all_layers(); ++i) {
    const LayerKind kind = stage.config.layer_kind(i);
    if (!of_kinds.contains(kind)) {
      of_kinds.emplace(
          kind,
          names_computed(build_layer(stage.config, kind, stage.shape, stage.part.groups).forward));
    }
    values.push_back(of_kinds.at(kind));
  }
  check_recompute(stage.policy, values);
}

/// Likewise.
void check_plain(const StagePrograms& stage) {
  if (stage.shape.products.plain.empty()) return;
  std::vector<std::set<std::string>> weights;
  for (int64_t i = 0; i < stage.config.all_layers(); ++i) {
    const ModelProgram layer =
        build_layer(stage.config, stage.config.layer_kind(i), stage.shape, stage.part.groups);
    const std::vector<std::string> names = product_weights(layer.forward);
    weights.emplace_back(names.begin(), names.end());
  }
  check_plain(stage.shape.products, weights);
}

/// Of what may be offloaded.
std::set<std::string> names_kept(const Executable& forward) {
  std::set<std::string> names;
  for (ValueId id = 0; id < forward.program().num_values(); ++id) {
    if (!may_wait_elsewhere(forward.program().type(id))) continue;
    const Storage storage = forward.plan().values[id].storage;
    if (storage == Storage::kSaved || storage == Storage::kOffloaded)
      names.insert(forward.program().value(id).name);
  }
  return names;
}

/// Likewise of all layers, whose programs show what they keep.
void check_offload(const StagePrograms& stage) {
  if (stage.policy.offload.entries.empty()) return;
  std::map<LayerProgramKey, std::set<std::string>> of_keys;
  std::vector<std::set<std::string>> kept;
  for (int64_t i = 0; i < stage.config.all_layers(); ++i) {
    LayerProgramKey key = stage.key_of(i);
    // Of layers elsewhere it does not matter what they offload of it.
    if (!stage.kinds.contains(key)) key.offloaded.clear();
    const auto [found, is_new] = of_keys.try_emplace(key);
    if (is_new) found->second = names_kept(stage.compile_kind(key).derived.forward);
    kept.push_back(found->second);
  }
  check_offload(stage.policy, kept);
}

/// What a rank has of a micro-batch is the same for every degree.
BatchShape shape_of_degree(const BatchShape& shape, const StageGroups& groups, int64_t degree) {
  BatchShape result = shape;
  result.num_tokens = shape.num_tokens / groups.ring->size() * degree;
  result.sequence_length = std::min(shape.sequence_length, result.num_tokens);
  return result;
}

void build_degrees(StagePrograms& stage) {
  const StageGroups& groups = stage.part.groups;
  stage.of_degrees.clear();
  require(groups.by_degree.empty() || stage.backend.is_host(),
          "parallel.dynamic_cp is for CPUs so far: attention on GPUs shares rows among ranks, not "
          "documents; set run.device = \"cpu\", or leave parallel.dynamic_cp out");
  for (size_t i = 0; i < groups.by_degree.size(); ++i) {
    ModelPart part = stage.part;
    part.groups = groups.with_degree(i);
    stage.of_degrees.push_back(std::make_shared<const StagePrograms>(
        stage.config, shape_of_degree(stage.shape, groups, part.groups.ring->size()),
        std::move(part), stage.policy, stage.backend));
  }
}

void compile_kinds(StagePrograms& stage) {
  for (const PipelineChunk& chunk : stage.part.chunks) {
    for (int64_t i = 0; i < chunk.all_layers(); ++i) {
      const LayerProgramKey key = stage.key_of(chunk.first_layer + i);
      stage.of_layers[chunk.first_layer + i] = &stage.compile_kind(key);
      stage.kinds.emplace(key, stage.compiled->at(key));
    }
  }
}

}  // namespace

StagePrograms::StagePrograms(const ModelConfig& model, const BatchShape& batch,
                             ModelPart model_part, const SavedPolicy& saved_policy,
                             const Backend& where)
    : config(model),
      shape(batch),
      part(complete(std::move(model_part), model)),
      backend(where),
      policy(saved_policy),
      compiled(std::make_shared<KindPrograms>()) {
  check_shares(config, shape, part.groups);
  check_recompute(*this);
  check_plain(*this);
  for (const PipelineChunk& chunk : part.chunks) {
    if (chunk.embedding || chunk.num_mtp > 0) build_embedding_program(*this, backend);
    if (chunk.loss) build_head_programs(*this, backend);
  }
  compile_kinds(*this);
  check_offload(*this);
  build_degrees(*this);
}

std::unique_ptr<StagePrograms> StagePrograms::with_policy(const SavedPolicy& other) const {
  auto stage = std::make_unique<StagePrograms>(*this);
  stage->policy = other;
  stage->kinds.clear();
  stage->of_layers.clear();
  compile_kinds(*stage);
  for (auto& programs : stage->of_degrees) programs = programs->with_policy(other);
  return stage;
}

const KindProgram& StagePrograms::compile_kind(const LayerProgramKey& key) const {
  auto& program = (*compiled)[key];
  if (!program) {
    CompileRequest request = request_layer(*this, key);
    DerivedProgram derived = derive(request, backend);
    program = std::make_shared<const KindProgram>(
        KindProgram{std::move(request.layout), std::move(derived)});
  }
  return *program;
}

std::optional<StashRule> StagePrograms::stash_rule() const {
  if (!policy.stash || config.moe.num_experts == 0) return std::nullopt;
  const double rows = policy.stash->factor * static_cast<double>(balanced_rows());
  return StashRule{.page_bytes = align_up(policy.stash->page_rows * config.hidden_size *
                                          dtype_size(shape.dtype)),
                   .rows = static_cast<int64_t>(std::ceil(rows))};
}

int64_t StagePrograms::working_bytes() const {
  int64_t bytes = 0;
  const auto include = [&](const Executable& program) {
    bytes = std::max(bytes, program.plan().transient_bytes);
  };
  const auto include_both = [&](const DerivedProgram& program) {
    include(program.forward);
    include(program.backward);
    if (program.weights) include(program.weights->program);
  };
  if (embedding) include_both(*embedding);
  for (const HeadPasses& head : heads) include_both(head.derived);
  if (evaluation_head) include(*evaluation_head);
  for (const auto& [kind, program] : kinds) include_both(program->derived);
  for (const auto& programs : of_degrees) bytes = std::max(bytes, programs->working_bytes());
  return bytes;
}

int64_t StagePrograms::backward_working() const {
  if (!part.merges_passes) return 0;
  // No page is of both.
  return align_up(working_bytes(), std::max(kAlignment, backend.device().page_bytes()));
}

double StagePrograms::model_flops() const {
  double flops = 0;
  for (const PipelineChunk& chunk : part.chunks) {
    if (chunk.embedding) flops += embedding->model_flops;
    if (chunk.loss) {
      for (const HeadPasses& head : heads) flops += head.derived.model_flops;
    }
    for (int64_t i = 0; i < chunk.all_layers(); ++i)
      flops += kind_of(chunk.first_layer + i).derived.model_flops;
  }
  return flops;
}

std::vector<CompileReport> StagePrograms::compile_reports() const {
  std::vector<CompileReport> reports;
  if (embedding) reports.push_back(report(request_embedding(*this), backend));
  for (const auto& [key, program] : kinds)
    reports.push_back(report(request_layer(*this, key), backend));
  for (int64_t depth = 0; depth < std::ssize(heads); ++depth)
    reports.push_back(report(request_head(*this, depth), backend));
  return reports;
}

}  // namespace tessera
