#include "serve/written_text.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

/// The length of a character by its first byte; 1 for what begins none.
size_t character_length(unsigned char first) {
  if (first >= 0xF0 && first < 0xF8) return 4;
  if (first >= 0xE0) return first < 0xF0 ? 3 : 1;
  return first >= 0xC0 ? 2 : 1;
}

/// The end of `text` without a character at its end that may yet be completed.
size_t whole_characters(std::string_view text) {
  const size_t size = text.size();
  for (size_t back = 1; back <= std::min<size_t>(3, size); ++back) {
    const auto byte = static_cast<unsigned char>(text[size - back]);
    if (byte >= 0x80 && byte < 0xC0) continue;
    return character_length(byte) > back ? size - back : size;
  }
  return size;
}

}  // namespace

std::string to_valid_utf8(const std::string& text) {
  using Json = nlohmann::json;
  const std::string dumped = Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  return Json::parse(dumped).get<std::string>();
}

TextPiece WrittenText::add(const DecodedToken& token) {
  if (stopped_) return {};
  tokens_.push_back(token);
  offsets_.push_back(static_cast<int64_t>(bytes_.size()));
  bytes_ += tokenizer_.decode_continuation(std::span(&token.token.id, 1));
  const size_t stop = find_stop();
  stopped_ = stop != std::string::npos;
  return stopped_ ? release(stop, false) : release(settled(), false);
}

TextPiece WrittenText::finish() {
  return stopped_ ? TextPiece{} : release(bytes_.size(), true);
}

/// Where the first stop string begins among the bytes that were not given.
size_t WrittenText::find_stop() const {
  size_t first = std::string::npos;
  for (const std::string& stop : stop_) first = std::min(first, bytes_.find(stop, released_));
  return first;
}

/// The end of what no further byte can change.
size_t WrittenText::settled() const {
  size_t end = bytes_.size();
  for (const std::string& stop : stop_) {
    const size_t longest = std::min(stop.size() - 1, bytes_.size() - released_);
    for (size_t length = longest; length > 0; --length) {
      if (bytes_.compare(bytes_.size() - length, length, stop, 0, length) != 0) continue;
      end = std::min(end, bytes_.size() - length);
      break;
    }
  }
  return std::max(whole_characters(std::string_view(bytes_).substr(0, end)), released_);
}

TextPiece WrittenText::release(size_t end, bool all) {
  TextPiece piece{.text = to_valid_utf8(bytes_.substr(released_, end - released_))};
  released_ = end;
  size_t count = 0;
  while (count < tokens_.size() && (all || offsets_[count] < static_cast<int64_t>(end))) ++count;
  const auto taken = static_cast<std::ptrdiff_t>(count);
  piece.tokens.assign(tokens_.begin(), tokens_.begin() + taken);
  piece.offsets.assign(offsets_.begin(), offsets_.begin() + taken);
  tokens_.erase(tokens_.begin(), tokens_.begin() + taken);
  offsets_.erase(offsets_.begin(), offsets_.begin() + taken);
  return piece;
}

}  // namespace tessera
