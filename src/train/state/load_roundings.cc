#include "train/state/load_roundings.h"

#include <algorithm>

namespace tessera {

bool has_roundings(const CheckpointReader& reader) {
  return std::ranges::any_of(reader.manifest().tensors, [](const auto& tensor) {
    return RoundingHistory::names(tensor.first);
  });
}

void load_roundings(const CheckpointReader& reader, RoundingHistory& roundings) {
  roundings.clear();
  if (!has_roundings(reader)) return;
  for (const NamedSlice& own : roundings.slices()) {
    const auto found = reader.manifest().tensors.find(own.name);
    const Shape& expected = own.slice.global;
    const bool fits = found != reader.manifest().tensors.end() && found->second.shape.rank() == 2 &&
                      found->second.shape[0] == expected[0];
    require(fits,
            "checkpoint {}: '{}', the largest values that were rounded, must be f32 [{}, steps], "
            "found {}; it is of another model",
            reader.path().string(), own.name, expected[0],
            found == reader.manifest().tensors.end() ? "none" : found->second.shape.to_string());
    const OwnedTensor saved(DType::kF32, found->second.shape);
    reader.load_slice(own.name, Slice::whole(found->second.shape), saved);
    RoundingHistory::copy_newest(saved, own.tensor);
  }
}

}  // namespace tessera
