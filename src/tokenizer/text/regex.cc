#include "tokenizer/text/regex.h"

#include <array>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "tokenizer/text/pcre2_handle.h"

namespace tessera {
namespace {

constexpr uint32_t kMatchLimit = 10'000'000;
constexpr size_t kFirstStackBytes = size_t{32} << 10;
constexpr size_t kMaxStackBytes = size_t{64} << 20;
constexpr uint32_t kMaxHeapKib = 256 << 10;

std::string error_text(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

Pcre2Code compile(std::string_view pattern, std::string_view where) {
  const std::string translated = translate_regex(pattern, where);
  const Pcre2CompileContext context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  Pcre2Code code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                               PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &offset,
                               context.get()));
  require(code != nullptr, "{}: the regular expression {} is not valid: {}", where,
          quote_for_message(pattern), error_text(error));
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty);
  require(matches_empty == 0,
          "{}: the regular expression {} matches the empty text; that is not supported", where,
          quote_for_message(pattern));
  return code;
}

}  // namespace

struct Regex::Code {
  Pcre2Code pattern;
  bool jit = false;  ///< compiled to machine code
};

Regex::Regex(std::string_view pattern, std::string_view where)
    : code_(std::make_unique<Code>(Code{compile(pattern, where)})) {
  code_->jit = pcre2_jit_compile(code_->pattern.get(), PCRE2_JIT_COMPLETE) == 0;
}
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;
Regex::~Regex() = default;

struct Regex::Matcher::State {
  Pcre2MatchData match{pcre2_match_data_create(1, nullptr)};
  Pcre2MatchContext context{pcre2_match_context_create(nullptr)};
  Pcre2JitStack stack{pcre2_jit_stack_create(kFirstStackBytes, kMaxStackBytes, nullptr)};
};

Regex::Matcher::Matcher() : state_(std::make_unique<State>()) {
  require(state_->match && state_->context && state_->stack,
          "out of memory for regular expressions");
  pcre2_set_match_limit(state_->context.get(), kMatchLimit);
  pcre2_set_heap_limit(state_->context.get(), kMaxHeapKib);
  pcre2_jit_stack_assign(state_->context.get(), nullptr, state_->stack.get());
}
Regex::Matcher::~Matcher() = default;

std::optional<std::pair<size_t, size_t>> Regex::Matcher::find(const Regex& regex,
                                                              std::string_view text,
                                                              size_t position) {
  const auto match_function = regex.code_->jit ? pcre2_jit_match : pcre2_match;
  const int result = match_function(
      regex.code_->pattern.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), position,
      PCRE2_NO_UTF_CHECK, state_->match.get(), state_->context.get());
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  require(result >= 0,
          "splitting text with the tokenizer's regular expression failed at byte {}: {}", position,
          error_text(result));
  const PCRE2_SIZE* span = pcre2_get_ovector_pointer(state_->match.get());
  return std::pair<size_t, size_t>{span[0], span[1]};
}

}  // namespace tessera
