#include "tokenizer/token_texts.h"

#include <utility>

#include "core/error.h"
#include "tokenizer/text/normalizer.h"

namespace tessera {
namespace {

/// The byte of "<0x0A>", or -1.
int fallback_byte(const std::string& token) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  const size_t high = kDigits.find(token[3]);
  const size_t low = kDigits.find(token[4]);
  if (high == kDigits.npos || low == kDigits.npos) return -1;
  return static_cast<int>(high * 16 + low);
}

std::string token_bytes(std::string token, const TokenDecoder& decoder) {
  std::string bytes;
  if (decoder.byte_level) return decode_byte_letters(token, bytes) ? bytes : token;
  for (const auto& [pattern, content] : decoder.replacements) {
    const Normalizer replace({{NormalizerStep::Kind::kReplace, pattern, content}});
    token = std::string(replace.apply(token, bytes));
  }
  const int byte = decoder.byte_fallback ? fallback_byte(token) : -1;
  return byte >= 0 ? std::string(1, static_cast<char>(byte)) : token;
}

}  // namespace

TokenTexts::TokenTexts(const std::vector<std::string>& tokens, const std::vector<AddedToken>& added,
                       const Normalizer& normalizer, const TokenDecoder& decoder)
    : strip_(decoder.strip), num_strip_(decoder.num_strip) {
  TokenDecoder dropping = decoder;
  dropping.replacements.insert(dropping.replacements.begin(), {decoder.drop_mark, ""});
  for (const std::string& token : tokens) {
    texts_.push_back(token_bytes(token, decoder));
    if (!decoder.drop_mark.empty()) first_texts_.push_back(token_bytes(token, dropping));
  }
  for (const AddedToken& token : added) {
    if (token.id >= size()) texts_.resize(token.id + 1);
    std::string buffer;
    const std::string content(token.normalized ? normalizer.apply(token.content, buffer)
                                               : std::string_view(token.content));
    // The package takes the letters of added tokens for bytes too, which garbles those that are not
    // ASCII; here they stay.
    texts_[token.id] = decoder.byte_level ? content : token_bytes(content, decoder);
    if (decoder.drop_mark.empty()) continue;
    first_texts_.resize(texts_.size());
    first_texts_[token.id] = token_bytes(content, dropping);
  }
}

std::string TokenTexts::decode(std::span<const int32_t> ids, bool from_start) const {
  std::string text;
  bool first = from_start && !first_texts_.empty();
  for (const int32_t id : ids) {
    require(id >= 0 && id < size(), "token id {} is outside the tokenizer's vocabulary of {}", id,
            size());
    text += first ? first_texts_[id] : texts_[id];
    first = false;
  }
  return from_start && num_strip_ > 0 ? take_start(std::move(text)) : text;
}

std::string TokenTexts::take_start(std::string text) const {
  size_t start = 0;
  for (int64_t i = 0; i < num_strip_ && std::string_view(text).substr(start).starts_with(strip_);
       ++i) {
    start += strip_.size();
  }
  return text.substr(start);
}

}  // namespace tessera
