#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "serve/api_error.h"
#include "tokenizer/tokenizer.h"
#include "train/infer/decoding_batch.h"

namespace tessera {

/// How the messages of a chat become a prompt. Tokenizers here have no templates of their own.
enum class ChatFormat : uint8_t {
  kNone,   ///< chats are refused
  kPlain,  ///< "User: ...\n\nAssistant: ...\n\n" and so on, up to "Assistant:"
};

/// What requests are read against.
struct CompletionRules {
  const Tokenizer& tokenizer;
  std::string model;  ///< the only one there is
  int64_t context = 0;
  int64_t default_max_tokens = 16;  ///< of a request that does not say
  int64_t max_choices = 64;         ///< prompts times n
  ChatFormat chat = ChatFormat::kNone;
};

/// One text to be written.
struct Choice {
  std::string prompt;  ///< as text, where it is to be echoed
  DecodingRequest decoding;
};

/// A request of /v1/completions or /v1/chat/completions.
struct CompletionRequest {
  bool is_chat = false;
  bool stream = false;
  bool include_usage = false;  ///< of a stream: a last chunk with the numbers of tokens
  bool echo = false;
  std::optional<int64_t> logprobs;  ///< most likely tokens beside each
  std::vector<std::string> stop;
  std::vector<Choice> choices;
  int64_t prompt_tokens = 0;  ///< each prompt once
};

/// Reads the body of a request. Fields that change nothing at a given value are refused at any
/// other, and so are fields that are not known. Throws ApiError.
CompletionRequest parse_completion(const std::string& body, bool is_chat,
                                   const CompletionRules& rules);

/// What a request for another model is answered with.
ApiError no_such_model(const std::string& model, const CompletionRules& rules);

}  // namespace tessera
