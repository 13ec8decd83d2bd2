#include "hf/config/config_json.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/text/names.h"

namespace tessera {
namespace {

using nlohmann::json;

/// Keys that change no number that the model computes. Those of generation, which old files hold
/// too, follow the tokens'.
constexpr std::array kHarmless = {
    "model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "auto_map",
    "_name_or_path", "name_or_path", "_commit_hash", "tokenizer_class", "use_cache", "ep_size",
    "pretraining_tp", "gradient_checkpointing", "output_attentions", "output_hidden_states",
    "return_dict", "use_return_dict", "attn_implementation", "_attn_implementation",
    "_attn_implementation_autoset", "experts_implementation", "id2label", "label2id", "num_labels",
    "problem_type", "task_specific_params", "finetuning_task", "prefix", "torchscript",
    "tf_legacy_loss", "use_bfloat16", "pruned_heads", "is_decoder",
    // Tokens.
    "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "unk_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens",
    // Generation.
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "max_length", "max_new_tokens",
    "min_length", "num_beams", "num_beam_groups", "num_return_sequences", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty",
    "early_stopping", "exponential_decay_length_penalty", "output_scores",
    "return_dict_in_generate", "remove_invalid_values",
    // Balancing of the published training code; transformers computes no such loss for the
    // families that have these keys.
    "aux_loss_alpha", "seq_aux",
    // What gpt-oss's own code reads; transformers has other names for it.
    "experts_per_token", "initial_context_length",
    // Layers for predicting further tokens are no part of transformers' models.
    "num_nextn_predict_layers", "num_mtp_layers"};

/// Keys of every family, with defaults.
constexpr std::string_view kCommonDefaults =
    R"({"hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": false,
        "pad_token_id": null, "rope_theta": null, "rope_scaling": null, "rope_parameters": null,
        "original_max_position_embeddings": null, "quantization_config": null})";

/// Keys that a file may have only with this value, or null.
constexpr std::string_view kCommonFixed =
    R"({"attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0,
        "is_encoder_decoder": false, "add_cross_attention": false,
        "cross_attention_hidden_size": null, "chunk_size_feed_forward": 0,
        "tie_encoder_decoder": false, "compression_config": null,
        "sliding_window": null, "use_sliding_window": false, "attention_bias": false,
        "qkv_bias": false, "mlp_bias": false, "use_qk_norm": false, "partial_rotary_factor": 1.0,
        "router_jitter_noise": 0.0, "clip_qkv": null, "per_layer_config": null})";

/// Keys of a model with encoders of images that say nothing of its text part, or are taken over.
constexpr std::array kWholeKeys = {
    "text_config",           "vision_config",       "image_token_id",      "video_token_id",
    "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings", "quantization_config",
    "pad_token_id",          "initializer_range",   "boi_token_index",     "eoi_token_index",
    "image_token_index"};

/// The same of Gemma 4 alone, whose smaller models hear too.
constexpr std::array kGemmaWholeKeys = {
    "audio_config", "audio_token_id",  "boa_token_id", "boi_token_id",
    "eoa_token_id", "eoa_token_index", "eoi_token_id", "vision_soft_tokens_per_image"};

constexpr std::array kExpertCountKeys = {"num_experts", "num_local_experts", "n_routed_experts"};

json parse_literal(std::string_view text) {
  return json::parse(text.begin(), text.end());
}

json family_defaults(const Family& family) {
  json defaults = parse_literal(kCommonDefaults);
  defaults.update(parse_literal(family.defaults));
  return defaults;
}

json fixed_values(const Family& family) {
  json fixed = parse_literal(kCommonFixed);
  fixed.update(parse_literal(family.fixed));
  return fixed;
}

bool is_allowed(const json& value, const json& allowed) {
  if (value.is_null() || value == allowed) return true;
  if (!allowed.is_object()) return false;
  const json& any = allowed.at("any");
  return std::ranges::find(any, value) != any.end();
}

void check_fixed(const std::string& key, const json& value, const json& allowed,
                 std::string_view where) {
  if (is_allowed(value, allowed)) return;
  require(key != "compression_config",
          "{}: '{}' says that the weights are quantized, which is not supported; convert the model "
          "to BF16 or F32 first",
          where, key);
  user_error(
      "{}: '{}' is {}, and only {} is supported here; the model would compute something "
      "else",
      where, key, quote_for_message(value.dump()),
      allowed.is_object() ? allowed.at("any").dump() : allowed.dump());
}

