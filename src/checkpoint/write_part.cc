#include "checkpoint/write_part.h"

#include <algorithm>
#include <iterator>

#include "checkpoint/format/cover.h"
#include "checkpoint/format/safetensors.h"
#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// One tensor of a file.
struct Entry {
  const GivenTensor* given = nullptr;
  const TensorPart* part = nullptr;
};

std::string entry_key(const Entry& entry) {
  const Rectangle& rectangle = entry.part->rectangle;
  if (rectangle == whole(entry.given->global)) return entry.given->name;
  std::string key = entry.given->name;
  for (int dim = 0; dim < rectangle.shape.rank(); ++dim) {
    key += fmt::format("{}{}:{}", dim == 0 ? "[" : ", ", rectangle.offset[dim],
                       rectangle.offset[dim] + rectangle.shape[dim]);
  }
  return key + "]";
}

std::string file_name(const PartRequest& request, TensorGroup group, int index) {
  if (request.num_ranks == 1) return fmt::format("{}-{:05}.safetensors", group_name(group), index);
  return fmt::format("{}-r{:05}-{:05}.safetensors", group_name(group), request.rank, index);
}

/// How many entries from the start fit into one file; at least one.
size_t num_in_shard(std::span<const Entry> entries, int64_t shard_bytes) {
  int64_t num_bytes = 0;
  size_t count = 0;
  for (const Entry& entry : entries) {
    num_bytes += entry.part->tensor.num_bytes();
    if (count > 0 && num_bytes > shard_bytes) break;
    ++count;
  }
  return count;
}

std::string describe(const TensorRecord& record) {
  return fmt::format("{} {} {}", group_name(record.group), dtype_name(record.dtype),
                     record.shape.to_string());
}

bool same_tensor(const TensorRecord& a, const TensorRecord& b) {
  return a.group == b.group && a.dtype == b.dtype && a.shape == b.shape;
}

/// Lists all tensors, those without a part too, and gives the parts.
std::vector<Entry> record_tensors(std::span<const GivenTensor> tensors, TensorGroup group,
                                  Manifest& manifest) {
  std::vector<Entry> entries;
  for (const GivenTensor& given : tensors) {
    const TensorRecord record{group, given.dtype, given.global, {}};
    const TensorRecord& known = manifest.tensors.emplace(given.name, record).first->second;
    ensure(same_tensor(known, record), "tensor '{}' of a checkpoint is {} and also {}", given.name,
           describe(known), describe(record));
    for (const TensorPart& part : given.parts) entries.push_back({&given, &part});
  }
  return entries;
}

void write_group(const fs::path& folder, const PartRequest& request, TensorGroup group,
                 Manifest& manifest) {
  const auto& tensors = group == TensorGroup::kModel ? request.model : request.optimizer;
  const std::vector<Entry> entries = record_tensors(tensors, group, manifest);
  std::span<const Entry> rest = entries;
  for (int index = 0; !rest.empty(); ++index) {
    const auto shard = rest.first(num_in_shard(rest, request.shard_bytes));
    const std::string file = file_name(request, group, index);
    std::vector<NamedTensor> contents;
    for (const Entry& entry : shard) {
      contents.push_back({entry_key(entry), entry.part->tensor});
      manifest.tensors[entry.given->name].pieces.push_back(
          {file, contents.back().name, entry.part->rectangle});
    }
    const WrittenFile written = write_safetensors(folder / file, contents);
    manifest.files[file] = {written.num_bytes, written.checksum};
    rest = rest.subspan(shard.size());
  }
}

void add_part(Manifest& whole, Manifest& part, size_t rank) {
  ensure(part.step == whole.step, "rank {} saves step {}, rank 0 step {}", rank, part.step,
         whole.step);
  for (auto& [name, file] : part.files) {
    ensure(whole.files.emplace(name, file).second, "two ranks wrote a file {}", name);
  }
  for (auto& [name, record] : part.tensors) {
    const auto [known, is_new] = whole.tensors.emplace(name, record);
    if (is_new) continue;
    ensure(same_tensor(known->second, record), "tensor '{}' is {} on rank {}, {} on one before it",
           name, describe(record), rank, describe(known->second));
    std::ranges::move(record.pieces, std::back_inserter(known->second.pieces));
  }
}

void check_cover(const std::string& name, const TensorRecord& record) {
  const std::string defect = cover_defect(record.shape, record.pieces);
  if (defect.empty()) return;
  const auto hole = find_hole(record.shape, record.pieces);
  ensure(false, "the ranks do not give tensor '{}' {} once: {}{}", name, record.shape.to_string(),
         defect, hole ? fmt::format("; no rank gives element {}", hole->to_string()) : "");
}

}  // namespace

Manifest write_part(const fs::path& folder, const PartRequest& request) {
  Manifest manifest;
  manifest.step = request.step;
  write_group(folder, request, TensorGroup::kModel, manifest);
  write_group(folder, request, TensorGroup::kOptimizer, manifest);
  sync_folder(folder);
  return manifest;
}

Manifest merge_parts(std::vector<Manifest> parts) {
  Manifest merged = std::move(parts.at(0));
  for (size_t rank = 1; rank < parts.size(); ++rank) add_part(merged, parts[rank], rank);
  for (const auto& [name, record] : merged.tensors) check_cover(name, record);
  return merged;
}

}  // namespace tessera
