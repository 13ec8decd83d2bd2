#include "train/state/load_optimizer.h"

#include <algorithm>
#include <set>

#include "core/memory.h"
#include "ops/adamw/state_rounding.h"

namespace tessera {
namespace {

std::string master_name(const std::string& parameter, MasterKind kind) {
  return fmt::format("{}.{}", parameter, master_suffix(kind));
}

/// What the checkpoint has beside BF16 weights.
MasterKind find_master(const CheckpointReader& reader) {
  const auto names = reader.names(TensorGroup::kOptimizer);
  for (const MasterKind kind : {MasterKind::kF32, MasterKind::kRemainder}) {
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
    all.push_back({spec.name + ".m", spec.shape});
    if (kept.kind == OptimizerKind::kAdamW || !is_muons(spec))
      all.push_back({spec.name + ".v", spec.shape});
    if (is_low_precision(spec.dtype) && kept.master != MasterKind::kNone)
      all.push_back({master_name(spec.name, kept.master), spec.shape});
  }
  return all;
}

void join_master(const CheckpointReader& reader, const NamedSlice& master) {
  const Shape shape = master.slice.shape();
  const OwnedTensor weight(DType::kBF16, shape);
  const OwnedTensor remainder(DType::kU16, shape);
  reader.load_slice(master.name, master.slice, weight);
  reader.load_slice(master_name(master.name, MasterKind::kRemainder), master.slice, remainder);
  join_masters(weight.get().span<Bf16>(), remainder.get().span<uint16_t>(),
               master.tensor.span<float>());
}

}  // namespace

void load_optimizer(const CheckpointReader& reader, std::span<const ParameterSpec> parameters,
                    const KeptState& own, const DistributedOptimizer& optimizer) {
  const KeptState found = {find_kind(reader, parameters), find_master(reader)};
  require(own.kind == found.kind || own.kind == OptimizerKind::kMuon,
          "checkpoint {} was written with optim.name = \"muon\" and has no second moments of "
          "matrices, without which AdamW cannot go on; set optim.name = \"muon\", or start a new "
          "run with its weights by run.init_from",
          reader.path().string());
  std::vector<NamedSlice> slices = optimizer.state_slices(HeldPart::kHeld);
  if (found.master != own.master) {
    std::erase_if(slices, [&](const NamedSlice& slice) {
      return !slice.name.ends_with(".m") && !slice.name.ends_with(".v");
    });
  }
  reader.load_group(TensorGroup::kOptimizer, slices, list_state(parameters, found),
                    Conversion::kFloats);
  if (found.master == own.master) return;
  if (found.master == MasterKind::kNone) return optimizer.reset_masters();
  optimizer.change_masters([&](const NamedSlice& slice) {
    if (found.master == MasterKind::kRemainder) return join_master(reader, slice);
    reader.load_slice(master_name(slice.name, found.master), slice.slice, slice.tensor);
  });
}

}  // namespace tessera
