#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/random.h"
#include "tokenizer/text/unicode.h"

namespace tessera {

/// For tests: text in which whatever splitting distinguishes comes close together, and now and then
/// any character at all.
inline std::string random_text(Random& random, size_t num_parts) {
  static const std::vector<std::string_view> parts = {
      " ",          " ",       "  ",     "\n",      "\r\n",   "\t",     "\v",     "\f",
      "\u0085",     "\u00A0",  "\u1680", "\u180E",  "\u2003", "\u200B", "\u2028", "\u202F",
      "\u3000",     "a",       "B",      "the",     "LORD",   "s",      "'",      "'s",
      "'S",         "'\u017F", "'t",     "'re",     "'VE",    "'ll",    "'d",     "'m",
      "0",          "12",      "3456",   "\u0663",  "\u00BD", "\u2167", "!",      "?!",
      "-",          "/",       "\u00E9", "e\u0301", "\u0301", "\u4E2D", "\u3042", "\uD55C",
      "\U0001F600", "\u200D",  "\u00AA", "\uFB01",  "\u1C89", "<|x|>",  "_",      "$"};
  std::string text;
  for (size_t i = 0; i < num_parts; ++i) {
    if (random.next_below(20) > 0) {
      text += parts[random.next_below(parts.size())];
      continue;
    }
    const auto code = static_cast<char32_t>(random.next_below(kNumCharacters));
    append_utf8(code < 0xD800 || code > 0xDFFF ? code : U' ', text);
  }
  return text;
}

}  // namespace tessera
