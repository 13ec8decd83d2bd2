#include "data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <string_view>

#include "core/error.h"
#include "core/file/hash.h"
#include "core/file/path.h"
#include "data/token_format.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "token files are read as they lie");

using namespace token_format;

constexpr int64_t kLengthBytes = 4;
constexpr int64_t kOffsetBytes = 8;

template <typename T>
T load(std::span<const std::byte> bytes, int64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

/// The arrays of an index, by their offset in the file, and the numbers of its header.
struct IndexLayout {
  DType dtype = DType::kU16;
  int64_t num_sequences = 0;
  int64_t num_document_indices = 0;

  int64_t lengths() const { return kHeaderBytes; }
  int64_t pointers() const { return lengths() + num_sequences * kLengthBytes; }
  int64_t document_indices() const { return pointers() + num_sequences * kOffsetBytes; }
  int64_t end() const { return document_indices() + num_document_indices * kOffsetBytes; }
  bool has_modes(size_t file_bytes) const { return static_cast<int64_t>(file_bytes) > end(); }
};

DType read_type(std::span<const std::byte> idx, const std::string& name) {
  const auto code = load<uint8_t>(idx, 17);
  const auto at = std::ranges::find(kTypeCodes, code, &TypeCode::code);
  require(at != kTypeCodes.end(),
          "{}: id type is code {}; expected 1 (u8), 4 (i32), 5 (i64) or 8 (u16)", name, code);
  return at->dtype;
}

/// A count from the header that must fit the file at this many bytes each, so that no later product
/// overflows.
int64_t read_count(std::span<const std::byte> idx, int64_t offset, int64_t bytes_each,
                   const std::string& field) {
  const auto count = load<uint64_t>(idx, offset);
  const auto most = (static_cast<uint64_t>(idx.size()) - kHeaderBytes) / bytes_each;
  require(count <= most, "{} is {}, but a file of {} bytes holds at most {}", field, count,
          idx.size(), most);
  return static_cast<int64_t>(count);
}

IndexLayout read_header(std::span<const std::byte> idx, const std::string& name) {
  const auto size = static_cast<int64_t>(idx.size());
  require(size >= kHeaderBytes, "{}: {} bytes long; the header of a token index takes {}", name,
          size, kHeaderBytes);
  require(std::memcmp(idx.data(), kMagic.data(), kMagic.size()) == 0,
          "{}: no token index: it does not begin with MMIDIDX", name);
  const auto version = load<uint64_t>(idx, 9);
  require(version == kVersion, "{}: version is {}; expected {}", name, version, kVersion);
  IndexLayout layout;
  layout.dtype = read_type(idx, name);
  layout.num_sequences =
      read_count(idx, 18, kLengthBytes + kOffsetBytes, name + ": number of sequences");
  layout.num_document_indices =
      read_count(idx, 26, kOffsetBytes, name + ": number of document indices");
  require(layout.num_document_indices >= 1,
          "{}: number of document indices is 0; expected at least 1", name);
  const int64_t rest = size - layout.end();
  require(rest == 0 || rest == layout.num_sequences,
          "{}: {} bytes long; its {} sequences and {} document indices take {} ({} with modes)",
          name, size, layout.num_sequences, layout.num_document_indices, layout.end(),
          layout.end() + layout.num_sequences);
  return layout;
}

/// Checks that the sequences fill .bin from its first byte to its last, in order. Returns the
/// number of tokens.
int64_t check_sequences(std::span<const std::byte> idx, const IndexLayout& layout,
                        int64_t bin_bytes, const std::string& name) {
  const int64_t id_bytes = dtype_size(layout.dtype);
  int64_t position = 0;
  for (int64_t i = 0; i < layout.num_sequences; ++i) {
    const auto length = load<int32_t>(idx, layout.lengths() + i * kLengthBytes);
    const auto pointer = load<int64_t>(idx, layout.pointers() + i * kOffsetBytes);
    require(pointer == position, "{}: sequence {} begins at byte {}; expected {}", name, i, pointer,
            position);
    require(length >= 0 && length <= (bin_bytes - position) / id_bytes,
            "{}: sequence {} has length {}; the .bin file has room for {} ids from there", name, i,
            length, (bin_bytes - position) / id_bytes);
    position += length * id_bytes;
  }
  require(position == bin_bytes, "{}: its sequences take {} bytes; the .bin file has {}", name,
          position, bin_bytes);
  return position / id_bytes;
}

std::vector<int64_t> read_documents(std::span<const std::byte> idx, const IndexLayout& layout,
                                    int64_t num_tokens, const std::string& name) {
  const int64_t id_bytes = dtype_size(layout.dtype);
  const int64_t last = layout.num_document_indices - 1;
  std::vector<int64_t> offsets;
  offsets.reserve(layout.num_document_indices);
  int64_t previous = 0;
  for (int64_t i = 0; i <= last; ++i) {
    const auto index = load<int64_t>(idx, layout.document_indices() + i * kOffsetBytes);
    require(index >= previous && index <= layout.num_sequences && (i > 0 || index == 0),
            "{}: document index {} is {}; expected {} to {}", name, i, index, previous,
            i == 0 ? 0 : layout.num_sequences);
    const bool at_end = index == layout.num_sequences;
    offsets.push_back(at_end ? num_tokens
                             : load<int64_t>(idx, layout.pointers() + index * kOffsetBytes) /
                                   id_bytes);
    previous = index;
  }
  require(previous == layout.num_sequences, "{}: the last document index is {}; expected {}", name,
          previous, layout.num_sequences);
  return offsets;
}

std::vector<TokenRange> read_silent_ranges(std::span<const std::byte> idx,
                                           const IndexLayout& layout, const std::string& name) {
  std::vector<TokenRange> ranges;
  if (!layout.has_modes(idx.size())) return ranges;
  int64_t begin = 0;
  for (int64_t i = 0; i < layout.num_sequences; ++i) {
    const auto mode = load<int8_t>(idx, layout.end() + i);
    require(mode == kHasLoss || mode == kSilent,
            "{}: sequence {} has mode {}; expected 0 (its tokens carry loss) or 1 (they do not)",
            name, i, mode);
    const int64_t end = begin + load<int32_t>(idx, layout.lengths() + i * kLengthBytes);
    if (mode == kSilent && end > begin) {
      if (ranges.empty() || ranges.back().end < begin) ranges.push_back({begin, begin});
      ranges.back().end = end;
    }
    begin = end;
  }
  return ranges;
}

template <typename Id>
void copy_ids(std::span<const std::byte> bin, int64_t offset, std::span<int32_t> ids,
              int64_t vocab_size, const std::string& prefix) {
  const std::byte* source = bin.data() + offset * static_cast<int64_t>(sizeof(Id));
  for (size_t i = 0; i < ids.size(); ++i) {
    Id id;
    std::memcpy(&id, source + i * sizeof(Id), sizeof(Id));
    const auto wide = static_cast<int64_t>(id);
    require(wide >= 0 && wide < vocab_size,
            "{}.bin: token {} is {}; expected an id below the vocabulary size {}", prefix,
            offset + static_cast<int64_t>(i), wide, vocab_size);
    ids[i] = static_cast<int32_t>(wide);
  }
}

constexpr int64_t kHashBlock = int64_t{1} << 18;

/// Adds [begin, end) of a file, without leaving it in this process's memory as its map would.
void hash_range(InputFile& file, int64_t begin, int64_t end, Hash64& hash) {
  std::vector<std::byte> block(std::min(kHashBlock, end - begin));
  file.seek(begin);
  while (begin < end) {
    const size_t wanted = std::min(kHashBlock, end - begin);
    const size_t count = file.read(std::span(block).first(wanted));
    if (count == 0) return;
    hash.update(std::span(block).first(count));
    begin += static_cast<int64_t>(count);
  }
}

/// All of a file, or 1024 blocks from its first to its last byte.
void hash_file(const fs::path& path, Hash64& hash) {
  constexpr int64_t kBlocks = 1024;
  InputFile file(path);
  const int64_t size = file.num_bytes();
  hash.update(std::as_bytes(std::span(&size, 1)));
  if (size <= kBlocks * kHashBlock) return hash_range(file, 0, size, hash);
  const int64_t last = size - kHashBlock;
  for (int64_t i = 0; i < kBlocks; ++i) {
    const int64_t begin = last / (kBlocks - 1) * i + last % (kBlocks - 1) * i / (kBlocks - 1);
    hash_range(file, begin, begin + kHashBlock, hash);
  }
}

}  // namespace

