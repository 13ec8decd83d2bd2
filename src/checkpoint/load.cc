#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/hash.h"
#include "checkpoint/layout.h"
#include "core/error.h"
#include "core/file.h"
#include "core/memory.h"
#include "core/names.h"
#include "core/strict_json.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

void check_file_size(const fs::path& path, int64_t found, const FileRecord& record) {
  require(found == record.num_bytes,
          "{} is damaged: {} bytes long, its manifest says {}; load another checkpoint",
          path.string(), found, record.num_bytes);
}

void check_files_exist(const fs::path& folder, const Manifest& manifest) {
  for (const auto& [name, record] : manifest.files) {
    const fs::path path = folder / name;
    std::error_code error;
    const auto size = fs::file_size(path, error);
    require(!error, "{} is damaged: file {} cannot be read: {}", folder.string(), name,
            error.message());
    check_file_size(path, static_cast<int64_t>(size), record);
  }
}

Manifest read_manifest(const fs::path& folder) {
  const std::string text = read_complete_manifest(folder);
  return parse_manifest(text, (folder / kManifestFile).string());
}

/// The hash of a whole file, whose pages do not stay in memory.
uint64_t hash_file(std::span<const std::byte> bytes) {
  constexpr size_t kBlock = size_t{64} << 20;
  Hash64 hash;
  while (!bytes.empty()) {
    const auto block = bytes.first(std::min(kBlock, bytes.size()));
    hash.update(block);
    drop_mapped_pages(block);
    bytes = bytes.subspan(block.size());
  }
  return hash.digest();
}

SafetensorsReader open_file(const fs::path& path, const FileRecord& record, Verify verify) {
  SafetensorsReader reader(path);
  check_file_size(path, static_cast<int64_t>(reader.file_bytes().size()), record);
  if (verify == Verify::kSizes) return reader;
  const uint64_t found = hash_file(reader.file_bytes());
  require(found == record.checksum,
          "{} is damaged: its checksum is {:016x}, its manifest says {:016x}; load another "
          "checkpoint",
          path.string(), found, record.checksum);
  return reader;
}

void check_piece(const SafetensorsReader& file, const TensorPiece& piece, DType dtype) {
  const SafetensorsEntry& entry = file.entry(piece.key);
  require(entry.dtype == dtype && entry.shape == piece.rectangle.shape,
          "{}: tensor {} is {} {}, the manifest says {} {}", file.path().string(),
          quote_for_message(piece.key), dtype_name(entry.dtype), entry.shape.to_string(),
          dtype_name(dtype), piece.rectangle.shape.to_string());
}

/// Every piece is in its file as the manifest says, and every tensor of a file is a piece.
void check_pieces(const Manifest& manifest, const std::map<std::string, SafetensorsReader>& files) {
  std::map<std::string_view, std::set<std::string_view>> used;
  for (const auto& [name, record] : manifest.tensors) {
    for (const TensorPiece& piece : record.pieces) {
      check_piece(files.at(piece.file), piece, record.dtype);
      used[piece.file].insert(piece.key);
    }
  }
  for (const auto& [name, file] : files) {
    for (const SafetensorsEntry& entry : file.entries()) {
      require(used[name].contains(entry.name), "{}: tensor {} is not in the manifest",
              file.path().string(), quote_for_message(entry.name));
    }
  }
}

/// Why a folder cannot be resumed from, or "" when it can.
std::string defect(const fs::path& folder) {
  try {
    check_files_exist(folder, read_manifest(folder));
    return "";
  } catch (const UserError& error) {
    return error.what();
  }
}

std::string list_names(const std::vector<std::string>& names) {
  constexpr size_t kMost = 20;
  const auto shown = std::span(names).first(std::min(kMost, names.size()));
  const std::string text = fmt::format("{}", fmt::join(shown, ", "));
  if (names.size() <= kMost) return text;
  return fmt::format("{} and {} more", text, names.size() - kMost);
}

