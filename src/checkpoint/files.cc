#include "checkpoint/files.h"

#include <algorithm>
#include <set>
#include <system_error>
#include <utility>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/file/hash.h"
#include "core/memory.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

void check_file_size(const fs::path& path, int64_t found, const FileRecord& record) {
  require(found == record.num_bytes,
          "{} is damaged: {} bytes long, its manifest says {}; load another checkpoint",
          path.string(), found, record.num_bytes);
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

}  // namespace

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

void check_pieces(const Manifest& manifest, const std::map<std::string, SafetensorsReader>& files) {
  std::map<std::string_view, std::set<std::string_view>> used;
  for (const auto& [name, record] : manifest.tensors) {
    for (const TensorPiece& piece : record.pieces) {
      const auto file = files.find(piece.file);
      if (file == files.end()) continue;
      check_piece(file->second, piece, record.dtype);
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

std::vector<std::string> files_of_rank(const Manifest& manifest, int64_t rank, int64_t num_ranks) {
  std::vector<std::pair<int64_t, std::string>> files;
  for (const auto& [name, record] : manifest.files) files.emplace_back(-record.num_bytes, name);
  std::ranges::sort(files);
  // The largest first, each to the rank that has the least so far. Of files of one size, as equal
  // ranks write, each rank gets those that it would have written itself.
  std::set<std::pair<int64_t, int64_t>> loads;
  for (int64_t r = 0; r < num_ranks; ++r) loads.insert({0, r});
  std::vector<std::string> own;
  for (const auto& [negative_bytes, name] : files) {
    const auto [load, chosen] = *loads.begin();
    loads.erase(loads.begin());
    loads.insert({load - negative_bytes, chosen});
    if (chosen == rank) own.push_back(name);
  }
  return own;
}

}  // namespace tessera
