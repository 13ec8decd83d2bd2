#include "hf/config/block_scales.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/text/names.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr std::string_view kKey = "quantization_config";

/// What each key may be; of those with null anything.
json known_keys() {
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"activation_scheme", nullptr},  // of inference
          {"scale_fmt", nullptr},          // ue8m0: scales are powers of two, of whatever type
          {"weight_block_size", nullptr},  // read below
          {"modules_to_not_convert", nullptr},
          {"ignored_layers", nullptr},  // what is stored whole is seen by its type
          {"dequantize", nullptr}};
}

void check_keys(const json& value, const json& known, std::string_view where) {
  for (const auto& [key, found] : value.items()) {
    if (!known.contains(key)) {
      std::vector<std::string> names;
      for (const auto& [name, ignored] : known.items()) names.push_back(name);
      user_error("{}: '{}' has the key {}, which is unknown{}", where, kKey, quote_for_message(key),
                 did_you_mean(key, names));
    }
    require(known[key].is_null() || found.is_null() || found == known[key],
            "{}: '{}' has {} = {}, and only {} is supported", where, kKey, key,
            quote_for_message(found.dump()), known[key].dump());
  }
}

int64_t block_size(const json& sizes, size_t idx, std::string_view where) {
  constexpr int64_t kMost = 1 << 20;
  const int64_t size = json_size(sizes[idx], "weight_block_size", where);
  require(size >= 1 && size <= kMost, "{}: {} has weight_block_size {}, which is not from 1 to {}",
          where, kKey, size, kMost);
  return size;
}

}  // namespace

std::optional<BlockScales> read_block_scales(const json& value, std::string_view where) {
  if (value.is_null()) return std::nullopt;
  require(value.is_object(), "{}: '{}' must be an object, found {}", where, kKey,
          value.type_name());
  const std::string method = value.value("quant_method", json()).dump();
  require(method == "\"fp8\"",
          "{}: '{}' has quant_method {}, and only \"fp8\" with scales of blocks and \"mxfp4\" are "
          "supported; convert the model to BF16 or F32 first",
          where, kKey, method);
  json named = value;
  if (named.value("fmt", json()) == "float8_e4m3fn") named["fmt"] = "e4m3";  // PyTorch's name
  check_keys(named, known_keys(), where);
  const json sizes = value.value("weight_block_size", json());
  require(sizes.is_array() && sizes.size() == 2,
          "{}: '{}' has weight_block_size {}; expected two sizes, such as [128, 128], since other "
          "scales than those of blocks are not supported",
          where, kKey, quote_for_message(sizes.dump()));
  return BlockScales{block_size(sizes, 0, where), block_size(sizes, 1, where)};
}

bool read_mxfp4(const json& value, std::string_view where) {
  if (!value.is_object() || value.value("quant_method", json()) != "mxfp4") return false;
  check_keys(value,
             {{"quant_method", "mxfp4"},
              {"modules_to_not_convert", nullptr},  // what is stored whole is seen by its type
              {"dequantize", nullptr}},
             where);
  return true;
}

std::string without_quantization(std::string_view text) {
  auto config = nlohmann::ordered_json::parse(text.begin(), text.end());
  config.erase(std::string(kKey));
  config.erase("expert_dtype");  // what DeepSeek-V4 says of its experts' numbers beside it
  return config.dump(2) + "\n";
}

}  // namespace tessera
