#include "serve/completion_request.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "core/config/strict_json.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kMostNesting = 16;
constexpr int64_t kMostStops = 16;
constexpr size_t kLongestStop = 1024;  // bytes
constexpr int64_t kMostAlternatives = 20;
constexpr int64_t kMostTokens = int64_t{1} << 30;

/// The fields of a request, each of which must be read. A null stands for a field's default.
class Fields {
 public:
  explicit Fields(const std::string& body) {
    try {
      json_ = parse_strict_json(body, "the body", kMostNesting);
    } catch (const UserError& error) {
      throw ApiError(400, "invalid_request_error", error.what());
    }
    if (!json_.is_object())
      throw ApiError(400, "invalid_request_error", "the body is not a JSON object");
  }

  const Json* find(const std::string& name) {
    known_.insert(name);
    const auto found = json_.find(name);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }

  std::string text(const std::string& name, const std::string& fallback) {
    const Json* value = find(name);
    if (value == nullptr) return fallback;
    if (!value->is_string()) refuse_field(name, fmt::format("'{}' must be a string", name));
    return value->get<std::string>();
  }

  bool flag(const std::string& name) {
    const Json* value = find(name);
    if (value == nullptr) return false;
    if (!value->is_boolean()) refuse_field(name, fmt::format("'{}' must be true or false", name));
    return value->get<bool>();
  }

  std::optional<int64_t> integer(const std::string& name, int64_t least, int64_t most) {
    const Json* value = find(name);
    if (value == nullptr) return std::nullopt;
    const bool fits = value->is_number_integer() &&
                      (!value->is_number_unsigned() ||
                       value->get<uint64_t>() <= std::numeric_limits<int64_t>::max());
    if (!fits || value->get<int64_t>() < least || value->get<int64_t>() > most)
      refuse_field(name, fmt::format("'{}' is {}; it must be a whole number from {} to {}", name,
                                     value->dump(), least, most));
    return value->get<int64_t>();
  }

  double number(const std::string& name, double fallback, double least, double most) {
    const Json* value = find(name);
    if (value == nullptr) return fallback;
    const double found = value->is_number() ? value->get<double>() : std::nan("");
    if (!(found >= least && found <= most))
      refuse_field(name, fmt::format("'{}' is {}; it must be a number from {} to {}", name,
                                     value->dump(), least, most));
    return found;
  }

  /// A number above 0 and at most 1; 1 where there is none.
  double share(const std::string& name) {
    const Json* value = find(name);
    if (value == nullptr) return 1;
    const double found = value->is_number() ? value->get<double>() : std::nan("");
    if (!(found > 0 && found <= 1))
      refuse_field(name, fmt::format("'{}' is {}; it must be a number above 0 and at most 1", name,
                                     value->dump()));
    return found;
  }

  /// A field that may have no other value than those that change nothing.
  void require_neutral(const std::string& name, const std::vector<Json>& neutral) {
    const Json* value = find(name);
    if (value == nullptr || std::ranges::find(neutral, *value) != neutral.end()) return;
    std::vector<std::string> texts;
    for (const Json& one : neutral) texts.push_back(one.dump());
    refuse_field(name,
                 texts.empty() ? fmt::format("'{}' is not supported here", name)
                               : fmt::format("'{}' is supported here only as {}", name,
                                             fmt::join(texts, " or ")),
                 "unsupported_value");
  }

  /// An object that is for its sender alone, with texts.
  void labels(const std::string& name) {
    const Json* value = find(name);
    const bool fits =
        value == nullptr || (value->is_object() && std::ranges::all_of(*value, [](const Json& one) {
                               return one.is_string();
                             }));
    if (!fits) refuse_field(name, fmt::format("'{}' must be an object of strings", name));
  }

  void refuse_others() const {
    for (const auto& [name, value] : json_.items()) {
      if (!known_.contains(name))
        refuse_field(name, fmt::format("unknown field '{}'", name), "unknown_parameter");
    }
  }

 private:
  Json json_;
  std::set<std::string> known_;
};

/// What all texts of a request share.
struct Sampling {
  GenerateOptions options;
  int64_t count = 1;  ///< texts of each prompt
  bool scores_prompt = false;
  int64_t num_alternatives = 0;
};

