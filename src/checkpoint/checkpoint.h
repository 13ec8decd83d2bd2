#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"
#include "comm/communicator.h"
#include "core/nonfinite.h"
#include "core/slice.h"
#include "core/tensor.h"

namespace tessera {

// A checkpoint is a folder `step-00000120`: safetensors files, `manifest.json` and `COMPLETE`,
// which holds the hash of the manifest and is written last. It is built under another name, waited
// for until it is on the disk, and only then renamed, so that a kill at any moment leaves either
// the whole checkpoint or none.
//
// What it holds are global tensors, cut into pieces as those who saved held them. Any number of
// ranks, each with whatever slices, reads it.

/// What one process saves that holds all.
struct SaveRequest {
  int64_t step = 0;
  /// Names are distinct over both lists.
  std::span<const NamedTensor> model = {};
  std::span<const NamedTensor> optimizer = {};
  /// A JSON object: data position, random numbers, schedule, configuration.
  std::string state = "{}";
  /// How many of the newest complete checkpoints stay; 0 keeps all.
  int64_t keep_last = 0;
  /// A file holds tensors up to this size, or a single larger one.
  int64_t shard_bytes = int64_t{4} << 30;
};

/// What one of several ranks saves. Over all ranks, every element of every global tensor is given
/// exactly once; a rank may give several slices of a tensor, or none.
struct SliceSaveRequest {
  int64_t step = 0;
  std::span<const NamedSlice> model = {};
  std::span<const NamedSlice> optimizer = {};
  /// As in SaveRequest; of these two, rank 0's count.
  std::string state = "{}";
  int64_t keep_last = 0;
  int64_t shard_bytes = int64_t{4} << 30;
};

struct SaveResult {
  std::filesystem::path path;
  /// What failed after the checkpoint was safe, e.g. removing an old one.
  std::vector<std::string> warnings;
  int64_t num_bytes = 0;  ///< of the tensors' files, all ranks' together
};

/// Writes a checkpoint into `root`, replacing one of the same step, then removes old ones and what
/// killed processes left. Throws UserError when it cannot be written (full disk, permissions,
/// another process saving there); what was written is removed then, and earlier checkpoints are as
/// before.
SaveResult save_checkpoint(const std::filesystem::path& root, const SaveRequest& request);

/// The same by all ranks of `world` together, each writing files of its own at the same time; rank
/// 0 joins them. All ranks give the same `root`, on a file system that they share, and return the
/// same or throw the same: what fails on one rank ends the save on all, with that rank's number and
/// message. Throws InternalError where an element is given by no rank or by several, and CommError
/// where a rank is lost; then earlier checkpoints are as before, or this one is complete.
SaveResult save_checkpoint(const std::filesystem::path& root, const SliceSaveRequest& request,
                           Communicator& world);

struct FoundCheckpoint {
  std::optional<std::filesystem::path> path;
  int64_t step = 0;
  /// One line for each unfinished or damaged checkpoint that is newer than the one found, with the
  /// reason.
  std::vector<std::string> ignored;
};

/// The checkpoint of the highest step in `root` that is whole except for the contents of its files:
/// marked complete, a valid manifest, all files there, of their sizes and with valid headers. Finds
/// nothing where `root` does not exist.
FoundCheckpoint find_latest(const std::filesystem::path& root);
/// The same by all ranks of `world` together, which find the same.
FoundCheckpoint find_latest(const std::filesystem::path& root, Communicator& world);

/// Whether loading may convert between f32 and bf16.
enum class Conversion : uint8_t { kNone, kFloats };

/// Whether opening a checkpoint reads all of it and compares checksums.
enum class Verify : uint8_t { kSizes, kChecksums };

/// Which tensors of a checkpoint are left where they are, though the model has none of their names.
using LeftOut = std::function<bool(const std::string& name)>;

/// The name and shape of a tensor of which a rank may hold any part.
struct GlobalTensor {
  std::string name;
  Shape shape;
};

/// An open checkpoint. Throws UserError naming file, tensor, what was found and what was expected.
class CheckpointReader {
 public:
  /// Opens and validates all files, so that the checkpoint can be read to the end even when a
  /// training run removes it meanwhile.
  explicit CheckpointReader(const std::filesystem::path& folder,
                            Verify verify = Verify::kChecksums);
  /// The same by all ranks of `world` together: each file is validated by one of them, and all
  /// return or all throw. A rank keeps open what it validated and opens others when it needs them,
  /// so the folder must stay while it reads. Loading is not collective.
  CheckpointReader(const std::filesystem::path& folder, Communicator& world,
                   Verify verify = Verify::kChecksums);

