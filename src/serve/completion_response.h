#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "serve/completion_request.h"
#include "serve/decoding_service.h"
#include "serve/written_text.h"

namespace tessera {

/// Makes the answer to one request from what its ticket brings: one body, or the events of a
/// stream. Not thread-safe.
class CompletionResponse {
 public:
  /// `request` and `tokenizer` must outlive it. `created`: seconds since 1970.
  CompletionResponse(const CompletionRequest& request, const Tokenizer& tokenizer,
                     std::string model, std::string id, int64_t created);

  /// Takes what came. Gives the bytes for the client: events of a stream, or "" while a body waits
  /// for the last choice. `on_stop` is called with a choice that a stop string ended.
  std::string take(const DecodingTicket::Item& item, const std::function<void(size_t)>& on_stop);
  bool is_complete() const { return num_open_ == 0; }
  /// What comes after the last choice: the body, or the end of the stream.
  std::string finish() const;
  /// An event that says what went wrong in a stream.
  static std::string error_event(const ApiError& error);

 private:
  struct State {
    WrittenText written;
    std::string text;  ///< of a body
    std::vector<DecodedToken> tokens;
    std::vector<int64_t> offsets;  ///< in bytes of the choice's text
    std::string finish_reason;     ///< "" while it is written
    bool begun = false;
  };

  nlohmann::json choice_json(size_t choice, const TextPiece& piece, bool streams) const;
  nlohmann::json logprobs_json(const TextPiece& piece) const;
  nlohmann::json chat_logprobs_json(const TextPiece& piece) const;
  nlohmann::json envelope(bool streams) const;
  nlohmann::json usage() const;
  std::string event(const nlohmann::json& choices) const;
  std::string token_text(int32_t id) const;

  const CompletionRequest& request_;
  const Tokenizer& tokenizer_;
  std::string model_, id_;
  int64_t created_;
  std::vector<State> states_;
  size_t num_open_;
  int64_t completion_tokens_ = 0;
};

}  // namespace tessera
