#include "tokenizer/tokenizer_json.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/random.h"
#include "tokenizer/tokenizer_json_parts.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 32;
/// Tables are as long as the largest id.
constexpr int64_t kMaxIds = int64_t{1} << 22;

int64_t token_id(const json& value, std::string_view where) {
  const int64_t id = json_size(value, "an id", where);
  require(id < kMaxIds, "{}: id {} of a token; ids up to {} are supported", where, id, kMaxIds - 1);
  return id;
}

/// The model's tokens by id.
std::vector<std::string> read_vocabulary(const json& vocab, std::string_view where) {
  require(vocab.is_object(), "{}: vocab must be an object of ids by token, found {}", where,
          vocab.type_name());
  std::vector<std::string> tokens;
  for (const auto& [token, id_value] : vocab.items()) {
    const size_t id = token_id(id_value, where);
    require(!token.empty(), "{}: the vocabulary has an empty token", where);
    if (id >= tokens.size()) tokens.resize(id + 1);
    require(tokens[id].empty(), "{}: tokens {} and {} both have id {}", where,
            quote_for_message(tokens[id]), quote_for_message(token), id);
    tokens[id] = token;
  }
  return tokens;
}

/// A merge is written "a b" or ["a", "b"].
std::pair<std::string, std::string> read_merge(const json& merge, std::string_view where) {
  if (merge.is_array() && merge.size() == 2) {
    return {json_text(merge[0], "a merge", where), json_text(merge[1], "a merge", where)};
  }
  const std::string& text = json_text(merge, "a merge (or a list of two)", where);
  const size_t space = text.find(' ');
  require(space != std::string::npos && text.find(' ', space + 1) == std::string::npos,
          "{}: merge {} is not two tokens with a space between", where, quote_for_message(text));
  return {text.substr(0, space), text.substr(space + 1)};
}

/// A token as the model sees it.
std::string model_text(const std::string& token, bool byte_level) {
  std::string bytes;
  return byte_level && decode_byte_letters(token, bytes) ? bytes : token;
}

void read_vocabulary_for_model(TokenizerDescription& description) {
  BpeDescription& model = description.model;
  std::string bytes;
  for (size_t id = 0; id < description.tokens.size(); ++id) {
    const std::string& token = description.tokens[id];
    if (token.empty()) continue;
    // A token with other letters cannot come from bytes: it is found as an added token or never.
    if (model.byte_level && !decode_byte_letters(token, bytes)) continue;
    model.vocabulary.emplace_back(model.byte_level ? bytes : token, static_cast<int32_t>(id));
  }
}

void read_model(const json& file, TokenizerDescription& description, std::string_view where) {
  const json& model = json_member(file, "model", where);
  require_members(
      model,
      {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
       "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"},
      fmt::format("{}: model", where));
  if (model.contains("type")) {
    const std::string& type = json_text(model["type"], "model.type", where);
    require(type == "BPE", "{}: model type {} is not supported; BPE is", where,
            quote_for_message(type));
  }
  const json dropout = model.value("dropout", json());
  require(dropout.is_null() || dropout == 0.0, "{}: dropout of merges is not supported", where);
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json affix = model.value(key, json());
    require(affix.is_null() || affix == json(""), "{}: {} is not supported", where, key);
  }
  BpeDescription& bpe = description.model;
  const json unknown = model.value("unk_token", json());
  if (!unknown.is_null()) bpe.unknown = json_text(unknown, "unk_token", where);
  bpe.fuse_unknown = json_flag(model, "fuse_unk", false, where);
  bpe.byte_fallback = json_flag(model, "byte_fallback", false, where);
  bpe.ignore_merges = json_flag(model, "ignore_merges", false, where);
  description.tokens = read_vocabulary(json_member(model, "vocab", where), where);
  read_vocabulary_for_model(description);
  const json& merges = json_member(model, "merges", where);
  require(merges.is_array(), "{}: merges must be a list, found {}", where, merges.type_name());
  for (const json& merge : merges) {
    const auto [left, right] = read_merge(merge, where);
    bpe.merges.emplace_back(model_text(left, bpe.byte_level), model_text(right, bpe.byte_level));
  }
}

