#include "checkpoint/format/safetensors.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/memory.h"
#include "core/text/names.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;
constexpr int kMaxHeaderDepth = 3;
constexpr const char* kMetadataKey = "__metadata__";

int64_t read_header_length(std::span<const std::byte> file, std::string_view where) {
  require(file.size() >= kLengthBytes,
          "{}: {} bytes are too few for a safetensors file; it is truncated or something else",
          where, file.size());
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  const uint64_t available = file.size() - kLengthBytes;
  require(length <= available,
          "{}: the header claims {} bytes but only {} follow; the file is truncated or no "
          "safetensors file",
          where, length, available);
  require(length <= kMaxHeaderBytes, "{}: the header claims {} bytes, at most {} are allowed",
          where, length, kMaxHeaderBytes);
  return static_cast<int64_t>(length);
}

/// The offsets of a tensor within the data, checked against its size.
std::pair<int64_t, int64_t> parse_offsets(const json& value, int64_t expected, int64_t data_bytes,
                                          std::string_view where) {
  const Shape offsets = json_dims(value, "data_offsets", where);
  require(offsets.rank() == 2, "{}: data_offsets must be two integers, found {}", where,
          offsets.rank());
  require(offsets[0] <= offsets[1] && offsets[1] <= data_bytes,
          "{}: data_offsets {} leave the {} bytes of data", where, offsets.to_string(), data_bytes);
  require(offsets[1] - offsets[0] == expected,
          "{}: data_offsets {} span {} bytes, its shape and type need {}", where,
          offsets.to_string(), offsets[1] - offsets[0], expected);
  return {offsets[0], offsets[1]};
}

SafetensorsEntry parse_entry(const std::string& name, const json& value, int64_t data_begin,
                             int64_t data_bytes, std::string_view file) {
  const std::string where = fmt::format("{}: tensor {}", file, quote_for_message(name));
  require_members(value, {"dtype", "shape", "data_offsets"}, where);
  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype = json_dtype(json_member(value, "dtype", where), where);
  entry.shape = json_shape(json_member(value, "shape", where), where);
  const int64_t expected = entry.shape.num_elements() * dtype_size(entry.dtype);
  const auto [begin, end] =
      parse_offsets(json_member(value, "data_offsets", where), expected, data_bytes, where);
  entry.begin = data_begin + begin;
  entry.end = data_begin + end;
  return entry;
}

std::map<std::string, std::string> parse_metadata(const json& value, std::string_view where) {
  require(value.is_object(), "{}: {} must be an object, found {}", where, kMetadataKey,
          value.type_name());
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    metadata[key] =
        json_text(text, fmt::format("{} in {}", quote_for_message(key), kMetadataKey), where);
  }
  return metadata;
}

/// Sorts entries by their bytes and refuses overlaps, gaps and bytes that belong to none.
void require_exact_cover(std::vector<SafetensorsEntry>& entries, int64_t data_begin,
                         int64_t file_bytes, std::string_view where) {
  std::ranges::sort(entries, {}, [](const SafetensorsEntry& entry) {
    return std::tie(entry.begin, entry.end, entry.name);
  });
  int64_t position = data_begin;
  for (const SafetensorsEntry& entry : entries) {
    require(
        entry.begin == position,
        "{}: tensor {} starts at byte {} of the data, {} the tensor before it, which ends at {}",
        where, quote_for_message(entry.name), entry.begin - data_begin,
        entry.begin < position ? "overlapping" : "leaving a gap after", position - data_begin);
    position = entry.end;
  }
  require(position == file_bytes, "{}: {} bytes after the last tensor belong to none", where,
          file_bytes - position);
}

std::string header_text(std::span<const NamedTensor> tensors, std::span<const size_t> order,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += fmt::format("\"{}\":{},", kMetadataKey, json(metadata).dump());
  int64_t offset = 0;
  for (const size_t index : order) {
    const Tensor& tensor = tensors[index].tensor;
    text += fmt::format(R"({}:{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}},)",
                        json_quote(tensors[index].name), file_dtype_name(tensor.dtype),
                        tensor.shape.to_string(), offset, offset + tensor.num_bytes());
    offset += tensor.num_bytes();
  }
  if (text.back() == ',') text.pop_back();
  text += '}';
  const auto length = static_cast<int64_t>(text.size());
  text.append(align_up(kLengthBytes + length) - kLengthBytes - length, ' ');
  return text;
}

void check_names(std::span<const NamedTensor> tensors) {
  std::unordered_set<std::string_view> seen;
  for (const NamedTensor& named : tensors) {
    ensure(named.name != kMetadataKey && seen.insert(named.name).second,
           "tensor name '{}' is reserved or used twice in a file", named.name);
  }
}

