#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "checkpoint/format/safetensors.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {

/// Writes some consecutive tensors of a checkpoint, of which the first is number `first`, as a
/// safetensors file.
using WriteShard = std::function<WrittenFile(const std::filesystem::path& file, size_t first,
                                             std::span<const MappedTensor> tensors)>;

/// The files of a checkpoint whose tensors are too large to be held together: `tensors` spread over
/// files of up to `shard_bytes` by `write_shard`, then the manifest with `state` (checkpoint.h) and
/// the marker. `folder` exists and has no other name yet.
void write_checkpoint_files(const std::filesystem::path& folder, const std::string& state,
                            std::span<const MappedTensor> tensors, int64_t shard_bytes,
                            const WriteShard& write_shard);

}  // namespace tessera