[[noreturn]] void refuse_unknown(const std::string& key, const json& known, const Family& family,
                                 std::string_view where) {
  const json renamed = parse_literal(family.renamed);
  std::vector<std::string> names;
  for (const auto& [name, value] : known.items()) {
    if (std::ranges::find(renamed, json(name)) == renamed.end()) names.push_back(name);
  }
  std::string suggestion;
  for (const auto& [own, common] : renamed.items()) {
    names.push_back(own);
    if (common == key) suggestion = fmt::format("; did you mean '{}'?", own);
  }
  user_error(
      "{}: the key {} is unknown for model type '{}', so what it changes is unknown too{}; remove "
      "it if the model does not need it",
      where, quote_for_message(key), family.model_type,
      suggestion.empty() ? did_you_mean(key, names) : suggestion);
}

bool is_expert_count(std::string_view key) {
  return std::ranges::find(kExpertCountKeys, key) != kExpertCountKeys.end();
}

/// The key that a file's name stands for. transformers takes the common names of counts beside a
/// family's own, of other values the family's alone; "" for the other.
std::string read_key(const Family& family, const std::string& name) {
  const json renamed = parse_literal(family.renamed);
  if (renamed.contains(name)) return renamed[name].get<std::string>();
  const std::string key(canonical_key(family, name));
  const bool common = is_expert_count(name) || name == "num_experts_per_tok";
  return common || std::ranges::find(renamed, json(name)) == renamed.end() ? key : "";
}

void check_architectures(const json& file, std::string_view expected, std::string_view where,
                         std::string_view other = "") {
  const auto found = file.find("architectures");
  if (found == file.end() || found->is_null()) return;
  const bool is_one = found->is_array() && found->size() == 1;
  require(is_one && (found->front() == expected || (!other.empty() && found->front() == other)),
          "{}: architectures is {}, and only [\"{}\"] is supported", where,
          quote_for_message(found->dump()), expected);
}

/// The value of every layer where a list says it of each.
json joined_list(const json& value) {
  const bool equal = value.is_array() && !value.empty() &&
                     std::ranges::all_of(value, [&](const json& v) { return v == value[0]; });
  return equal ? value[0] : value;
}

}  // namespace

bool Family::has_key(std::string_view key) const {
  return parse_literal(defaults).contains(key);
}

const Family& find_family(std::string_view model_type) {
  std::vector<std::string> names;
  for (const Family& family : families()) {
    if (family.model_type == model_type) return family;
    names.emplace_back(family.model_type);
  }
  user_error("model type {} is not supported{}; supported are {}", quote_for_message(model_type),
             did_you_mean(model_type, names), fmt::join(names, ", "));
}

const Family* find_text_family(std::string_view whole_type) {
  const auto found = std::ranges::find_if(families(), [&](const Family& family) {
    return !family.whole[0].empty() && family.whole[0] == whole_type;
  });
  return found == families().end() ? nullptr : &*found;
}

std::string_view canonical_key(const Family& family, std::string_view key) {
  if (!is_expert_count(key)) return key;
  for (const char* name : kExpertCountKeys) {
    if (family.has_key(name)) return name;
  }
  return key;
}

std::string file_key(const Family& family, std::string_view key) {
  const json renamed = parse_literal(family.renamed);
  for (const auto& [name, canonical] : renamed.items()) {
    if (canonical == key) return name;
  }
  return std::string(key);
}

std::optional<std::string> find_text_config(std::string_view text, const std::string& where) {
  constexpr int kMaxDepth = 16;
  const json file = parse_strict_json(text, where, kMaxDepth);
  const std::string& type = json_text(json_member(file, "model_type", where), "model_type", where);
  const Family* family = find_text_family(type);
  if (family == nullptr) return std::nullopt;
  check_architectures(file, family->whole[1], where);
  for (const auto& [name, value] : file.items()) {
    const bool of_gemma =
        family->gemma && std::ranges::find(kGemmaWholeKeys, name) != kGemmaWholeKeys.end();
    const bool known = of_gemma || std::ranges::find(kWholeKeys, name) != kWholeKeys.end() ||
                       std::ranges::find(kHarmless, name) != kHarmless.end();
    require(known,
            "{}: the key {} is unknown for model type '{}', so what it changes is unknown too",
            where, quote_for_message(name), type);
  }
  json inner = json_member(file, "text_config", where);
  require(inner.is_object(), "{}: 'text_config' must be an object, found {}", where,
          quote_for_message(inner.dump()));
  require(inner.value("model_type", json(family->model_type)) == family->model_type,
          "{}: the model type of 'text_config' is {}; expected \"{}\"", where,
          quote_for_message(inner["model_type"].dump()), family->model_type);
  inner["model_type"] = family->model_type;
  inner["architectures"] = json::array({family->architecture});
  // transformers ties tables by what the whole says.
  inner["tie_word_embeddings"] =
      file.value("tie_word_embeddings", family_defaults(*family)["tie_word_embeddings"]);
  if (file.contains("quantization_config"))
    inner["quantization_config"] = file["quantization_config"];
  return inner.dump();
}

