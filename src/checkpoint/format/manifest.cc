#include "checkpoint/format/manifest.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "checkpoint/format/cover.h"
#include "core/config/strict_json.h"
#include "core/error.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "tessera-checkpoint";
constexpr int64_t kVersion = 1;
constexpr int kMaxDepth = 64;
constexpr std::array kGroups = {TensorGroup::kModel, TensorGroup::kOptimizer};

TensorGroup parse_group(const json& value, std::string_view where) {
  const std::string& name = json_text(value, "group", where);
  for (const TensorGroup group : kGroups) {
    if (name == group_name(group)) return group;
  }
  user_error("{}: unknown group {}; expected model or optimizer", where, quote_for_message(name));
}

uint64_t parse_checksum(const json& value, std::string_view where) {
  const std::string& text = json_text(value, "xxh64", where);
  uint64_t checksum = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), checksum, 16);
  require(text.size() == 16 && result.ec == std::errc() && result.ptr == text.data() + text.size(),
          "{}: xxh64 must be 16 hexadecimal digits, found {}", where, quote_for_message(text));
  return checksum;
}

void check_file_name(const std::string& name, std::string_view where) {
  const bool plain = !name.empty() && name.front() != '.' && name.find('/') == std::string::npos &&
                     name.find('\0') == std::string::npos;
  require(plain, "{}: {} is not a plain file name", where, quote_for_message(name));
}

std::map<std::string, FileRecord> parse_files(const json& value, std::string_view manifest) {
  require(value.is_object(), "{}: 'files' must be an object, found {}", manifest,
          value.type_name());
  std::map<std::string, FileRecord> files;
  for (const auto& [name, record] : value.items()) {
    check_file_name(name, manifest);
    const std::string where = fmt::format("{}: file {}", manifest, quote_for_message(name));
    require_members(record, {"bytes", "xxh64"}, where);
    files[name] = {json_size(json_member(record, "bytes", where), "bytes", where),
                   parse_checksum(json_member(record, "xxh64", where), where)};
  }
  return files;
}

TensorPiece parse_piece(const json& value, const Shape& global, std::string_view where) {
  require_members(value, {"file", "key", "offset", "shape"}, where);
  TensorPiece piece;
  piece.file = json_text(json_member(value, "file", where), "file", where);
  piece.key = json_text(json_member(value, "key", where), "key", where);
  piece.rectangle = {json_dims(json_member(value, "offset", where), "offset", where),
                     json_shape(json_member(value, "shape", where), where)};
  require(contains(whole(global), piece.rectangle),
          "{}: a piece at {} of shape {} leaves the tensor's shape {}", where,
          piece.rectangle.offset.to_string(), piece.rectangle.shape.to_string(),
          global.to_string());
  return piece;
}

TensorRecord parse_tensor(const json& value, std::string_view where) {
  require_members(value, {"group", "dtype", "shape", "pieces"}, where);
  TensorRecord record;
  record.group = parse_group(json_member(value, "group", where), where);
  record.dtype = json_dtype(json_member(value, "dtype", where), where);
  record.shape = json_shape(json_member(value, "shape", where), where);
  const json& pieces = json_member(value, "pieces", where);
  require(pieces.is_array(), "{}: 'pieces' must be a list, found {}", where, pieces.type_name());
  for (const json& piece : pieces) record.pieces.push_back(parse_piece(piece, record.shape, where));
  return record;
}

std::map<std::string, TensorRecord> parse_tensors(const json& value, const Manifest& manifest,
                                                  std::string_view name) {
  require(value.is_object(), "{}: 'tensors' must be an object, found {}", name, value.type_name());
  std::map<std::string, TensorRecord> tensors;
  for (const auto& [key, record] : value.items()) {
    const std::string where = fmt::format("{}: tensor {}", name, quote_for_message(key));
    const TensorRecord& tensor = tensors[key] = parse_tensor(record, where);
    for (const TensorPiece& piece : tensor.pieces) {
      require(manifest.files.contains(piece.file),
              "{}: a piece lies in file {}, which is not listed", where,
              quote_for_message(piece.file));
    }
  }
  return tensors;
}