fs::path token_bin_path(const std::string& prefix) {
  return prefix + ".bin";
}
fs::path token_idx_path(const std::string& prefix) {
  return prefix + ".idx";
}
std::string token_prefix(std::string path) {
  if (path.ends_with(".bin") || path.ends_with(".idx")) path.resize(path.size() - 4);
  return path;
}

TokenFile::TokenFile(const std::string& prefix, int64_t vocab_size)
    : prefix_(token_prefix(prefix)), vocab_size_(vocab_size) {
  ensure(vocab_size > 0 && vocab_size <= std::numeric_limits<int32_t>::max(),
         "token file: vocabulary of {}", vocab_size);
  const fs::path idx_path = token_idx_path(prefix_);
  const fs::path bin_path = token_bin_path(prefix_);
  require_exists(idx_path, "token index");
  require_exists(bin_path, "token file");
  bin_ = MappedFile(bin_path);
  const MappedFile idx(idx_path);
  index_ = parse_token_index(idx.bytes(), bin_.num_bytes(), idx_path.string());
}

TokenIndex parse_token_index(std::span<const std::byte> idx, int64_t bin_bytes,
                             const std::string& name) {
  const IndexLayout layout = read_header(idx, name);
  TokenIndex index = {.dtype = layout.dtype,
                      .num_sequences = layout.num_sequences,
                      .num_tokens = check_sequences(idx, layout, bin_bytes, name),
                      .document_offsets = {},
                      .silent_ranges = read_silent_ranges(idx, layout, name)};
  index.document_offsets = read_documents(idx, layout, index.num_tokens, name);
  return index;
}