std::vector<size_t> widest_first(std::span<const NamedTensor> tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](size_t index) { return dtype_size(tensors[index].tensor.dtype); });
  return order;
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view where) {
  const int64_t length = read_header_length(file, where);
  const int64_t data_begin = kLengthBytes + length;
  const auto file_bytes = static_cast<int64_t>(file.size());
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
  const std::string header_name = fmt::format("{}: header", where);
  const json root = parse_strict_json(text, header_name, kMaxHeaderDepth);
  require(root.is_object(), "{}: expected a JSON object, found {}", header_name, root.type_name());
  SafetensorsHeader header;
  for (const auto& [name, value] : root.items()) {
    if (name == kMetadataKey) {
      header.metadata = parse_metadata(value, header_name);
    } else {
      header.entries.push_back(
          parse_entry(name, value, data_begin, file_bytes - data_begin, where));
    }
  }
  require_exact_cover(header.entries, data_begin, file_bytes, where);
  return header;
}

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path)
    : file_(path), header_(parse_safetensors(file_.bytes(), path.string())) {
  for (size_t i = 0; i < header_.entries.size(); ++i) index_[header_.entries[i].name] = i;
}

const SafetensorsEntry* SafetensorsReader::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.entries[found->second];
}

const SafetensorsEntry& SafetensorsReader::entry(std::string_view name) const {
  if (const SafetensorsEntry* found = find(name)) return *found;
  std::vector<std::string> known;
  for (const SafetensorsEntry& entry : entries()) known.push_back(entry.name);
  user_error("{}: no tensor {}{}", path().string(), quote_for_message(name),
             did_you_mean(name, known));
}

std::span<const std::byte> SafetensorsReader::bytes(const SafetensorsEntry& entry) const {
  return file_.bytes().subspan(entry.begin, entry.end - entry.begin);
}

void SafetensorsReader::read(std::string_view name, const Tensor& out) const {
  const SafetensorsEntry& found = entry(name);
  require(found.dtype == out.dtype && found.shape == out.shape,
          "{}: tensor {} is {} {}, expected {} {}", path().string(), quote_for_message(name),
          dtype_name(found.dtype), found.shape.to_string(), dtype_name(out.dtype),
          out.shape.to_string());
  const auto source = bytes(found);
  if (!source.empty()) std::memcpy(out.data, source.data(), source.size());
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::span<const NamedTensor> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path), order_(widest_first(tensors)) {
  check_names(tensors);
  const std::string header = header_text(tensors, order_, metadata);
  const uint64_t length = header.size();
  write(std::as_bytes(std::span(&length, 1)));
  write(std::as_bytes(std::span(header)));
  expected_bytes_ = file_.num_bytes();
  for (const NamedTensor& named : tensors) expected_bytes_ += named.tensor.num_bytes();
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  // Blocks stay in the cache between hashing and writing.
  constexpr size_t kBlock = size_t{1} << 20;
  while (!bytes.empty()) {
    const auto block = bytes.first(std::min(kBlock, bytes.size()));
    hash_.update(block);
    file_.write(block);
    bytes = bytes.subspan(block.size());
  }
}

WrittenFile SafetensorsWriter::finish() {
  ensure(file_.num_bytes() == expected_bytes_, "{}: {} bytes written instead of {}",
         file_.path().string(), file_.num_bytes(), expected_bytes_);
  file_.sync();
  file_.close();
  return {file_.num_bytes(), hash_.digest()};
}

namespace {

/// Writes what is in a device's memory by way of a block of the host's.
class DeviceWriter {
 public:
  explicit DeviceWriter(SafetensorsWriter& writer) : writer_(writer) {}

  void write(Device& device, std::span<const std::byte> bytes) {
    const auto wanted = static_cast<int64_t>(std::min(kBlock, bytes.size()));
    if (block_.num_bytes() < wanted) {
      block_ = {};  // first, so that there are never two
      block_ = Buffer(wanted, "writing a checkpoint", device, MemoryKind::kShared);
    }
    while (!bytes.empty()) {
      const auto part = bytes.first(std::min(kBlock, bytes.size()));
      device.copy(block_.data(), part.data(), std::ssize(part));
      device.synchronize();
      writer_.write({block_.data(), part.size()});
      bytes = bytes.subspan(part.size());
    }
  }

 private:
  static constexpr size_t kBlock = size_t{64} << 20;

  SafetensorsWriter& writer_;
  Buffer block_;
};

}  // namespace

WrittenFile write_safetensors(const std::filesystem::path& path,
                              std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata) {
  SafetensorsWriter writer(path, tensors, metadata);
  DeviceWriter device_writer(writer);
  for (const size_t index : writer.order()) {
    const Tensor& tensor = tensors[index].tensor;
    ensure(tensor || tensor.num_elements() == 0, "tensor '{}' has no data", tensors[index].name);
    const std::span bytes{static_cast<const std::byte*>(tensor.data),
                          static_cast<size_t>(tensor.num_bytes())};
    if (tensor.device == nullptr) {
      writer.write(bytes);
    } else {
      device_writer.write(*tensor.device, bytes);
    }
  }
  return writer.finish();
}

}  // namespace tessera
