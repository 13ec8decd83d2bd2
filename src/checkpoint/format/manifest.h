#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/rectangle.h"
#include "core/dtype.h"
#include "core/tensor.h"

namespace tessera {

/// The highest step of a checkpoint; what says more is damaged.
inline constexpr int64_t kMaxStep = int64_t{1} << 48;

/// What a tensor is for; each group has its own files, so that evaluation reads the model alone.
enum class TensorGroup : uint8_t { kModel, kOptimizer };

/// "model", "optimizer": also the start of the group's file names.
std::string_view group_name(TensorGroup group);

/// A part of a global tensor: the tensor `key` of a safetensors file of the checkpoint.
struct TensorPiece {
  std::string file;
  std::string key;
  Rectangle rectangle;
};

/// A global tensor, independent of how many processes hold it. Its pieces cover it exactly.
struct TensorRecord {
  TensorGroup group = TensorGroup::kModel;
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<TensorPiece> pieces;
};

struct FileRecord {
  int64_t num_bytes = 0;
  uint64_t checksum = 0;  // Hash64 of the whole file
};

/// The table of contents of a checkpoint.
struct Manifest {
  int64_t step = 0;
  std::map<std::string, FileRecord> files;
  std::map<std::string, TensorRecord> tensors;
  std::string state = "{}";  // a JSON object that only the trainer understands
};

/// The manifest as JSON. Throws UserError when `state` is no JSON object.
std::string manifest_text(const Manifest& manifest);

/// Reads and validates a manifest: format and version, file names without folders, pieces within
/// their tensors that cover them exactly and without overlap. `where` names it in messages. Throws
/// UserError.
Manifest parse_manifest(std::string_view text, std::string_view where);

/// The same of a part of a manifest, with one rank's files and pieces, which need not cover their
/// tensors.
Manifest parse_manifest_part(std::string_view text, std::string_view where);

}  // namespace tessera
