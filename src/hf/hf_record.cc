#include "hf/hf_record.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/file/file.h"
#include "hf/transfer/elements.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

enum class FileKind { kWeights, kCompanion, kUnknown };

FileKind classify(const std::string& name) {
  constexpr std::array kCompanions = {".json", ".txt", ".model", ".jinja", ".md", ".py"};
  constexpr std::array kWeights = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"};
  const auto ends = [&](const char* end) { return name.ends_with(end); };
  if (name == kHfRecordFile || std::ranges::any_of(kWeights, ends)) return FileKind::kWeights;
  const bool legal = name.starts_with("LICENSE") || name.starts_with("NOTICE");
  return legal || std::ranges::any_of(kCompanions, ends) ? FileKind::kCompanion
                                                         : FileKind::kUnknown;
}

void copy_one(const fs::path& from, const fs::path& to) {
  const MappedFile source(from);
  OutputFile target(to);
  target.write(source.bytes());
  target.sync();
  target.close();
}

bool flag_member(const json& object, const char* key, std::string_view where) {
  const json& value = json_member(object, key, where);
  require(value.is_boolean(), "{}: '{}' must be true or false", where, key);
  return value.get<bool>();
}

DType float_dtype(const json& value, std::string_view where) {
  const DType dtype = json_dtype(value, where);
  require(is_float_storage(dtype), "{}: {} is no type of weights", where, dtype_name(dtype));
  return dtype;
}

/// Of one tensor, which may be a table of whole numbers.
DType tensor_dtype(const json& value, std::string_view where) {
  const DType dtype = json_dtype(value, where);
  return is_whole_storage(dtype) ? dtype : float_dtype(value, where);
}

}  // namespace

DType HfRecord::dtype_of(const std::string& name) const {
  const auto found = other_dtypes.find(name);
  return found == other_dtypes.end() ? dtype : found->second;
}

std::string hf_record_text(const HfRecord& record) {
  json others = json::object();
  for (const auto& [name, dtype] : record.other_dtypes) others[name] = file_dtype_name(dtype);
  const json text = {{"fused_experts", record.layout.fused_experts},
                     {"plain_moe_name", record.layout.plain_moe_name},
                     {"dense_as_moe", record.layout.dense_as_moe},
                     {"stored_tied_head", record.layout.stored_tied_head},
                     {"repeated_embedding", record.layout.repeated_embedding},
                     {"repeated_head", record.layout.repeated_head},
                     {"vocab_size", record.layout.vocab_size},
                     {"dtype", file_dtype_name(record.dtype)},
                     {"other_dtypes", others}};
  return text.dump(2) + "\n";
}

HfRecord parse_hf_record(std::string_view text, std::string_view where) {
  constexpr int kMaxDepth = 3;
  const json object = parse_strict_json(text, where, kMaxDepth);
  require_members(object,
                  {"fused_experts", "plain_moe_name", "stored_tied_head", "repeated_embedding",
                   "repeated_head", "dense_as_moe", "vocab_size", "dtype", "other_dtypes"},
                  where);
  HfRecord record;
  HfLayout& layout = record.layout;
  layout.fused_experts = flag_member(object, "fused_experts", where);
  layout.plain_moe_name = flag_member(object, "plain_moe_name", where);
  layout.stored_tied_head = flag_member(object, "stored_tied_head", where);
  layout.vocab_size = json_size(json_member(object, "vocab_size", where), "vocab_size", where);
  // Older records do not have these.
  if (object.contains("repeated_embedding"))
    layout.repeated_embedding = flag_member(object, "repeated_embedding", where);
  if (object.contains("dense_as_moe"))
    layout.dense_as_moe = flag_member(object, "dense_as_moe", where);
  if (object.contains("repeated_head"))
    layout.repeated_head = flag_member(object, "repeated_head", where);
  record.dtype = float_dtype(json_member(object, "dtype", where), where);
  const json& others = json_member(object, "other_dtypes", where);
  require(others.is_object(), "{}: other_dtypes must be an object", where);
  for (const auto& [name, value] : others.items()) {
    record.other_dtypes[name] = tensor_dtype(value, where);
  }
  return record;
}

std::vector<std::string> copy_companion_files(const fs::path& from, const fs::path& to) {
  std::vector<std::string> left_out;
  std::error_code error;
  for (fs::directory_iterator it(from, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    std::error_code ignored;
    if (!it->is_regular_file(ignored) || name.starts_with('.')) continue;
    const FileKind kind = classify(name);
    if (kind == FileKind::kCompanion) copy_one(it->path(), to / name);
    if (kind == FileKind::kUnknown) left_out.push_back(name);
  }
  require(!error, "cannot list folder {}: {}", from.string(), error.message());
  std::ranges::sort(left_out);
  return left_out;
}

}  // namespace tessera
