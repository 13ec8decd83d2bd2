#include "tokenizer/text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "core/error.h"
#include "core/text/utf8.h"

namespace tessera {
namespace {

using Kind = NormalizerStep::Kind;

utf8proc_option_t unicode_options(Kind kind) {
  int options = UTF8PROC_STABLE;
  options |= kind == Kind::kNfc || kind == Kind::kNfkc ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE;
  if (kind == Kind::kNfkc || kind == Kind::kNfkd) options |= UTF8PROC_COMPAT;
  return static_cast<utf8proc_option_t>(options);
}

struct Free {
  void operator()(utf8proc_uint8_t* text) const { std::free(text); }
};

void append_normalized(std::string_view text, Kind kind, std::string& out) {
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &result, unicode_options(kind));
  const std::unique_ptr<utf8proc_uint8_t, Free> owner(result);
  require(size >= 0, "normalizing {} bytes of text failed: {}", text.size(), utf8proc_errmsg(size));
  out.append(reinterpret_cast<const char*>(result), size);
}

/// Normalizes what is UTF-8 and copies the rest. Runs of ASCII cannot change, except for the last
/// character, which a mark may follow.
std::string normalize_unicode(std::string_view text, Kind kind) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const auto* const other =
        std::ranges::find_if(text, [](char c) { return static_cast<unsigned char>(c) >= 0x80; });
    const size_t num_ascii = other - text.begin();
    const size_t kept = num_ascii == text.size() ? num_ascii : num_ascii - (num_ascii > 0 ? 1 : 0);
    out += text.substr(0, kept);
    text.remove_prefix(kept);
    if (text.empty()) break;
    const size_t start = num_ascii - kept;
    size_t end = start;
    while (end < text.size() && static_cast<unsigned char>(text[end]) >= 0x80) ++end;
    const size_t valid = valid_utf8_prefix(text.substr(0, end));
    append_normalized(text.substr(0, valid), kind, out);
    if (valid < end) out += text[valid];
    text.remove_prefix(std::min(valid + 1, end));
  }
  return out;
}

std::string replace_all(std::string_view text, std::string_view pattern, std::string_view content) {
  std::string out;
  out.reserve(text.size());
  for (;;) {
    const size_t found = text.find(pattern);
    out += text.substr(0, found);
    if (found == std::string_view::npos) return out;
    out += content;
    text.remove_prefix(found + pattern.size());
  }
}

std::string apply_step(const NormalizerStep& step, std::string_view text) {
  switch (step.kind) {
    case Kind::kPrepend:
      return step.content + std::string(text);
    case Kind::kReplace:
      return replace_all(text, step.pattern, step.content);
    default:
      return normalize_unicode(text, step.kind);
  }
}

bool changes(const NormalizerStep& step, std::string_view text) {
  if (text.empty()) return false;
  if (step.kind == Kind::kPrepend) return true;
  if (step.kind == Kind::kReplace) return text.find(step.pattern) != std::string_view::npos;
  return !is_ascii(text);
}

}  // namespace

std::string_view Normalizer::apply(std::string_view text, std::string& buffer) const {
  for (const NormalizerStep& step : steps_) {
    if (!changes(step, text)) continue;
    buffer = apply_step(step, text);
    text = buffer;
  }
  return text;
}

}  // namespace tessera
