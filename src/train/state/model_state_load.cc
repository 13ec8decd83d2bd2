// What a rank takes of checkpoints.
#include "train/state/model_state.h"

#include <algorithm>
#include <set>

#include "train/state/checkpointing.h"
#include "train/state/load_optimizer.h"
#include "train/state/load_roundings.h"

namespace tessera {
namespace {

/// Whether a checkpoint of BF16 weights has some in F32: the masters of weights in FP8.
bool has_fp8_masters(const CheckpointReader& reader, std::span<const ParameterSpec> bf16) {
  const auto& saved = reader.manifest().tensors;
  const auto is = [&](const std::string& name, DType dtype) {
    const auto found = saved.find(name);
    return found != saved.end() && found->second.dtype == dtype;
  };
  return is("embedding.weight", DType::kBF16) &&
         std::ranges::any_of(bf16, [&](const ParameterSpec& spec) {
           return spec.dtype == DType::kBF16 && is(spec.name, DType::kF32);
         });
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

/// The layers of multi-token prediction that tensors are of.
std::set<std::string> mtp_layers_of(const std::vector<std::string>& names) {
  std::set<std::string> layers;
  for (const std::string& name : names) {
    if (is_mtp_parameter(name)) layers.insert(mtp_layer_of(name));
  }
  return layers;
}

/// Whether the model has adapters and the checkpoint none. Adapters that the model lacks must not
/// be lost.
bool adds_adapters(const ModelConfig& config, const CheckpointReader& reader) {
  const bool saved = std::ranges::any_of(reader.names(TensorGroup::kModel), is_adapter_parameter);
  require(!saved || config.lora.is_on(),
          "{} has low-rank adapters, and this run has none; set [lora] as that run has it to train "
          "them on, or export and import it, which merges them",
          reader.path().string());
  return config.lora.is_on() && !saved;
}

int64_t count_missing(const std::set<std::string>& wanted, const std::set<std::string>& found) {
  return std::ranges::count_if(wanted, [&](const auto& name) { return !found.contains(name); });
}

}  // namespace

void ModelState::require_same_weights(const CheckpointReader& reader) const {
  const auto embedding = reader.manifest().tensors.find("embedding.weight");
  require(embedding == reader.manifest().tensors.end() || embedding->second.dtype == dtype_,
          "{} has weights in {}, but with train.precision as it is now they are in {}, and a run "
          "cannot change that; set it back, or start a new run with these weights by run.init_from",
          reader.path().string(), dtype_name(embedding->second.dtype), dtype_name(dtype_));
  const auto name = [](bool fp8) { return fp8 ? "fp8" : "bf16"; };
  const bool wanted = products_.fp8_weights;
  const bool found = has_fp8_masters(reader, list_parameters(config_, dtype_));
  require(found == wanted,
          "{} was written with precision.primary_weights = \"{}\", but it is \"{}\" now, and a "
          "run cannot change it; set it back, or start a new run with these weights by "
          "run.init_from",
          reader.path().string(), name(found), name(wanted));
}

void ModelState::load_held(const CheckpointReader& reader) {
  require_same_weights(reader);
  for (const auto& slices : {held_model(), optimizer().state_slices(HeldPart::kHeld)}) {
    for (const NamedSlice& held : slices) reader.load_slice(held.name, held.slice, held.tensor);
  }
  load_roundings(reader, roundings_);
  cast_weights();
}

LoadedPrediction ModelState::load_weights(const CheckpointReader& reader, uint64_t seed) {
  std::vector<GlobalTensor> all = global_model(config_, dtype_);
  std::vector<NamedSlice> held = held_model();
  std::vector<std::string> own_names;
  for (const GlobalTensor& tensor : all) own_names.push_back(tensor.name);
  const auto own_layers = mtp_layers_of(own_names);
  const auto saved_layers = mtp_layers_of(reader.names(TensorGroup::kModel));
  const bool adapts_anew = adds_adapters(config_, reader);
  const auto is_added = [&](const std::string& name) {
    if (is_mtp_parameter(name)) return !saved_layers.contains(mtp_layer_of(name));
    return adapts_anew && is_adapter_parameter(name);
  };
  const auto is_left_out = [&](const std::string& name) {
    return is_mtp_parameter(name) && !own_layers.contains(mtp_layer_of(name));
  };
  initialize(seed, is_added);
  std::erase_if(all, [&](const GlobalTensor& tensor) { return is_added(tensor.name); });
  std::erase_if(held, [&](const NamedSlice& slice) { return is_added(slice.name); });
  reader.load_group(TensorGroup::kModel, held, all, Conversion::kFloats, is_left_out);
  refuse_nonfinite(reader, "a run cannot start from such weights; name an earlier checkpoint");
  // Masters take the values themselves, which BF16 weights have rounded.
  optimizer().change_masters([&](const NamedSlice& master) {
    if (!is_added(master.name))
      reader.load_slice(master.name, master.slice, master.tensor, Conversion::kFloats);
  });
  cast_weights();
  return {.added = count_missing(own_layers, saved_layers),
          .left_out = count_missing(saved_layers, own_layers)};
}

void ModelState::load(const CheckpointReader& reader) {
  require_same_weights(reader);
  reader.load_group(TensorGroup::kModel, held_model(), global_model(config_, dtype_));
  auto trained = list_parameters(config_, dtype_, products_);
  std::erase_if(trained, [](const ParameterSpec& spec) { return spec.placement.frozen; });
  load_optimizer(reader, trained, {optimizer_kind_, formats_}, optimizer());
  load_roundings(reader, roundings_);
  cast_weights();
}

}  // namespace tessera