ConfigJson::ConfigJson(std::string_view text, std::string where) : where_(std::move(where)) {
  constexpr int kMaxDepth = 16;
  const json file = parse_strict_json(text, where_, kMaxDepth);
  const std::string& type =
      json_text(json_member(file, "model_type", where_), "model_type", where_);
  try {
    family_ = &find_family(type);
  } catch (const UserError& error) {
    user_error("{}: {}", where_, error.what());
  }
  check_architectures(file, family_->architecture, where_, family_->other_architecture);
  merge(file);
}

void ConfigJson::merge(const json& file) {
  json values = family_defaults(*family_);
  const json known = values;
  const json fixed = fixed_values(*family_);
  const json unused = parse_literal(family_->unused);
  json given = json::object();
  for (const auto& [name, found] : file.items()) {
    const std::string key = read_key(*family_, name);
    const bool listed =
        family_->listed_counts && (is_expert_count(key) || key == "num_experts_per_tok");
    const json value = listed ? joined_list(found) : found;
    if (known.contains(key)) {
      require(!given.contains(key) || given[key] == value,
              "{}: '{}' and another name of the same value differ", where_, name);
      given[key] = value;
      values[key] = value;
    } else if (fixed.contains(key)) {
      check_fixed(key, value, fixed[key], where_);
    } else if (std::ranges::find(kHarmless, name) != kHarmless.end() ||
               std::ranges::find(unused, json(name)) != unused.end()) {
      continue;
    } else if (family_->attention == AttentionKind::kLatent &&
               (name == "head_dim" || name == "qk_head_dim")) {
      values[name] = value;
    } else {
      refuse_unknown(name, known, *family_, where_);
    }
  }
  values_ = std::make_shared<json>(std::move(values));
}

const json& ConfigJson::value(std::string_view key) const {
  static const json kNull;
  const auto found = values_->find(key);
  return found == values_->end() ? kNull : *found;
}

std::string ConfigJson::spelled(std::string_view key) const {
  return file_key(*family_, key);
}

bool ConfigJson::has(std::string_view key) const {
  return values_->contains(key);
}

bool ConfigJson::is_null(std::string_view key) const {
  return value(key).is_null();
}

int64_t ConfigJson::size(std::string_view key, int64_t min) const {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const json& found = value(key);
  const bool fits = found.is_number_unsigned() && found.get<uint64_t>() <= uint64_t{kMax};
  require(fits && found.get<int64_t>() >= min,
          "{}: '{}' must be an integer of at least {}, found {}", where_, spelled(key), min,
          quote_for_message(found.dump()));
  return found.get<int64_t>();
}

int64_t ConfigJson::bounded(std::string_view key, int64_t least, int64_t most) const {
  const int64_t found = size(key, least);
  require(found <= most, "{}: '{}' is {}, at most {} are supported", where_, spelled(key), found,
          most);
  return found;
}

double ConfigJson::positive(std::string_view key) const {
  const double found = number(key);
  require(found > 0, "{}: '{}' must be above 0, found {}", where_, key, found);
  return found;
}

std::optional<int64_t> ConfigJson::optional_size(std::string_view key, int64_t min) const {
  if (is_null(key)) return std::nullopt;
  return size(key, min);
}

double ConfigJson::number(std::string_view key) const {
  const json& found = value(key);
  require(found.is_number(), "{}: '{}' must be a number, found {}", where_, spelled(key),
          quote_for_message(found.dump()));
  return found.get<double>();
}

bool ConfigJson::flag(std::string_view key) const {
  const json& found = value(key);
  require(found.is_boolean(), "{}: '{}' must be true or false, found {}", where_, spelled(key),
          quote_for_message(found.dump()));
  return found.get<bool>();
}

const std::string& ConfigJson::text(std::string_view key) const {
  return json_text(value(key), spelled(key), where_);
}

}  // namespace tessera