void check_model(Fields& fields, const CompletionRules& rules) {
  const std::string model = fields.text("model", rules.model);
  if (model != rules.model) throw no_such_model(model, rules);
}

uint64_t random_seed() {
  std::random_device device;
  return device() & 0x7fffffffU;
}

Sampling read_sampling(Fields& fields, const CompletionRules& rules) {
  Sampling result;
  result.options.temperature = fields.number("temperature", 1, 0, 1e6);
  result.options.top_p = fields.share("top_p");
  result.options.top_k = fields.integer("top_k", 0, kMostTokens).value_or(0);
  result.options.vocab_size = rules.tokenizer.vocab_size();
  const auto seed = fields.integer("seed", 0, std::numeric_limits<int64_t>::max() / 2);
  result.options.seed = seed ? static_cast<uint64_t>(*seed) : random_seed();
  result.count = fields.integer("n", 1, rules.max_choices).value_or(1);
  return result;
}

std::vector<std::string> read_stop(Fields& fields) {
  const Json* value = fields.find("stop");
  if (value == nullptr) return {};
  const Json list = value->is_array() ? *value : Json::array({*value});
  std::vector<std::string> stops;
  for (const Json& stop : list) {
    if (!stop.is_string() || stop.get<std::string>().empty() ||
        stop.get<std::string>().size() > kLongestStop)
      refuse_field(
          "stop", fmt::format("'stop' must be one or more strings of 1 to {} bytes", kLongestStop));
    stops.push_back(stop.get<std::string>());
  }
  if (std::ssize(stops) > kMostStops)
    refuse_field("stop", fmt::format("'stop' has {} strings; at most {} are taken", stops.size(),
                                     kMostStops));
  return stops;
}

bool read_include_usage(Fields& fields, bool stream) {
  const Json* options = fields.find("stream_options");
  if (options == nullptr) return false;
  if (!stream) refuse_field("stream_options", "'stream_options' goes with \"stream\": true only");
  const bool known = options->is_object() && std::ranges::all_of(options->items(), [](auto item) {
                       return (item.key() == "include_usage" && item.value().is_boolean()) ||
                              (item.key() == "include_obfuscation" && item.value() == Json(false));
                     });
  if (!known)
    refuse_field("stream_options",
                 "'stream_options' may have \"include_usage\": true or false, and "
                 "\"include_obfuscation\": false");
  return options->value("include_usage", false);
}

/// A prompt as ids; an empty one starts a new document.
std::vector<int32_t> encode(const std::string& text, const Tokenizer& tokenizer,
                            const std::string& field) {
  std::vector<int32_t> ids;
  try {
    tokenizer.encode(text, ids);
  } catch (const UserError& error) {
    refuse_field(field, error.what());
  }
  if (ids.empty()) ids.push_back(tokenizer.end_of_document());
  return ids;
}

std::vector<int32_t> read_ids(const Json& list, const Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  for (const Json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 ||
        id.get<int64_t>() >= tokenizer.vocab_size())
      refuse_field("prompt", fmt::format("the token id {} of the prompt is not one of the {} there "
                                         "are",
                                         id.dump(), tokenizer.vocab_size()));
    ids.push_back(id.get<int32_t>());
  }
  if (ids.empty()) refuse_field("prompt", "a prompt of token ids is empty");
  return ids;
}

/// A string, token ids, or a list of either.
std::vector<Choice> read_prompts(Fields& fields, const Tokenizer& tokenizer) {
  const Json* value = fields.find("prompt");
  if (value == nullptr) refuse_field("prompt", "'prompt' is missing");
  const bool one =
      value->is_string() || (value->is_array() && !value->empty() && value->front().is_number());
  const Json list = one ? Json::array({*value}) : *value;
  if (!list.is_array() || list.empty())
    refuse_field("prompt", "'prompt' must be a string, token ids, or a list of either");
  std::vector<Choice> prompts;
  for (const Json& prompt : list) {
    Choice choice;
    if (prompt.is_string()) {
      choice.prompt = prompt.get<std::string>();
      choice.decoding.prompt = encode(choice.prompt, tokenizer, "prompt");
    } else if (prompt.is_array()) {
      choice.decoding.prompt = read_ids(prompt, tokenizer);
      choice.prompt = tokenizer.decode(choice.decoding.prompt);
    } else {
      refuse_field("prompt", "'prompt' must be a string, token ids, or a list of either");
    }
    prompts.push_back(std::move(choice));
  }
  return prompts;
}