int64_t TokenFile::document_at(int64_t offset) const {
  ensure(offset >= 0 && offset < num_tokens(), "token {} of {}", offset, num_tokens());
  const auto after = std::ranges::upper_bound(document_offsets(), offset);
  return after - document_offsets().begin() - 1;
}

void TokenFile::read(int64_t offset, std::span<int32_t> ids) const {
  const auto count = static_cast<int64_t>(ids.size());
  ensure(offset >= 0 && offset <= num_tokens() && count <= num_tokens() - offset,
         "{} tokens from {} of {}", count, offset, num_tokens());
  switch (dtype()) {
    case DType::kU8:
      return copy_ids<uint8_t>(bin_.bytes(), offset, ids, vocab_size_, prefix_);
    case DType::kU16:
      return copy_ids<uint16_t>(bin_.bytes(), offset, ids, vocab_size_, prefix_);
    case DType::kI32:
      return copy_ids<int32_t>(bin_.bytes(), offset, ids, vocab_size_, prefix_);
    case DType::kI64:
      return copy_ids<int64_t>(bin_.bytes(), offset, ids, vocab_size_, prefix_);
    default:
      throw InternalError("token file: unexpected type of ids");
  }
}

uint64_t TokenFile::fingerprint() const {
  Hash64 hash;
  hash_file(token_idx_path(prefix_), hash);
  hash_file(token_bin_path(prefix_), hash);
  return hash.digest();
}

}  // namespace tessera
