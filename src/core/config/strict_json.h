#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "core/dtype.h"
#include "core/tensor.h"

namespace tessera {

// JSON from files that nobody vouches for. Every function throws UserError that starts with
// `where`.

/// Parses text, refusing duplicate keys and more than `max_depth` nested objects and arrays.
nlohmann::json parse_strict_json(std::string_view text, std::string_view where, int max_depth);

/// The member of an object; it must exist.
const nlohmann::json& json_member(const nlohmann::json& object, const char* key,
                                  std::string_view where);
/// Refuses anything but an object whose members all have names in `keys`.
void require_members(const nlohmann::json& object, std::initializer_list<std::string_view> keys,
                     std::string_view where);
/// An integer of at least 0 that an int64_t holds.
int64_t json_size(const nlohmann::json& value, std::string_view what, std::string_view where);
const std::string& json_text(const nlohmann::json& value, std::string_view what,
                             std::string_view where);
/// A list of at most Shape::kMaxRank sizes.
Shape json_dims(const nlohmann::json& value, std::string_view what, std::string_view where);
/// Dims whose product, and that of any part of them, times the bytes of an element an int64_t
/// holds.
Shape json_shape(const nlohmann::json& value, std::string_view where);

/// "F32", "BF16", ...: the element types as safetensors names them.
std::string_view file_dtype_name(DType dtype);
DType json_dtype(const nlohmann::json& value, std::string_view where);

/// A JSON string literal of text, which must be UTF-8.
std::string json_quote(std::string_view text);
/// 'text' for a message: control characters shown by number, cut when long.
std::string quote_for_message(std::string_view text);

}  // namespace tessera
