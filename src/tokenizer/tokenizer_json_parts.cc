#include "tokenizer/tokenizer_json_parts.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "core/config/strict_json.h"
#include "core/error.h"

namespace tessera {
namespace {

using nlohmann::json;

const std::string& type_of(const json& value, std::string_view where) {
  return json_text(json_member(value, "type", where), "type", where);
}

[[noreturn]] void unsupported(std::string_view part, const std::string& type,
                              std::string_view known, std::string_view where) {
  user_error("{}: {} {} is not supported; {} are", where, part, quote_for_message(type), known);
}

/// The text of {"String": ...}.
std::string string_pattern(const json& value, std::string_view part, std::string_view where) {
  const json& pattern = json_member(value, "pattern", where);
  require(pattern.is_object() && pattern.size() == 1 && pattern.contains("String"),
          "{}: {} with a pattern other than a string is not supported", where, part);
  const std::string& text = json_text(pattern["String"], "a pattern", where);
  require(!text.empty(), "{}: {} has an empty pattern", where, part);
  return text;
}

void add_normalizer(const json& value, std::vector<NormalizerStep>& steps, std::string_view where) {
  using Kind = NormalizerStep::Kind;
  constexpr std::array<std::pair<std::string_view, Kind>, 4> kForms = {
      {{"NFC", Kind::kNfc}, {"NFD", Kind::kNfd}, {"NFKC", Kind::kNfkc}, {"NFKD", Kind::kNfkd}}};
  const std::string& type = type_of(value, where);
  const auto* const form =
      std::ranges::find(kForms, std::string_view(type), [](const auto& f) { return f.first; });
  if (form != kForms.end()) {
    require_members(value, {"type"}, where);
    steps.push_back({.kind = form->second});
  } else if (type == "Sequence") {
    require_members(value, {"type", "normalizers"}, where);
    for (const json& part : json_member(value, "normalizers", where)) {
      add_normalizer(part, steps, where);
    }
  } else if (type == "Prepend") {
    require_members(value, {"type", "prepend"}, where);
    const std::string& text = json_text(json_member(value, "prepend", where), "prepend", where);
    steps.push_back({.kind = Kind::kPrepend, .content = text});
  } else if (type == "Replace") {
    require_members(value, {"type", "pattern", "content"}, where);
    steps.push_back({.kind = Kind::kReplace,
                     .pattern = string_pattern(value, "normalizer Replace", where),
                     .content = json_text(json_member(value, "content", where), "content", where)});
  } else {
    unsupported("normalizer", type, "NFC, NFD, NFKC, NFKD, Prepend, Replace and Sequence", where);
  }
}

SplitBehavior read_behavior(const json& value, std::string_view where) {
  constexpr std::array<std::pair<std::string_view, SplitBehavior>, 5> kBehaviors = {
      {{"Removed", SplitBehavior::kRemoved},
       {"Isolated", SplitBehavior::kIsolated},
       {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
       {"MergedWithNext", SplitBehavior::kMergedWithNext},
       {"Contiguous", SplitBehavior::kContiguous}}};
  const std::string& name = json_text(value, "behavior", where);
  for (const auto& [known, behavior] : kBehaviors) {
    if (name == known) return behavior;
  }
  user_error("{}: unknown behavior {} of a Split", where, quote_for_message(name));
}

/// A regular expression that matches exactly this text.
std::string escape_regex(std::string_view text) {
  constexpr std::string_view kSpecial = "\\[](){}*+?|^$.";
  std::string escaped;
  for (const char c : text) {
    if (kSpecial.find(c) != std::string_view::npos) escaped += '\\';
    escaped += c;
  }
  return escaped;
}

/// Line ends as their escapes: some files write the characters themselves.
std::string spell_line_ends(std::string_view pattern) {
  std::string spelled;
  for (const char c : pattern) {
    spelled += c == '\r' ? "\\r" : c == '\n' ? "\\n" : std::string(1, c);
  }
  return spelled;
}

std::string split_pattern(const json& value, std::string_view where) {
  const json& pattern = json_member(value, "pattern", where);
  require(pattern.is_object() && pattern.size() == 1, "{}: a Split needs one pattern", where);
  if (pattern.contains("Regex")) {
    return spell_line_ends(json_text(pattern["Regex"], "a pattern", where));
  }
  return escape_regex(string_pattern(value, "pre-tokenizer Split", where));
}

/// Expressions, as translated, which leave a line end the end of a word whatever comes before it if
/// a letter or number follows and no white space precedes, and the place before a space between two
/// letters the end of one: the common ways to split, those of GPT-4o and those of DeepSeek-V3. None
/// looks behind, none goes on from a line end to a letter or number or from a letter to a space,
/// and they look ahead for white space only.
bool ends_words(std::string_view pattern) {
  constexpr std::array<std::string_view, 2> kKnown = {
      R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
      R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)"};
  return find_word_splitter(pattern) || std::ranges::find(kKnown, pattern) != kKnown.end();
}

/// Expressions that match neither white space nor letters with spaces: beside one of those above
/// they only add ends of words.
bool only_isolates(std::string_view pattern) {
  constexpr std::array<std::string_view, 4> kKnown = {
      R"(\p{N}{1,3})", R"(\p{N})", R"([0-9][0-9][0-9])", "[一-龥぀-ゟ゠-ヿ]+"};
  return std::ranges::find(kKnown, pattern) != kKnown.end();
}

/// Reads the steps of a pre-tokenizer in order.
class PreTokenizerReader {
 public:
  explicit PreTokenizerReader(std::string_view where) : where_(where) {}

  void add(const json& value) {
    const std::string& type = type_of(value, where_);
    require(!byte_level_, "{}: pre-tokenizer {} behind ByteLevel is not supported", where_,
            quote_for_message(type));
    if (type == "Sequence") {
      require_members(value, {"type", "pretokenizers"}, where_);
      for (const json& part : json_member(value, "pretokenizers", where_)) add(part);
    } else if (type == "Split") {
      add_split(value);
    } else if (type == "Digits") {
      require_members(value, {"type", "individual_digits"}, where_);
      steps_.push_back({.digits = DigitSplit{flag(value, "individual_digits", false)}});
    } else if (type == "ByteLevel") {
      add_byte_level(value);
    } else if (type == "Metaspace") {
      add_metaspace(value);
    } else {
      unsupported("pre-tokenizer", type, "ByteLevel, Split, Digits, Metaspace and Sequence",
                  where_);
    }
  }

  void finish(TokenizerDescription& description) {
    description.model.byte_level = byte_level_;
    const bool known = cuttable_ && ends_words_;
    description.cuts_at_spaces = byte_level_ && known;
    description.cuts_at_lines = byte_level_ && !prefix_ && (known || lines_first_);
    description.pre_tokenizer = PreTokenizer(std::move(steps_));
  }

 private:
  bool flag(const json& value, const char* key, bool otherwise) const {
    return json_flag(value, key, otherwise, where_);
  }

  void add_split(const json& value) {
    require_members(value, {"type", "pattern", "behavior", "invert"}, where_);
    const std::string pattern = split_pattern(value, where_);
    RegexSplit split{.behavior = read_behavior(json_member(value, "behavior", where_), where_),
                     .invert = flag(value, "invert", false)};
    const bool plain = split.behavior == SplitBehavior::kIsolated && !split.invert;
    if (steps_.empty()) lines_first_ = plain && pattern == R"([\r\n])";
    const bool ends = ends_words(pattern);
    ends_words_ = ends_words_ || ends;
    cuttable_ = cuttable_ && plain && (ends || only_isolates(pattern));
    if (plain) split.known = find_word_splitter(pattern);
    if (!split.known) split.regex.emplace(pattern, where_);
    steps_.push_back({.regex = std::move(split)});
  }

  void add_byte_level(const json& value) {
    require_members(value, {"type", "add_prefix_space", "trim_offsets", "use_regex"}, where_);
    prefix_ = flag(value, "add_prefix_space", true);
    if (prefix_) steps_.push_back({.prefix = SpacePrefix{}});
    if (flag(value, "use_regex", true)) {
      steps_.push_back({.regex = RegexSplit{.known = find_word_splitter(kGpt2Regex)}});
      ends_words_ = true;
    }
    byte_level_ = true;
  }

  void add_metaspace(const json& value) {
    require_members(
        value, {"type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"},
        where_);
    MarkSpaces mark{
        .mark = json_text(json_member(value, "replacement", where_), "replacement", where_),
        .split = flag(value, "split", true)};
    require(!mark.mark.empty(), "{}: the replacement of Metaspace is empty", where_);
    mark.prepend = read_scheme(value);
    steps_.push_back({.mark = std::move(mark)});
    cuttable_ = false;
  }

  MarkSpaces::Prepend read_scheme(const json& value) const {
    using Prepend = MarkSpaces::Prepend;
    const std::string scheme = value.contains("prepend_scheme")
                                   ? json_text(value["prepend_scheme"], "prepend_scheme", where_)
                                   : (flag(value, "add_prefix_space", true) ? "always" : "never");
    require(scheme == "never" || flag(value, "add_prefix_space", true),
            "{}: add_prefix_space of Metaspace disagrees with its prepend_scheme {}", where_,
            quote_for_message(scheme));
    if (scheme == "always") return Prepend::kAlways;
    if (scheme == "first") return Prepend::kFirst;
    require(scheme == "never", "{}: unknown prepend_scheme {} of Metaspace", where_,
            quote_for_message(scheme));
    return Prepend::kNever;
  }

  std::string_view where_;
  std::vector<PreTokenizer::Step> steps_;
  bool byte_level_ = false;
  bool prefix_ = false;
  bool cuttable_ = true;     ///< all steps are known not to look across line ends and spaces ...
  bool ends_words_ = false;  ///< ... and one of them ends words there
  bool lines_first_ = false;
};

/// Reads the decoders in order; only orders that work token by token, with something taken from the
/// start of the whole at the end, are supported.
void add_decoder(const json& value, TokenDecoder& decoder, std::string_view where) {
  const std::string& type = type_of(value, where);
  if (type == "Fuse") return;  // joins tokens, as happens here in any case
  require(decoder.num_strip == 0 && decoder.drop_mark.empty() && !decoder.byte_level,
          "{}: a decoder behind ByteLevel, Strip or Metaspace is not supported", where);
  if (type == "Sequence") {
    for (const json& part : json_member(value, "decoders", where)) {
      add_decoder(part, decoder, where);
    }
  } else if (type == "ByteLevel") {
    require(decoder.replacements.empty() && !decoder.byte_fallback,
            "{}: a decoder before ByteLevel is not supported", where);
    decoder.byte_level = true;
  } else if (type == "ByteFallback") {
    decoder.byte_fallback = true;
  } else if (type == "Replace") {
    require(!decoder.byte_fallback, "{}: decoder Replace behind ByteFallback is not supported",
            where);
    decoder.replacements.emplace_back(
        string_pattern(value, "decoder Replace", where),
        json_text(json_member(value, "content", where), "content", where));
  } else if (type == "Strip") {
    decoder.strip = json_text(json_member(value, "content", where), "content", where);
    decoder.num_strip = json_size(json_member(value, "start", where), "start", where);
    require(json_member(value, "stop", where) == 0 && !decoder.strip.empty(),
            "{}: decoder Strip at the end of text is not supported", where);
  } else if (type == "Metaspace") {
    const std::string& mark =
        json_text(json_member(value, "replacement", where), "replacement", where);
    require(!mark.empty(), "{}: the replacement of Metaspace is empty", where);
    decoder.replacements.emplace_back(mark, " ");
    if (value.value("prepend_scheme", json("always")) != "never") decoder.drop_mark = mark;
  } else {
    unsupported("decoder", type,
                "ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace and Sequence", where);
  }
}

}  // namespace

bool json_flag(const json& object, const char* key, bool otherwise, std::string_view where) {
  const auto member = object.find(key);
  if (member == object.end()) return otherwise;
  require(member->is_boolean(), "{}: {} must be true or false, found {}", where, key,
          member->type_name());
  return member->get<bool>();
}

Normalizer read_normalizer(const json& value, std::string_view where) {
  std::vector<NormalizerStep> steps;
  if (!value.is_null()) add_normalizer(value, steps, where);
  return Normalizer(std::move(steps));
}

void read_pre_tokenizer(const json& value, TokenizerDescription& description,
                        std::string_view where) {
  PreTokenizerReader reader(where);
  if (!value.is_null()) reader.add(value);
  reader.finish(description);
}

TokenDecoder read_decoder(const json& value, std::string_view where) {
  require(!value.is_null(), "{}: no decoder is given, so ids could not become text again", where);
  TokenDecoder decoder{.byte_level = false};
  add_decoder(value, decoder, where);
  return decoder;
}

}  // namespace tessera
