#include "train/state/load_optimizer.h"

#include <algorithm>

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

std::vector<GlobalTensor> list_state(std::span<const ParameterSpec> parameters, MasterKind master) {
  std::vector<GlobalTensor> all;
  for (const ParameterSpec& spec : parameters) {
    all.push_back({spec.name + ".m", spec.shape});
    all.push_back({spec.name + ".v", spec.shape});
    if (is_low_precision(spec.dtype) && master != MasterKind::kNone)
      all.push_back({master_name(spec.name, master), spec.shape});
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
                    MasterKind master, const DistributedOptimizer& optimizer) {
  const MasterKind found = find_master(reader);
  std::vector<NamedSlice> slices = optimizer.state_slices(HeldPart::kHeld);
  if (found != master) {
    std::erase_if(slices, [&](const NamedSlice& slice) {
      return !slice.name.ends_with(".m") && !slice.name.ends_with(".v");
    });
  }
  reader.load_group(TensorGroup::kOptimizer, slices, list_state(parameters, found),
                    Conversion::kFloats);
  if (found == master) return;
  if (found == MasterKind::kNone) return optimizer.reset_masters();
  optimizer.change_masters([&](const NamedSlice& own) {
    if (found == MasterKind::kRemainder) return join_master(reader, own);
    reader.load_slice(master_name(own.name, found), own.slice, own.tensor);
  });
}

}  // namespace tessera
