#include "train/model_state.h"

#include "comm/planned_world.h"

namespace tessera {
namespace {

std::vector<ParameterSpec> held_parameters(const Settings& settings, const RunLayout& run) {
  return list_parameters(settings.model, settings.train.dtype(), run.part.groups, run.part.chunks);
}

/// The ranks that hold a weight alike, as places in the optimizer's list.
std::vector<ReplicatedParameter> list_replicated(const ParameterSet& parameters,
                                                 const ReplicaGroups& groups) {
  std::vector<ReplicatedParameter> result;
  for (const ModelParameter& parameter : parameters.all()) {
    const ParameterSpec& spec = parameter.spec;
    result.push_back(
        {.parameter = {.name = spec.name, .weight = parameter.weight, .grad = parameter.grad},
         .slice = spec.placement.slice,
         .group = groups.find(spec)});
  }
  return result;
}

std::vector<ReplicaGroup> replica_groups(const ReplicaGroups& groups) {
  std::vector<ReplicaGroup> result;
  for (const ReplicaGroups::Group& group : groups.all()) result.push_back({.outer = group.comm});
  return result;
}

NamedSlice whole_slice(const NamedTensor& tensor) {
  return {tensor.name, tensor.tensor, Slice::whole(tensor.tensor.shape)};
}

/// Names and shapes of all weights and expert biases of the model.
std::vector<GlobalTensor> global_model(const ModelConfig& config, DType dtype) {
  std::vector<GlobalTensor> all;
  for (const ParameterSpec& spec : list_parameters(config, dtype))
    all.push_back({spec.name, spec.shape});
  for (const NamedTensor& bias : name_expert_biases(config, make_expert_states(config)))
    all.push_back({bias.name, bias.tensor.shape});
  return all;
}

std::vector<GlobalTensor> global_optimizer(const ModelConfig& config, DType dtype) {
  std::vector<GlobalTensor> all;
  for (const ParameterSpec& spec : list_parameters(config, dtype)) {
    all.push_back({spec.name + ".m", spec.shape});
    all.push_back({spec.name + ".v", spec.shape});
    if (spec.dtype == DType::kBF16) all.push_back({spec.name + ".master", spec.shape});
  }
  return all;
}

}  // namespace

ModelState::Bytes ModelState::count_bytes(const Settings& settings, const RunLayout& run) {
  const auto specs = held_parameters(settings, run);
  const auto sizes = ParameterSet::count_bytes(specs, true);
  const auto world = make_planned_world(run.rank(), run.num_ranks());
  const ReplicaGroups groups(settings, run, *world);
  std::vector<ReplicaPlace> places;
  for (const ReplicaGroups::Group& group : groups.all())
    places.push_back({group.comm->size(), group.comm->rank()});
  std::vector<ReplicatedParameter> parameters;
  for (const ParameterSpec& spec : specs) {
    parameters.push_back({.parameter = {.name = spec.name,
                                        .weight = {nullptr, spec.dtype, spec.shape},
                                        .grad = {nullptr, DType::kF32, spec.shape}},
                          .slice = spec.placement.slice,
                          .group = groups.find(spec)});
  }
  return {sizes.weights, sizes.gradients,
          ShardedOptimizer::state_bytes(places, parameters, settings.sharding)};
}

ModelState::ModelState(const Settings& settings, const RunLayout& run, World& world)
    : config_(settings.model),
      dtype_(settings.train.dtype()),
      names_biases_(run.rank() == 0),
      parameters_(held_parameters(settings, run), true),
      experts_(make_expert_states(config_)) {
  const ReplicaGroups groups(settings, run, world);
  optimizer_ = std::make_unique<ShardedOptimizer>(replica_groups(groups),
                                                  list_replicated(parameters_, groups), run.world,
                                                  settings.adamw, settings.sharding);
  index_parameters();
}

ModelState::ModelState(const Settings& settings)
    : ModelState(settings, make_run_layout(settings, *make_single_world()), *make_single_world()) {}

void ModelState::initialize(uint64_t seed) {
  parameters_.initialize(seed);
  optimizer_->reset_masters();
}

void ModelState::index_parameters() {
  const auto& all = parameters_.all();
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string& name = all[i].spec.name;
    const bool of_layer = name.starts_with("layers.");
    by_prefix_[of_layer ? name.substr(0, name.find('.', 7) + 1) : ""].push_back(i);
  }
}

void ModelState::gradients_ready(const std::string& prefix) {
  for (const size_t idx : by_prefix_.at(prefix)) optimizer_->ready(idx);
}

void ModelState::wait_weights(const std::string& prefix) {
  for (const size_t idx : by_prefix_.at(prefix)) optimizer_->wait_weights(idx);
}

StepResult ModelState::update(const StepInput& input) {
  optimizer_->finish_gradients();
  return optimizer_->step(input);
}

void ModelState::discard_gradients() {
  optimizer_->discard_gradients();
}

std::vector<NamedSlice> ModelState::owned_model() const {
  auto slices = optimizer_->weight_slices(Extent::kOwned);
  if (!names_biases_) return slices;
  for (const NamedTensor& bias : name_expert_biases(config_, experts_))
    slices.push_back(whole_slice(bias));
  return slices;
}

std::vector<NamedSlice> ModelState::owned_optimizer() const {
  return optimizer_->state_slices(Extent::kOwned);
}

std::vector<NamedSlice> ModelState::held_model() const {
  auto slices = optimizer_->weight_slices(Extent::kHeld);
  for (const NamedTensor& bias : name_expert_biases(config_, experts_))
    slices.push_back(whole_slice(bias));
  return slices;
}

void ModelState::load_weights(const CheckpointReader& reader) {
  reader.load_group(TensorGroup::kModel, held_model(), global_model(config_, dtype_),
                    Conversion::kFloats);
  // Masters take the values themselves, which BF16 weights have rounded.
  for (const NamedSlice& master : optimizer_->master_slices())
    reader.load_slice(master.name, master.slice, master.tensor, Conversion::kFloats);
}

void ModelState::load(const CheckpointReader& reader) {
  reader.load_group(TensorGroup::kModel, held_model(), global_model(config_, dtype_));
  reader.load_group(TensorGroup::kOptimizer, optimizer_->state_slices(Extent::kHeld),
                    global_optimizer(config_, dtype_));
}

}  // namespace tessera
