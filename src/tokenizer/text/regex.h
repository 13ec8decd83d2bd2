#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

/// Translates a regular expression from the syntax of tokenizer.json (Oniguruma's, as its package
/// uses it) to PCRE2's, so that it matches the same: `\s` is White_Space and no more, general
/// categories are those of Unicode 16, `$` and `^` stand at lines. Throws UserError that begins
/// with `where` for what it does not know to mean the same in both.
std::string translate_regex(std::string_view pattern, std::string_view where);

/// A compiled regular expression; immutable, so any number of threads may use one, each with a
/// Matcher of its own.
class Regex {
 public:
  class Matcher;

  /// Throws UserError that begins with `where` for a pattern that is no regular expression, is not
  /// supported, or matches the empty text.
  Regex(std::string_view pattern, std::string_view where);
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

 private:
  struct Code;
  std::unique_ptr<Code> code_;
};

/// The memory that matching needs.
class Regex::Matcher {
 public:
  Matcher();
  ~Matcher();
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

  /// The first match that starts at `position` or after it: its start and end. Text must be valid
  /// UTF-8. Throws UserError where matching takes more steps or memory than allowed.
  std::optional<std::pair<size_t, size_t>> find(const Regex& regex, std::string_view text,
                                                size_t position);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
