#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "tokenizer/tokenizer_json.h"

namespace tessera {

// The parts of a tokenizer.json. Every function throws UserError that starts with `where` for what
// is damaged or not supported.

/// A boolean member, or `otherwise` where it is missing.
bool json_flag(const nlohmann::json& object, const char* key, bool otherwise,
               std::string_view where);

Normalizer read_normalizer(const nlohmann::json& value, std::string_view where);
/// Sets what splits text, whether words are bytes, and where a text may be cut.
void read_pre_tokenizer(const nlohmann::json& value, TokenizerDescription& description,
                        std::string_view where);
TokenDecoder read_decoder(const nlohmann::json& value, std::string_view where);

}  // namespace tessera