  /// The part of one rank, in a complete folder of its own: load_slice() reads what that rank gave.
  static CheckpointReader of_part(const std::filesystem::path& folder, Verify verify);

  const std::filesystem::path& path() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  int64_t step() const { return manifest_.step; }
  /// The state given when saving, as JSON.
  const std::string& state() const { return manifest_.state; }
  std::vector<std::string> names(TensorGroup group) const;

  /// Reads one tensor; the shape must be equal, and the type unless converted.
  void load_into(std::string_view name, const Tensor& out,
                 Conversion conversion = Conversion::kNone) const;
  /// Reads the part of a global tensor that starts at `offset` and has the shape of `out`.
  void load_part(std::string_view name, const Shape& offset, const Tensor& out,
                 Conversion conversion = Conversion::kNone) const;
  /// Reads a slice of a global tensor of shape slice.global; `out` has slice.shape().
  void load_slice(std::string_view name, const Slice& slice, const Tensor& out,
                  Conversion conversion = Conversion::kNone) const;
  /// Reads all tensors of a group but those `left_out`. Names that only one side has are an error:
  /// nothing is dropped silently.
  void load_group(TensorGroup group, std::span<const NamedTensor> tensors,
                  Conversion conversion = Conversion::kNone, const LeftOut& left_out = {}) const;
  /// Reads what one rank holds of a group. `all` are the tensors of the whole model: their names
  /// and shapes must be those of the checkpoint, and `slices` be of them.
  void load_group(TensorGroup group, std::span<const NamedSlice> slices,
                  std::span<const GlobalTensor> all, Conversion conversion = Conversion::kNone,
                  const LeftOut& left_out = {}) const;
  /// Lets the system take back the memory of what was read.
  void drop_pages() const;
  /// Of the tensors and parts read so far by this process.
  const NonFiniteTensors& nonfinite() const { return nonfinite_; }

 private:
  CheckpointReader() = default;
  const TensorRecord& record(std::string_view name) const;
  /// The record of a tensor that must have this shape.
  const TensorRecord& record(std::string_view name, const Shape& shape) const;
  void require_names(TensorGroup group, const std::set<std::string>& wanted,
                     const LeftOut& left_out) const;
  const SafetensorsReader& file(const std::string& name) const;

  std::filesystem::path folder_;
  Manifest manifest_;
  mutable std::map<std::string, SafetensorsReader> files_;  // those opened so far
  mutable NonFiniteTensors nonfinite_;
};

/// The newest checkpoint of a folder, opened.
struct LatestCheckpoint {
  std::optional<CheckpointReader> reader;  ///< nothing where there is no whole one
  /// One line for each unfinished or damaged checkpoint that is newer, with the reason.
  std::vector<std::string> ignored;
  /// The folders of those that were damaged.
  std::vector<std::filesystem::path> damaged;
};

/// Opens the checkpoints of `root` from the newest on until one is whole, as `verify` checks it.
/// All ranks of `world` call and open the same. Finds nothing where `root` does not exist.
LatestCheckpoint open_latest(const std::filesystem::path& root, Communicator& world,
                             Verify verify = Verify::kChecksums);

/// Renames a checkpoint so that nothing takes it for one any more or removes it, to
/// "damaged-step-00000120" beside it, and returns the new path.
std::filesystem::path set_aside(const std::filesystem::path& checkpoint);

}  // namespace tessera