AddedToken read_added_token(const json& value, std::string_view where) {
  AddedToken token;
  token.content = json_text(json_member(value, "content", where), "content", where);
  token.id = static_cast<int32_t>(token_id(json_member(value, "id", where), where));
  require(!token.content.empty(), "{}: added token {} has no text", where, token.id);
  token.special = json_flag(value, "special", false, where);
  token.single_word = json_flag(value, "single_word", false, where);
  token.lstrip = json_flag(value, "lstrip", false, where);
  token.rstrip = json_flag(value, "rstrip", false, where);
  token.normalized = json_flag(value, "normalized", !token.special, where);
  return token;
}

/// Added tokens have the id of the model's token of that text, or one behind all of the model's.
void read_added_tokens(const json& file, TokenizerDescription& description,
                       std::string_view where) {
  const json list = file.value("added_tokens", json());
  if (list.is_null()) return;
  require(list.is_array(), "{}: added_tokens must be a list", where);
  std::unordered_map<std::string_view, int32_t> of_model;
  for (size_t id = 0; id < description.tokens.size(); ++id) {
    if (!description.tokens[id].empty()) of_model.emplace(description.tokens[id], id);
  }
  const auto count = static_cast<int32_t>(of_model.size());
  int32_t largest = -1;
  std::unordered_map<int32_t, std::string> seen;
  for (const json& value : list) {
    AddedToken token = read_added_token(value, where);
    const auto known = of_model.find(token.content);
    // The package numbers new tokens by itself, whatever the file says.
    const int32_t expected = known != of_model.end() ? known->second : std::max(largest + 1, count);
    require(token.id == expected, "{}: added token {} has id {}, but the vocabulary makes it {}",
            where, quote_for_message(token.content), token.id, expected);
    largest = std::max(largest, token.id);
    require(seen.emplace(token.id, token.content).second, "{}: two added tokens have id {}", where,
            token.id);
    description.added.push_back(std::move(token));
  }
  std::unordered_set<std::string_view> contents;
  for (const AddedToken& token : description.added) {
    require(contents.insert(token.content).second, "{}: added token {} appears twice", where,
            quote_for_message(token.content));
  }
}

/// Of the parts that decide ids; the order of members and how merges are written do not count.
uint64_t hash_meaning(const json& file, const TokenizerDescription& description) {
  std::string text = file.value("normalizer", json()).dump() + "\n" +
                     file.value("pre_tokenizer", json()).dump() + "\n" +
                     file.value("decoder", json()).dump() + "\n";
  const BpeDescription& model = description.model;
  text += fmt::format("{} {} {} {}\n", model.unknown.value_or(""), model.fuse_unknown,
                      model.byte_fallback, model.ignore_merges);
  for (const std::string& token : description.tokens) text += token + '\n';
  for (const auto& [left, right] : model.merges) {
    text.append(left).append(1, '\x01').append(right).append(1, '\n');
  }
  for (const AddedToken& token : description.added) {
    text += fmt::format("{} {} {}{}{}{}{}\n", token.id, token.content, token.special,
                        token.single_word, token.lstrip, token.rstrip, token.normalized);
  }
  return hash_text(text.data(), text.size());
}

}  // namespace

TokenizerDescription parse_tokenizer_json(std::string_view text, std::string_view where) {
  const json file = parse_strict_json(text, where, kMaxDepth);
  require_members(file,
                  {"version", "truncation", "padding", "added_tokens", "normalizer",
                   "pre_tokenizer", "post_processor", "decoder", "model"},
                  where);
  for (const char* key : {"truncation", "padding"}) {
    require(file.value(key, json()).is_null(),
            "{}: {} is set, which changes the ids; set it to null", where, key);
  }
  TokenizerDescription description;
  description.source = where;
  description.normalizer = read_normalizer(file.value("normalizer", json()), where);
  read_pre_tokenizer(file.value("pre_tokenizer", json()), description, where);
  read_model(file, description, where);
  read_added_tokens(file, description, where);
  description.decoder = read_decoder(file.value("decoder", json()), where);
  description.hash = hash_meaning(file, description);
  return description;
}

}  // namespace tessera
