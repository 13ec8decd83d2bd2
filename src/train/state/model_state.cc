#include "train/state/model_state.h"

#include <algorithm>
#include <set>

#include "comm/planned_world.h"
#include "model/layers/residual_blocks.h"
#include "model/layers/vocabulary_program.h"
#include "model/weights/qk_clip.h"
#include "ops/adamw/moment_blocks.h"
#include "ops/quantize/quantize_blocks.h"
#include "train/setup/replica_groups.h"
#include "train/state/local_matrices.h"
#include "train/state/modules.h"

namespace tessera {
namespace {

/// Each rank finds the scales of the blocks that it keeps, which must be those of the whole weight.
void require_whole_blocks(const Settings& settings, const ProductPrecision& products,
                          std::span<const ParameterSpec> held) {
  std::set<std::string> stored;
  for (const ParameterSpec& spec : list_parameters(settings.model, DType::kBF16, products)) {
    if (spec.is_fp8()) stored.insert(spec.name);
  }
  require(!stored.empty(),
          "precision.primary_weights = \"fp8\", but no weight is read by rounded products alone "
          "and of multiples of 128 rows and columns; leave precision.primary_weights out");
  for (const ParameterSpec& spec : held) {
    if (!stored.contains(spec.name)) continue;
    const Slice& slice = spec.placement.slice;
    const auto cut = find_cut_block(slice);
    require(spec.is_fp8() && !cut,
            "precision.primary_weights = \"fp8\" keeps a scale for 128 x 128 elements, but this "
            "layout gives a rank {} of the {} of {}; choose degrees of parallelism such that parts "
            "are multiples of 128, or leave precision.primary_weights out",
            cut.value_or(slice.to_string()), slice.global.to_string(), spec.name);
  }
}

std::vector<ParameterSpec> held_parameters(const Settings& settings, const RunLayout& run) {
  const ProductPrecision products = batch_shape(settings).products;
  auto specs = list_parameters(settings.model, settings.train.dtype(), run.part.groups,
                               run.part.chunks, products);
  if (products.fp8_weights) require_whole_blocks(settings, products, specs);
  return specs;
}

/// The elements of a weight alone.
Tensor elements_of_weight(const ModelParameter& parameter) {
  Tensor elements = parameter.weight;
  elements.scale = {};
  return elements;
}

/// Of a weight in FP8; it may have no address yet.
Tensor scales_of_weight(const ModelParameter& parameter) {
  if (!parameter.spec.is_fp8()) return {};
  if (parameter.weight) return scales_of(parameter.weight);
  return {nullptr, DType::kF32, shape_of_block_scales(parameter.spec.shape)};
}

/// On one rank there is nothing to share out.
bool shards_fully(const Settings& settings, const RunLayout& run) {
  return settings.shard.scope == ShardScope::kFull && run.num_ranks() > 1;
}

GradientPlaces gradient_places(const Settings& settings, const RunLayout& run) {
  if (settings.shard.gradients != DType::kF32) return GradientPlaces::kRounded;
  if (!settings.shard.release_gradients) return GradientPlaces::kApart;
  return run.num_ranks() == 1 ? GradientPlaces::kLayersInTurn : GradientPlaces::kTwoInTurn;
}

ShardingOptions sharding_of(const Settings& settings, const RunLayout& run) {
  ShardingOptions sharding = settings.shard.replicated();
  sharding.layers_at_a_time = run.num_ranks() == 1 ? 1 : 2;
  return sharding;
}

ParameterSet make_parameters(const Settings& settings, const RunLayout& run, Device& device) {
  auto specs = held_parameters(settings, run);
  if (shards_fully(settings, run)) return ParameterSet::without_memory(std::move(specs));
  return {std::move(specs), true, device, gradient_places(settings, run)};
}

/// Each rank finds the scales of the moments that it keeps.
void require_whole_blocks(const StateFormats& formats, const ParameterSpec& spec) {
  const Slice& slice = spec.placement.slice;
  if (slice.global.rank() < 2 || !formats.have_scales() || has_whole_blocks(slice)) return;
  const bool first = has_scales(formats.first_moment);
  user_error(
      "optim.{}_moment = \"{}\" keeps a scale for {} elements of a row, but this layout gives a "
      "rank columns {} to {} of the {} of {}; choose parallel.tp so that parts are multiples of "
      "{} columns, or moments in f32 or bf16",
      first ? "first" : "second", moment_name(first ? formats.first_moment : formats.second_moment),
      kMomentBlock, slice.columns.begin, slice.columns.end(), slice.global[1], spec.name,
      kMomentBlock);
}

/// A share of such matrices begins and ends between blocks.
void require_whole_blocks(const ParameterSpec& spec, const std::vector<int64_t>& matrix_rows) {
  const int64_t block = QuantizeBlocks::kBlock;
  const auto cut =
      std::ranges::find_if(matrix_rows, [&](int64_t rows) { return rows % block != 0; });
  require(
      !spec.is_fp8() || cut == matrix_rows.end(),
      "precision.primary_weights = \"fp8\" keeps a scale for 128 rows, but optim.name = \"muon\" "
      "updates {} in matrices of {}; set optim.name = \"adamw\", or leave "
      "precision.primary_weights out",
      spec.name, cut == matrix_rows.end() ? 0 : *cut);
}

bool is_clipped(const ModelConfig& config, const ParameterSpec& spec) {
  return spec.layer && find_clipped_rows(config, layer_weight_name(config, spec)).has_value();
}

/// Trained parameters as the optimizer's list has them, which are the first of the set. Where
/// gradients are released on one rank, a layer's are updated together, whoever else held them if
/// there were more.
std::vector<ReplicatedParameter> list_replicated(const ParameterSet& parameters,
                                                 const ReplicaGroups& groups,
                                                 const Settings& settings, const RunLayout& run) {
  const bool together = settings.shard.release_gradients && run.num_ranks() == 1;
  std::vector<ReplicatedParameter> result;
  for (const ModelParameter& parameter : parameters.all()) {
    const ParameterSpec& spec = parameter.spec;
    if (parameter.is_frozen()) break;  // and all behind it
    LocalMatrices matrices;
    require_whole_blocks(settings.optimizer.formats, spec);
    const size_t group = groups.find(spec);
    const bool clips = settings.qk_clip > 0 && is_clipped(settings.model, spec);
    if (settings.optimizer_kind == OptimizerKind::kMuon)
      matrices = local_matrices(spec.name, spec.placement, groups.all()[group].parts);
    require_whole_blocks(spec, matrices.rows);
    result.push_back({.parameter = {.name = spec.name,
                                    .weight = elements_of_weight(parameter),
                                    .grad = parameter.grad,
                                    .matrix_rows = std::move(matrices.rows),
                                    .cut = std::move(matrices.cut),
                                    .scales_rows = clips,
                                    .scales = scales_of_weight(parameter)},
                      .slice = spec.placement.slice,
                      .group = together ? 0 : group,
                      .layer = spec.layer});
  }
  return result;
}

/// A head's small weights are gathered together, as a layer's are: with biases or those of residual
/// streams there are more than buffers for modules that it needs at a time.
std::optional<int64_t> layer_of_module(const ParameterSpec& spec) {
  constexpr int64_t kBeforeHead = -1;
  const bool is_small = spec.name == head_norm_name(0) || spec.name == head_norm_bias_name(0) ||
                        spec.name == "head.bias" || spec.name.starts_with(head_streams_name(0));
  if (is_small) return kBeforeHead;
  if (!spec.name.starts_with("mtp_heads.")) return spec.layer;
  return kBeforeHead - 1 - std::stoll(mtp_layer_of(spec.name));
}

std::vector<std::vector<size_t>> modules_of(const ParameterSet& parameters) {
  std::vector<std::optional<int64_t>> layers;
  for (const ModelParameter& parameter : parameters.all())
    layers.push_back(layer_of_module(parameter.spec));
  return list_modules(layers);
}

ModelState::Bytes sum_up(const FullySharded::Bytes& bytes) {
  return {.weights = bytes.weights + bytes.weight_buffers,
          .gradients = bytes.gradients + bytes.gradient_buffers + bytes.staging,
          .optimizer = bytes.state + bytes.workspace};
}

std::vector<ReplicaPlace> places_of(const std::vector<ReplicaGroup>& groups) {
  std::vector<ReplicaPlace> places;
  for (const ReplicaGroup& group : groups) places.push_back({group.size(), group.rank()});
  return places;
}

/// The weights that are not trained: whole, or the rows that this rank saves, an even share of
/// those that its replicas hold alike.
std::vector<NamedSlice> list_frozen(const ParameterSet& parameters, const ReplicaGroups& groups,
                                    HeldPart part) {
  std::vector<NamedSlice> slices;
  const std::vector<ReplicaPlace> places = places_of(groups.for_reduction());
  for (const ModelParameter& parameter : parameters.all()) {
    if (!parameter.is_frozen()) continue;
    const Slice& slice = parameter.spec.placement.slice;
    const ReplicaPlace& place = places[groups.find(parameter.spec)];
    IndexRange rows{0, slice.num_rows()};
    if (part == HeldPart::kOwned) {
      const int64_t begin = slice.num_rows() * place.rank / place.size;
      rows = {begin, slice.num_rows() * (place.rank + 1) / place.size - begin};
    }
    if (rows.count > 0)
      slices.push_back({parameter.spec.name, take_rows(parameter.weight, rows),
                        slice.take_rows(rows.begin, rows.count)});
  }
  return slices;
}

int64_t count_frozen_bytes(const ParameterSet& parameters, const ReplicaGroups& groups) {
  int64_t bytes = 0;
  for (const NamedSlice& slice : list_frozen(parameters, groups, HeldPart::kOwned))
    bytes += align_up(slice.tensor.num_bytes());
  return bytes;
}

/// Bytes of weights and state of the rows that a rank owns, whether or not it keeps others' too.
int64_t owned_bytes(const std::vector<ReplicaGroup>& groups,
                    std::span<const ReplicatedParameter> parameters, ShardingOptions sharding,
                    const StateFormats& formats) {
  sharding.shard_state = true;
  const auto owned = ShardedOptimizer::list_held(places_of(groups), parameters, sharding);
  int64_t bytes = Optimizer::state_bytes(owned, formats);
  for (const Parameter& parameter : owned) bytes += align_up(parameter.weight.num_bytes());
  return bytes;
}

NamedSlice whole_slice(const NamedTensor& tensor) {
  return {tensor.name, tensor.tensor, Slice::whole(tensor.tensor.shape)};
}

}  // namespace

ModelState::Bytes ModelState::count_bytes(const Settings& settings, const RunLayout& run,
                                          const Backend& backend) {
  const auto specs = held_parameters(settings, run);
  const auto parameters = ParameterSet::planned(specs, gradient_places(settings, run));
  const auto world = make_planned_world(run.rank(), run.num_ranks());
  const ReplicaGroups groups(settings, run, *world);
  const auto replicated = list_replicated(parameters, groups, settings, run);
  if (shards_fully(settings, run)) {
    return sum_up(FullySharded::count_bytes(groups.for_full_sharding(), replicated,
                                            modules_of(parameters), settings.shard.full(),
                                            settings.optimizer, backend));
  }
  const auto replicas = groups.for_reduction();
  const auto places = places_of(replicas);
  const auto sizes = ParameterSet::count_bytes(specs, true, gradient_places(settings, run));
  const ShardingOptions sharding = sharding_of(settings, run);
  const StateFormats& formats = settings.optimizer.formats;
  const int64_t state = ShardedOptimizer::state_bytes(places, replicated, sharding, formats);
  const int64_t on_host = sharding.state_on_host ? state + ShardedOptimizer::host_window_bytes(
                                                               places, replicated, sharding)
                                                 : 0;
  const int64_t at_work =
      sharding.state_on_host ? ShardedOptimizer::window_bytes(places, replicated, sharding, formats)
                             : state;
  return {.weights = sizes.weights,
          .gradients = sizes.gradients +
                       ShardedOptimizer::count_staging(replicas, replicated, sharding, backend),
          .optimizer = at_work + ShardedOptimizer::workspace_bytes(places, replicated, sharding,
                                                                   settings.optimizer, backend),
          .on_host = on_host};
}

int64_t ModelState::count_saved_bytes(const Settings& settings, const RunLayout& run) {
  const auto parameters =
      ParameterSet::planned(held_parameters(settings, run), gradient_places(settings, run));
  const auto world = make_planned_world(run.rank(), run.num_ranks());
  const ReplicaGroups groups(settings, run, *world);
  const auto replicated = list_replicated(parameters, groups, settings, run);
  // A weight, two moments with scales and a master of each parameter, and the expert biases.
  const int64_t slack =
      std::ssize(replicated) * 6 * kAlignment +
      settings.model.num_moe_layers() *
          align_up(settings.model.moe.router_outputs() * dtype_size(DType::kF32)) +
      RoundingHistory::count_bytes(settings.model, batch_shape(settings));
  if (shards_fully(settings, run)) {
    const auto shard_groups = groups.for_full_sharding();
    // Of replicas the first saves.
    const bool owns = std::ranges::any_of(shard_groups, [](const ShardGroup& group) {
      return !group.replicas || group.replicas->rank() == 0;
    });
    const auto bytes = FullySharded::count_bytes(shard_groups, replicated, modules_of(parameters),
                                                 settings.shard.full(), settings.optimizer);
    return (owns ? bytes.weights + bytes.state : 0) + slack;
  }
  return owned_bytes(groups.for_reduction(), replicated, sharding_of(settings, run),
                     settings.optimizer.formats) +
         count_frozen_bytes(parameters, groups) + slack;
}

StepSharding ModelState::plan_sharding(const Settings& settings, const RunLayout& run) {
  const auto parameters =
      ParameterSet::without_memory(held_parameters(settings, run), gradient_places(settings, run));
  const auto world = make_planned_world(run.rank(), run.num_ranks());
  const ReplicaGroups groups(settings, run, *world);
  const auto replicated = list_replicated(parameters, groups, settings, run);
  if (shards_fully(settings, run)) {
    return {.sharded = FullySharded::list_exchanges(groups.for_full_sharding(), replicated,
                                                    modules_of(parameters), settings.shard.full(),
                                                    settings.optimizer)};
  }
  return {.replicated = ShardedOptimizer::list_exchanges(
              groups.for_reduction(), replicated, sharding_of(settings, run), settings.optimizer)};
}

StepRequest request_step(const Settings& settings, const RunLayout& run, const TrainingModel& model,
                         const ParameterSet& parameters) {
  return {.programs = model.programs(),
          .parameters = parameters,
          .pipeline = run.pipeline,
          .steps = run.steps,
          .world = run.world,
          .sharding = ModelState::plan_sharding(settings, run),
          .placement = &model.placement()};
}

ModelState::Bytes ModelState::bytes() const {
  if (sharded_) return sum_up(sharded_->bytes());
  const ParameterSet::Bytes sizes = parameters_.bytes();
  const StateWindows* const windows = replicated_->windows();
  const bool on_host = windows != nullptr || replicated_->updates_on_host();
  const int64_t state = replicated_->state_bytes();
  const int64_t at_work = windows != nullptr ? windows->window_bytes() : 0;
  return {.weights = sizes.weights,
          .gradients = sizes.gradients + replicated_->staging_bytes(),
          .optimizer = (on_host ? at_work : state) + replicated_->workspace_bytes(),
          .on_host = on_host ? state + replicated_->host_window_bytes() : 0};
}

ModelState::ModelState(const Settings& settings, const RunLayout& run, World& world,
                       const Backend& backend)
    : config_(settings.model),
      dtype_(settings.train.dtype()),
      products_(batch_shape(settings).products),
      optimizer_kind_(settings.optimizer_kind),
      formats_(settings.optimizer.formats),
      names_biases_(run.rank() == 0),
      parameters_(make_parameters(settings, run, backend.device())),
      experts_(make_expert_states(config_, backend.device())),
      roundings_(config_, batch_shape(settings), backend.device()) {
  const ReplicaGroups groups(settings, run, world);
  const auto parameters = list_replicated(parameters_, groups, settings, run);
  frozen_ = list_frozen(parameters_, groups, HeldPart::kHeld);
  owned_frozen_ = list_frozen(parameters_, groups, HeldPart::kOwned);
  if (shards_fully(settings, run)) {
    sharded_ = std::make_unique<FullySharded>(groups.for_full_sharding(), parameters,
                                              modules_of(parameters_), run.world,
                                              settings.optimizer, settings.shard.full(), backend);
    sharded_parameters_ = std::make_unique<ShardedParameters>(*sharded_);
  } else {
    replicated_ =
        std::make_unique<ShardedOptimizer>(groups.for_reduction(), parameters, run.world,
                                           settings.optimizer, sharding_of(settings, run), backend);
    replicated_parameters_ =
        std::make_unique<ReplicatedParameters>(parameters_, *replicated_, backend);
  }
}

StepParameters& ModelState::step_parameters() {
  if (sharded_parameters_) return *sharded_parameters_;
  return *replicated_parameters_;
}

ModelState::ModelState(const Settings& settings)
    : ModelState(settings, make_run_layout(settings, *make_single_world()), *make_single_world()) {}

DistributedOptimizer& ModelState::optimizer() {
  if (sharded_) return *sharded_;
  return *replicated_;
}

const DistributedOptimizer& ModelState::optimizer() const {
  if (sharded_) return *sharded_;
  return *replicated_;
}

void ModelState::initialize(uint64_t seed) {
  initialize(seed, [](const std::string&) { return true; });
  cast_weights();
}

/// Behind what fills masters, of which those in FP8 are cast.
void ModelState::cast_weights() {
  if (products_.fp8_weights) replicated_->cast_weights();
}

/// Fresh weights for the parameters whose names are `of` a kind.
void ModelState::initialize(uint64_t seed, const std::function<bool(const std::string&)>& of) {
  for (const NamedSlice& held : held_weights()) {
    if (of(held.name))
      initialize_weight(parameters_.find(held.name).spec, held.slice, held.tensor, seed);
  }
  optimizer().reset_masters();
}

void ModelState::wait_weights() {
  if (replicated_) replicated_->wait_all_weights();
}

std::vector<NamedSlice> ModelState::held_weights() const {
  auto slices = optimizer().weight_slices(HeldPart::kHeld);
  slices.insert(slices.end(), frozen_.begin(), frozen_.end());
  return slices;
}

std::vector<NamedSlice> ModelState::owned_model() const {
  auto slices = optimizer().weight_slices(HeldPart::kOwned);
  slices.insert(slices.end(), owned_frozen_.begin(), owned_frozen_.end());
  if (!names_biases_) return slices;
  for (const NamedTensor& bias : name_expert_biases(config_, experts_))
    slices.push_back(whole_slice(bias));
  return slices;
}

std::vector<NamedSlice> ModelState::owned_optimizer() const {
  auto slices = optimizer().state_slices(HeldPart::kOwned);
  if (names_biases_) append_roundings(slices);
  return slices;
}

void ModelState::append_roundings(std::vector<NamedSlice>& slices) const {
  const std::vector<NamedSlice> roundings = roundings_.slices();
  slices.insert(slices.end(), roundings.begin(), roundings.end());
}

std::vector<NamedSlice> ModelState::held_model() const {
  auto slices = held_weights();
  for (const NamedTensor& bias : name_expert_biases(config_, experts_))
    slices.push_back(whole_slice(bias));
  return slices;
}

std::vector<NamedSlice> ModelState::held_optimizer() const {
  auto slices = optimizer().state_slices(HeldPart::kHeld);
  append_roundings(slices);
  return slices;
}

}  // namespace tessera
