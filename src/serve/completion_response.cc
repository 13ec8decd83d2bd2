#include "serve/completion_response.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

namespace tessera {
namespace {

using Json = nlohmann::json;

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string data_event(const std::string& data) {
  return fmt::format("data: {}\n\n", data);
}

/// JSON has neither infinity (of a token that the model holds impossible) nor what is not a number
/// (of a prompt's first).
Json number_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

void append(TextPiece& to, const TextPiece& from) {
  to.text += from.text;
  to.tokens.insert(to.tokens.end(), from.tokens.begin(), from.tokens.end());
  to.offsets.insert(to.offsets.end(), from.offsets.begin(), from.offsets.end());
}

}  // namespace

CompletionResponse::CompletionResponse(const CompletionRequest& request, const Tokenizer& tokenizer,
                                       std::string model, std::string id, int64_t created)
    : request_(request),
      tokenizer_(tokenizer),
      model_(std::move(model)),
      id_(std::move(id)),
      created_(created),
      num_open_(request.choices.size()) {
  for (size_t i = 0; i < request.choices.size(); ++i)
    states_.push_back({.written = WrittenText(tokenizer, request.stop)});
}

std::string CompletionResponse::token_text(int32_t id) const {
  return to_valid_utf8(tokenizer_.decode_continuation(std::span(&id, 1)));
}

std::string CompletionResponse::take(const DecodingTicket::Item& item,
                                     const std::function<void(size_t)>& on_stop) {
  State& state = states_[item.choice];
  if (!state.finish_reason.empty()) return "";
  const Choice& choice = request_.choices[item.choice];
  const int64_t before = request_.echo ? std::ssize(choice.prompt) : 0;
  TextPiece piece;
  // The log-probabilities of a prompt come before its first token, perhaps in several parts.
  int64_t offset = state.tokens.empty() ? 0
                                        : state.offsets.back() +
                                              std::ssize(token_text(state.tokens.back().token.id));
  std::vector<DecodedToken> prompt = item.event.prompt;
  if (!state.begun && choice.decoding.scores_prompt) {
    const double unknown = std::numeric_limits<double>::quiet_NaN();
    prompt.insert(prompt.begin(), DecodedToken{{choice.decoding.prompt.front(), unknown}, {}});
  }
  for (const DecodedToken& token : prompt) {
    piece.tokens.push_back(token);
    piece.offsets.push_back(std::min(offset, before));
    offset += std::ssize(token_text(token.token.id));
    state.tokens.push_back(token);
    state.offsets.push_back(piece.offsets.back());
  }
  TextPiece written;
  if (item.event.token) {
    ++completion_tokens_;
    append(written, state.written.add(*item.event.token));
  }
  if (state.written.stopped()) {
    state.finish_reason = "stop";
    on_stop(item.choice);
  } else if (item.event.end != DecodingEnd::kNot) {
    append(written, state.written.finish());
    state.finish_reason = item.event.end == DecodingEnd::kDocument ? "stop" : "length";
  }
  for (int64_t& own : written.offsets) own += before;
  state.tokens.insert(state.tokens.end(), written.tokens.begin(), written.tokens.end());
  state.offsets.insert(state.offsets.end(), written.offsets.begin(), written.offsets.end());
  if (request_.echo && !state.begun) piece.text = to_valid_utf8(choice.prompt);
  const bool first = !std::exchange(state.begun, true);
  append(piece, written);
  state.text += piece.text;
  if (!state.finish_reason.empty()) --num_open_;
  const bool news =
      first || !piece.text.empty() || !piece.tokens.empty() || !state.finish_reason.empty();
  if (!request_.stream || !news) return "";
  Json made = choice_json(item.choice, piece, true);
  if (request_.is_chat && first) made["delta"]["role"] = "assistant";
  return event(Json::array({made}));
}

Json CompletionResponse::logprobs_json(const TextPiece& piece) const {
  Json tokens = Json::array();
  Json values = Json::array();
  Json alternatives = Json::array();
  for (const DecodedToken& token : piece.tokens) {
    tokens.push_back(token_text(token.token.id));
    values.push_back(number_or_null(token.token.log_probability));
    Json others = Json::object();
    for (const GeneratedToken& other : token.alternatives)
      others[token_text(other.id)] = number_or_null(other.log_probability);
    // The first of a prompt, which nothing predicts, has none rather than no others.
    const bool unknown = std::isnan(token.token.log_probability) && token.alternatives.empty();
    alternatives.push_back(unknown ? Json() : others);
  }
  return {{"tokens", tokens},
          {"token_logprobs", values},
          {"top_logprobs", alternatives},
          {"text_offset", piece.offsets}};
}

Json CompletionResponse::chat_logprobs_json(const TextPiece& piece) const {
  const auto entry = [&](const GeneratedToken& token) {
    const std::string bytes = tokenizer_.decode_continuation(std::span(&token.id, 1));
    return Json{{"token", to_valid_utf8(bytes)},
                {"logprob", number_or_null(token.log_probability)},
                {"bytes", std::vector<uint8_t>(bytes.begin(), bytes.end())}};
  };
  Json content = Json::array();
  for (const DecodedToken& token : piece.tokens) {
    Json own = entry(token.token);
    own["top_logprobs"] = Json::array();
    for (const GeneratedToken& other : token.alternatives)
      own["top_logprobs"].push_back(entry(other));
    content.push_back(own);
  }
  return {{"content", content}};
}

Json CompletionResponse::choice_json(size_t choice, const TextPiece& piece, bool streams) const {
  const std::string& reason = states_[choice].finish_reason;
  Json made = {{"index", choice}, {"finish_reason", reason.empty() ? Json() : Json(reason)}};
  made["logprobs"] = Json();
  if (request_.logprobs)
    made["logprobs"] = request_.is_chat ? chat_logprobs_json(piece) : logprobs_json(piece);
  if (!request_.is_chat) {
    made["text"] = piece.text;
  } else if (streams) {
    made["delta"] = {{"content", piece.text}};
  } else {
    made["message"] = {{"role", "assistant"}, {"content", piece.text}};
  }
  return made;
}

Json CompletionResponse::envelope(bool streams) const {
  const char* of_chat = streams ? "chat.completion.chunk" : "chat.completion";
  return {{"id", id_},
          {"object", request_.is_chat ? of_chat : "text_completion"},
          {"created", created_},
          {"model", model_}};
}

Json CompletionResponse::usage() const {
  return {{"prompt_tokens", request_.prompt_tokens},
          {"completion_tokens", completion_tokens_},
          {"total_tokens", request_.prompt_tokens + completion_tokens_}};
}

std::string CompletionResponse::event(const Json& choices) const {
  Json json = envelope(true);
  json["choices"] = choices;
  if (request_.include_usage) json["usage"] = Json();  // the last event's alone has numbers
  return data_event(dump(json));
}

std::string CompletionResponse::finish() const {
  if (request_.stream) {
    Json last = envelope(true);
    last["choices"] = Json::array();
    last["usage"] = usage();
    return (request_.include_usage ? data_event(dump(last)) : "") + data_event("[DONE]");
  }
  Json body = envelope(false);
  body["choices"] = Json::array();
  for (size_t i = 0; i < states_.size(); ++i) {
    const State& state = states_[i];
    body["choices"].push_back(choice_json(i, {state.text, state.tokens, state.offsets}, false));
  }
  body["usage"] = usage();
  return dump(body);
}

std::string CompletionResponse::error_event(const ApiError& error) {
  return data_event(dump(error.body()));
}

}  // namespace tessera