void check_format(const json& root, std::string_view where) {
  const std::string& format = json_text(json_member(root, "format", where), "format", where);
  require(format == kFormat, "{}: format is {}, expected '{}'", where, quote_for_message(format),
          kFormat);
  const int64_t version = json_size(json_member(root, "version", where), "version", where);
  require(version == kVersion, "{}: format version {} is not supported; this program reads {}",
          where, version, kVersion);
}

std::string piece_text(const TensorPiece& piece) {
  return fmt::format(R"({{"file":{},"key":{},"offset":{},"shape":{}}})", json_quote(piece.file),
                     json_quote(piece.key), piece.rectangle.offset.to_string(),
                     piece.rectangle.shape.to_string());
}

std::string tensor_text(const std::string& name, const TensorRecord& record) {
  std::vector<std::string> pieces;
  for (const TensorPiece& piece : record.pieces) pieces.push_back(piece_text(piece));
  return fmt::format(R"({}:{{"group":"{}","dtype":"{}","shape":{},"pieces":[{}]}})",
                     json_quote(name), group_name(record.group), file_dtype_name(record.dtype),
                     record.shape.to_string(), fmt::join(pieces, ","));
}

std::string file_text(const std::string& name, const FileRecord& record) {
  return fmt::format(R"({}:{{"bytes":{},"xxh64":"{:016x}"}})", json_quote(name), record.num_bytes,
                     record.checksum);
}

std::string normal_state(const std::string& state) {
  const json parsed = parse_strict_json(state, "checkpoint state", kMaxDepth - 1);
  require(parsed.is_object(), "checkpoint state: expected a JSON object, found {}",
          parsed.type_name());
  return parsed.dump();
}

}  // namespace

std::string_view group_name(TensorGroup group) {
  return group == TensorGroup::kModel ? "model" : "optimizer";
}

std::string manifest_text(const Manifest& manifest) {
  std::vector<std::string> files;
  for (const auto& [name, record] : manifest.files) files.push_back(file_text(name, record));
  std::vector<std::string> tensors;
  for (const auto& [name, record] : manifest.tensors) tensors.push_back(tensor_text(name, record));
  return fmt::format(
      "{{\n\"format\":\"{}\",\n\"version\":{},\n\"step\":{},\n\"files\":{{\n{}\n}},\n"
      "\"tensors\":{{\n{}\n}},\n\"state\":{}\n}}\n",
      kFormat, kVersion, manifest.step, fmt::join(files, ",\n"), fmt::join(tensors, ",\n"),
      normal_state(manifest.state));
}

Manifest parse_manifest_part(std::string_view text, std::string_view where) {
  const json root = parse_strict_json(text, where, kMaxDepth);
  check_format(root, where);
  require_members(root, {"format", "version", "step", "files", "tensors", "state"}, where);
  Manifest manifest;
  manifest.step = json_size(json_member(root, "step", where), "step", where);
  require(manifest.step <= kMaxStep, "{}: step {} is above {}, which no run reaches; it is damaged",
          where, manifest.step, kMaxStep);
  manifest.files = parse_files(json_member(root, "files", where), where);
  manifest.tensors = parse_tensors(json_member(root, "tensors", where), manifest, where);
  const json& state = json_member(root, "state", where);
  require(state.is_object(), "{}: 'state' must be an object, found {}", where, state.type_name());
  manifest.state = state.dump();
  return manifest;
}

Manifest parse_manifest(std::string_view text, std::string_view where) {
  Manifest manifest = parse_manifest_part(text, where);
  for (const auto& [name, record] : manifest.tensors) {
    const std::string defect = cover_defect(record.shape, record.pieces);
    require(defect.empty(), "{}: tensor {}: {}", where, quote_for_message(name), defect);
  }
  return manifest;
}

}  // namespace tessera