void require_same_names(const std::set<std::string>& saved, const std::set<std::string>& wanted,
                        TensorGroup group, const fs::path& folder) {
  std::vector<std::string> missing;
  std::vector<std::string> extra;
  std::ranges::set_difference(wanted, saved, std::back_inserter(missing));
  std::ranges::set_difference(saved, wanted, std::back_inserter(extra));
  if (missing.empty() && extra.empty()) return;
  user_error(
      "{}: its {} tensors are not those of this configuration{}{}; use the configuration that it "
      "was saved with",
      folder.string(), group_name(group),
      missing.empty() ? "" : "; missing in the checkpoint: " + list_names(missing),
      extra.empty() ? "" : "; unknown here: " + list_names(extra));
}

}  // namespace

FoundCheckpoint find_latest(const fs::path& root) {
  FoundCheckpoint found;
  if (!path_exists(root)) return found;
  for (const fs::path& path : list_prefixed(root, kTemporaryPrefix)) {
    found.ignored.push_back(fmt::format("{}: an unfinished save", path.string()));
  }
  for (const StepFolder& folder : list_step_folders(root)) {
    const std::string reason = defect(folder.path);
    if (reason.empty()) {
      found.path = folder.path;
      found.step = folder.step;
      return found;
    }
    found.ignored.push_back(reason);
  }
  return found;
}

CheckpointReader::CheckpointReader(const fs::path& folder, Verify verify)
    : folder_(folder), manifest_(read_manifest(folder)) {
  check_files_exist(folder, manifest_);
  for (const auto& [name, record] : manifest_.files) {
    files_.emplace(name, open_file(folder / name, record, verify));
  }
  check_pieces(manifest_, files_);
}

std::vector<std::string> CheckpointReader::names(TensorGroup group) const {
  std::vector<std::string> names;
  for (const auto& [name, record] : manifest_.tensors) {
    if (record.group == group) names.push_back(name);
  }
  return names;
}

const TensorRecord& CheckpointReader::record(std::string_view name) const {
  const auto found = manifest_.tensors.find(std::string(name));
  if (found != manifest_.tensors.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [key, record] : manifest_.tensors) known.push_back(key);
  user_error("{}: no tensor {}{}", folder_.string(), quote_for_message(name),
             did_you_mean(name, known));
}

void CheckpointReader::load_into(std::string_view name, const Tensor& out,
                                 Conversion conversion) const {
  const TensorRecord& saved = record(name);
  require(saved.shape == out.shape, "{}: tensor {} has shape {}, expected {}", folder_.string(),
          quote_for_message(name), saved.shape.to_string(), out.shape.to_string());
  load_part(name, whole(saved.shape).offset, out, conversion);
}

void CheckpointReader::load_part(std::string_view name, const Shape& offset, const Tensor& out,
                                 Conversion conversion) const {
  const TensorRecord& saved = record(name);
  const Rectangle wanted{offset, out.shape};
  require(contains(whole(saved.shape), wanted),
          "{}: tensor {} has shape {}, which holds no part {} at {}", folder_.string(),
          quote_for_message(name), saved.shape.to_string(), out.shape.to_string(),
          offset.to_string());
  require(saved.dtype == out.dtype ||
              (conversion == Conversion::kFloats && can_copy(saved.dtype, out.dtype)),
          "{}: tensor {} is {}, expected {}", folder_.string(), quote_for_message(name),
          dtype_name(saved.dtype), dtype_name(out.dtype));
  for (const TensorPiece& piece : saved.pieces) {
    const auto part = intersect(piece.rectangle, wanted);
    if (!part) continue;
    const SafetensorsReader& file = files_.at(piece.file);
    // The source is only read; a view of elements has no constant form.
    auto* source = const_cast<std::byte*>(file.bytes(file.entry(piece.key)).data());
    copy_rectangle(*part, {source, saved.dtype, piece.rectangle},
                   {static_cast<std::byte*>(out.data), out.dtype, wanted});
  }
}

void CheckpointReader::drop_pages() const {
  for (const auto& [name, file] : files_) drop_mapped_pages(file.file_bytes());
}

void CheckpointReader::load_group(TensorGroup group, std::span<const NamedTensor> tensors,
                                  Conversion conversion) const {
  const std::vector<std::string> group_names = names(group);
  std::set<std::string> wanted;
  for (const NamedTensor& named : tensors) wanted.insert(named.name);
  require_same_names({group_names.begin(), group_names.end()}, wanted, group, folder_);
  for (const NamedTensor& named : tensors) load_into(named.name, named.tensor, conversion);
}

}  // namespace tessera
