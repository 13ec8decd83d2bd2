#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/files.h"
#include "checkpoint/layout.h"
#include "checkpoint/parts.h"
#include "checkpoint/together.h"
#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/host_tensor.h"
#include "core/memory.h"
#include "core/text/names.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

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

/// A folder that bears another step's name would be taken for newer or older than it is.
void check_step(const fs::path& folder, const Manifest& manifest) {
  const auto named = parse_step_folder(folder.filename().string());
  require(!named || *named == manifest.step,
          "{} is damaged: it is of step {}, its folder's name says {}",
          (folder / kManifestFile).string(), manifest.step, named.value_or(0));
}

}  // namespace

CheckpointReader::CheckpointReader(const fs::path& folder, Verify verify)
    : CheckpointReader(folder, *make_single_communicator("checkpoint"), verify) {}

CheckpointReader::CheckpointReader(const fs::path& folder, Communicator& world, Verify verify)
    : folder_(folder) {
  std::string text;
  together(world, [&] {
    if (world.rank() == 0) text = read_complete_manifest(folder);
  });
  text = broadcast_texts(world, {text}).front();
  together(world, [&] {
    manifest_ = parse_manifest(text, (folder / kManifestFile).string());
    check_step(folder, manifest_);
    check_files_exist(folder, manifest_);
    for (const std::string& name : files_of_rank(manifest_, world.rank(), world.size())) {
      files_.emplace(name, open_file(folder / name, manifest_.files.at(name), verify));
    }
    check_pieces(manifest_, files_);
  });
}

CheckpointReader CheckpointReader::of_part(const fs::path& folder, Verify verify) {
  CheckpointReader reader;
  reader.folder_ = folder;
  reader.manifest_ =
      parse_manifest_part(read_complete_manifest(folder), (folder / kManifestFile).string());
  check_files_exist(folder, reader.manifest_);
  for (const auto& [name, record] : reader.manifest_.files)
    reader.files_.emplace(name, open_file(folder / name, record, verify));
  check_pieces(reader.manifest_, reader.files_);
  return reader;
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

const TensorRecord& CheckpointReader::record(std::string_view name, const Shape& shape) const {
  const TensorRecord& saved = record(name);
  require(saved.shape == shape, "{}: tensor {} has shape {}, expected {}", folder_.string(),
          quote_for_message(name), saved.shape.to_string(), shape.to_string());
  return saved;
}

const SafetensorsReader& CheckpointReader::file(const std::string& name) const {
  const auto open = files_.find(name);
  if (open != files_.end()) return open->second;
  const FileRecord& expected = manifest_.files.at(name);
  return files_.emplace(name, open_file(folder_ / name, expected, Verify::kSizes)).first->second;
}

void CheckpointReader::load_into(std::string_view name, const Tensor& out,
                                 Conversion conversion) const {
  load_part(name, whole(record(name, out.shape).shape).offset, out, conversion);
}

void CheckpointReader::load_slice(std::string_view name, const Slice& slice, const Tensor& out,
                                  Conversion conversion) const {
  record(name, slice.global);
  for (const TensorPart& part : parts_of({std::string(name), out, slice})) {
    load_part(name, part.rectangle.offset, part.tensor, conversion);
  }
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
  const HostTensor host(out, HostTensor::Access::kWrite);
  int64_t found = 0;  // elements, which lie in one piece each
  for (const TensorPiece& piece : saved.pieces) {
    const auto part = intersect(piece.rectangle, wanted);
    if (!part) continue;
    const SafetensorsReader& file = this->file(piece.file);
    check_piece(file, piece, saved.dtype);
    found += part->shape.num_elements();
    // The source is only read; a view of elements has no constant form.
    auto* source = const_cast<std::byte*>(file.bytes(file.entry(piece.key)).data());
    copy_rectangle(*part, {source, saved.dtype, piece.rectangle},
                   {static_cast<std::byte*>(host.get().data), out.dtype, wanted});
  }
  require(found == out.shape.num_elements(), "{}: of {} of tensor {} it has only {} elements",
          folder_.string(), out.shape.to_string(), quote_for_message(name), found);
  const Tensor& read = host.get();
  nonfinite_.add(name, count_nonfinite({static_cast<const std::byte*>(read.data),
                                        static_cast<size_t>(read.num_bytes())},
                                       read.dtype));
  host.store();
}

void CheckpointReader::drop_pages() const {
  for (const auto& [name, file] : files_) drop_mapped_pages(file.file_bytes());
}

/// Throws unless the group's names, but those left out, are the wanted ones.
void CheckpointReader::require_names(TensorGroup group, const std::set<std::string>& wanted,
                                     const LeftOut& left_out) const {
  std::vector<std::string> saved = names(group);
  if (left_out) std::erase_if(saved, left_out);
  require_same_names({saved.begin(), saved.end()}, wanted, group, folder_);
}

void CheckpointReader::load_group(TensorGroup group, std::span<const NamedTensor> tensors,
                                  Conversion conversion, const LeftOut& left_out) const {
  std::set<std::string> wanted;
  for (const NamedTensor& named : tensors) wanted.insert(named.name);
  require_names(group, wanted, left_out);
  for (const NamedTensor& named : tensors) load_into(named.name, named.tensor, conversion);
}

void CheckpointReader::load_group(TensorGroup group, std::span<const NamedSlice> slices,
                                  std::span<const GlobalTensor> all, Conversion conversion,
                                  const LeftOut& left_out) const {
  std::set<std::string> wanted;
  for (const GlobalTensor& tensor : all) wanted.insert(tensor.name);
  require_names(group, wanted, left_out);
  for (const GlobalTensor& tensor : all) record(tensor.name, tensor.shape);
  for (const NamedSlice& slice : slices) {
    ensure(wanted.contains(slice.name), "a slice of '{}', which the model does not have",
           slice.name);
    load_slice(slice.name, slice.slice, slice.tensor, conversion);
  }
}

}  // namespace tessera