/// The text of a message; an answer that was none may come back without.
std::string message_text(const Json& message) {
  const auto content = message.find("content");
  if (content != message.end() && content->is_string()) return content->get<std::string>();
  if (message["role"] == "assistant" && (content == message.end() || content->is_null())) return "";
  std::string text;
  const bool parts = content != message.end() && content->is_array() &&
                     std::ranges::all_of(*content, [&](const Json& part) {
                       const bool is_text = part.is_object() &&
                                            part.value("type", Json()) == "text" &&
                                            part.contains("text") && part["text"].is_string();
                       if (is_text) text += part["text"].get<std::string>();
                       return is_text;
                     });
  if (!parts) refuse_field("messages", "a message's 'content' must be text");
  return text;
}

/// Whether a message's field, beside role and content, changes nothing: a null, a name (which a
/// prompt has no place for), and what an answer that is sent back has empty.
bool is_neutral(const std::string& field, const Json& value) {
  if (value.is_null()) return true;
  if (field == "name") return value.is_string();
  if (field == "annotations") return value.is_array();
  return field == "tool_calls" && value == Json::array();
}

void check_message_fields(const Json& message) {
  for (const auto& [field, value] : message.items()) {
    if (field != "role" && field != "content" && !is_neutral(field, value))
      refuse_field("messages", fmt::format("a message's '{}' is not supported here", field),
                   "unsupported_value");
  }
}

/// The messages one after another, each with its role before it, and the answer's role last.
std::string plain_chat(const Json& messages) {
  std::string prompt;
  for (const Json& message : messages) {
    if (!message.is_object()) refuse_field("messages", "a message is not an object");
    const Json role = message.value("role", Json());
    const char* name = role == "system" || role == "developer" ? "System"
                       : role == "user"                        ? "User"
                       : role == "assistant"                   ? "Assistant"
                                                               : nullptr;
    if (name == nullptr)
      refuse_field("messages", fmt::format("a message's role is {}; it must be system, user or "
                                           "assistant",
                                           role.dump()));
    check_message_fields(message);
    prompt += fmt::format("{}: {}\n\n", name, message_text(message));
  }
  return prompt + "Assistant:";
}

std::vector<Choice> read_messages(Fields& fields, const CompletionRules& rules) {
  if (rules.chat == ChatFormat::kNone)
    throw ApiError(400, "invalid_request_error",
                   "this model has no chat template; use /v1/completions, or start the server with "
                   "--chat-format plain",
                   "messages", "no_chat_template");
  const Json* messages = fields.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->empty())
    refuse_field("messages", "'messages' must be a list of one message or more");
  Choice choice;
  choice.prompt = plain_chat(*messages);
  choice.decoding.prompt = encode(choice.prompt, rules.tokenizer, "messages");
  return {choice};
}

/// `logprobs` of a completion is a number, of a chat a flag beside `top_logprobs`.
std::optional<int64_t> read_logprobs(Fields& fields, bool is_chat) {
  if (!is_chat) return fields.integer("logprobs", 0, kMostAlternatives);
  const bool wanted = fields.flag("logprobs");
  const auto count = fields.integer("top_logprobs", 0, kMostAlternatives);
  if (!wanted && count) refuse_field("top_logprobs", "'top_logprobs' goes with \"logprobs\": true");
  return wanted ? std::optional(count.value_or(0)) : std::nullopt;
}

/// What is for the books of OpenAI's service, its caches and its queues: nothing is kept here, and
/// all requests are equal.
void read_bookkeeping(Fields& fields) {
  for (const char* name : {"user", "safety_identifier", "prompt_cache_key"}) fields.text(name, "");
  fields.flag("store");
  fields.labels("metadata");
  fields.require_neutral("service_tier", {"auto", "default"});
  fields.require_neutral("prompt_cache_retention", {"in-memory", "in_memory", "24h"});
}

