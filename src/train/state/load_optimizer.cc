#include "train/state/load_optimizer.h"

#include <algorithm>
#include <set>

#include "core/memory.h"
#include "model/weights/rounding_history.h"
#include "ops/adamw/state_rounding.h"
#include "train/state/load_moments.h"

namespace tessera {
namespace {

std::string master_name(const std::string& parameter, MasterKind kind) {
  return fmt::format("{}.{}", parameter, master_suffix(kind));
}

/// What the checkpoint has beside BF16 weights.
MasterKind find_master(const CheckpointReader& reader) {
  const auto names = reader.names(TensorGroup::kOptimizer);
  for (const MasterKind kind :
       {MasterKind::kF32, MasterKind::kRemainder, MasterKind::kRemainder8}) {
    const bool found = std::ranges::any_of(
        names, [&](const std::string& name) { return name.ends_with(master_name("", kind)); });
    if (found) return kind;
  }
  return MasterKind::kNone;
}

bool is_muons(const ParameterSpec& spec) {
  return !spec.placement.matrix_rows.empty();
}

/// Muon, where some matrix has no second moment.
OptimizerKind find_kind(const CheckpointReader& reader, std::span<const ParameterSpec> parameters) {
  const auto names = reader.names(TensorGroup::kOptimizer);
  const std::set<std::string> found(names.begin(), names.end());
  const bool muon = std::ranges::any_of(parameters, [&](const ParameterSpec& spec) {
    return is_muons(spec) && found.contains(spec.name + ".m") && !found.contains(spec.name + ".v");
  });
  return muon ? OptimizerKind::kMuon : OptimizerKind::kAdamW;
}

std::vector<GlobalTensor> list_state(std::span<const ParameterSpec> parameters,
                                     const KeptState& kept) {
  std::vector<GlobalTensor> all;
  for (const ParameterSpec& spec : parameters) {
    const StateFormats formats = kept.formats.of_rank(spec.shape.rank());
    append_moment(spec.name + ".m", spec.shape, formats.first_moment, all);
    if (kept.kind == OptimizerKind::kAdamW || !is_muons(spec))
      append_moment(spec.name + ".v", spec.shape, formats.second_moment, all);
    if (formats.master_of(spec.dtype) != MasterKind::kNone)
      all.push_back({master_name(spec.name, formats.master), spec.shape});
  }
  return all;
}

template <typename Remainder>
void join_master(const CheckpointReader& reader, MasterKind kind, const NamedSlice& master) {
  const Shape shape = master.slice.shape();
  const OwnedTensor weight(DType::kBF16, shape);
  const OwnedTensor remainder(master_dtype(kind), shape);
  reader.load_slice(master.name, master.slice, weight);
  reader.load_slice(master_name(master.name, kind), master.slice, remainder);
  join_masters<Remainder>(weight.get().span<Bf16>(), remainder.get().span<Remainder>(),
                          master.tensor.span<float>());
}

void convert_masters(const CheckpointReader& reader, MasterKind found,
                     const DistributedOptimizer& optimizer) {
  if (found == MasterKind::kNone) return optimizer.reset_masters();
  optimizer.change_masters([&](const NamedSlice& slice) {
    if (found == MasterKind::kRemainder) return join_master<uint16_t>(reader, found, slice);
    if (found == MasterKind::kRemainder8) return join_master<uint8_t>(reader, found, slice);
    reader.load_slice(master_name(slice.name, found), slice.slice, slice.tensor);
  });
}

bool is_moment(const NamedSlice& slice) {
  return slice.name.ends_with(".m") || slice.name.ends_with(".v") || names_scales(slice.name);
}

}  // namespace

void load_optimizer(const CheckpointReader& reader, std::span<const ParameterSpec> parameters,
                    const KeptState& own, const DistributedOptimizer& optimizer) {
  const KeptState found = {
      find_kind(reader, parameters),
      {find_moment(reader, ".m"), find_moment(reader, ".v"), find_master(reader)}};
  require(own.kind == found.kind || own.kind == OptimizerKind::kMuon,
          "checkpoint {} was written with optim.name = \"muon\" and has no second moments of "
          "matrices, without which AdamW cannot go on; set optim.name = \"muon\", or start a new "
          "run with its weights by run.init_from",
          reader.path().string());
  std::vector<NamedSlice> slices = optimizer.state_slices(HeldPart::kHeld);
  const std::vector<MomentSlice> converted = take_converted(found.formats, own.formats, slices);
  const bool same_masters = found.formats.master == own.formats.master;
  if (!same_masters) std::erase_if(slices, [](const auto& slice) { return !is_moment(slice); });
  reader.load_group(TensorGroup::kOptimizer, slices, list_state(parameters, found),
                    Conversion::kFloats, RoundingHistory::names);
  for (const MomentSlice& moment : converted) convert_moment(reader, moment);
  if (!same_masters) convert_masters(reader, found.formats.master, optimizer);
}

}  // namespace tessera