/// Tools that may not be there, and texts of other kinds.
void read_neutral_chat(Fields& fields) {
  fields.require_neutral("response_format", {{{"type", "text"}}});
  fields.require_neutral("tools", {Json::array()});
  fields.require_neutral("tool_choice", {"none", "auto"});
  fields.flag("parallel_tool_calls");
  fields.require_neutral("functions", {Json::array()});
  fields.require_neutral("function_call", {"none", "auto"});
  fields.require_neutral("modalities", {Json::array({"text"})});
  fields.require_neutral("reasoning_effort", {"none"});
  fields.require_neutral("verbosity", {"medium"});
  for (const char* name : {"audio", "prediction", "web_search_options"})
    fields.require_neutral(name, {});
}

void read_neutral(Fields& fields, bool is_chat) {
  read_bookkeeping(fields);
  fields.require_neutral("presence_penalty", {0});
  fields.require_neutral("frequency_penalty", {0});
  fields.require_neutral("logit_bias", {Json::object()});
  if (is_chat) {
    read_neutral_chat(fields);
  } else {
    fields.require_neutral("best_of", {1});
    fields.require_neutral("suffix", {""});
  }
}

/// The tokens that a request may ask for after its longest prompt.
int64_t read_max_tokens(Fields& fields, bool is_chat, int64_t longest,
                        const CompletionRules& rules) {
  std::optional<int64_t> wanted = fields.integer("max_tokens", 0, kMostTokens);
  if (is_chat) {
    const auto completion = fields.integer("max_completion_tokens", 0, kMostTokens);
    if (completion) wanted = completion;
  }
  const int64_t room = rules.context - longest;
  // What a client does not ask for never makes its request too long.
  const int64_t unsaid = is_chat ? room : std::min(rules.default_max_tokens, room);
  const int64_t count = wanted.value_or(std::max<int64_t>(unsaid, 0));
  if (count > room)
    refuse_field(is_chat ? "messages" : "prompt",
                 fmt::format("the prompt's {} tokens and max_tokens = {} are above the context of "
                             "{} tokens",
                             longest, count, rules.context),
                 "context_length_exceeded");
  return count;
}

}  // namespace

ApiError no_such_model(const std::string& model, const CompletionRules& rules) {
  return {404, "invalid_request_error",
          fmt::format("the model '{}' is not here; this server has '{}'", model, rules.model),
          "model", "model_not_found"};
}

CompletionRequest parse_completion(const std::string& body, bool is_chat,
                                   const CompletionRules& rules) {
  Fields fields(body);
  CompletionRequest request{.is_chat = is_chat};
  check_model(fields, rules);
  std::vector<Choice> prompts =
      is_chat ? read_messages(fields, rules) : read_prompts(fields, rules.tokenizer);
  Sampling sampling = read_sampling(fields, rules);
  request.stream = fields.flag("stream");
  request.include_usage = read_include_usage(fields, request.stream);
  request.echo = !is_chat && fields.flag("echo");
  request.logprobs = read_logprobs(fields, is_chat);
  request.stop = read_stop(fields);
  read_neutral(fields, is_chat);
  if (std::ssize(prompts) * sampling.count > rules.max_choices)
    refuse_field("n", fmt::format("{} prompts times n = {} are above the {} texts that a request "
                                  "may have",
                                  prompts.size(), sampling.count, rules.max_choices));
  int64_t longest = 0;
  for (const Choice& prompt : prompts)
    longest = std::max(longest, std::ssize(prompt.decoding.prompt));
  sampling.options.max_tokens = read_max_tokens(fields, is_chat, longest, rules);
  fields.refuse_others();
  for (Choice& prompt : prompts) {
    DecodingRequest& decoding = prompt.decoding;
    request.prompt_tokens += std::ssize(decoding.prompt);
    decoding.end_of_document = rules.tokenizer.end_of_document();
    decoding.options = sampling.options;
    decoding.scores_prompt = request.echo && request.logprobs.has_value();
    decoding.num_alternatives = request.logprobs.value_or(0);
    for (int64_t sample = 0; sample < sampling.count; ++sample) {
      request.choices.push_back(prompt);
      request.choices.back().decoding.options.seed += static_cast<uint64_t>(sample);
    }
  }
  return request;
}

}  // namespace tessera
