#include "tokenizer/text/word_splitter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "core/error.h"
#include "tokenizer/random_text.h"
#include "tokenizer/text/pre_tokenizer.h"

namespace tessera {
namespace {

std::vector<std::string> words_of(const PreTokenizer& pre_tokenizer, std::string_view text) {
  PreTokenizer::Scratch scratch;
  std::vector<std::string_view> words;
  pre_tokenizer.run(text, true, scratch, words);
  return {words.begin(), words.end()};
}

PreTokenizer split(RegexSplit step) {
  std::vector<PreTokenizer::Step> steps;
  steps.push_back({.regex = std::move(step)});
  return PreTokenizer(std::move(steps));
}

class KnownSplitter : public ::testing::TestWithParam<std::string_view> {};

TEST_P(KnownSplitter, IsTheRegularExpression) {
  const PreTokenizer by_hand = split({.known = find_word_splitter(GetParam())});
  const PreTokenizer by_regex = split({.regex = Regex(GetParam(), "test")});
  Random random(7, 0);
  for (int i = 0; i < 4000; ++i) {
    const std::string text = random_text(random, random.next_below(24));
    ASSERT_EQ(words_of(by_hand, text), words_of(by_regex, text)) << text;
  }
}

TEST_P(KnownSplitter, SplitsBytesThatAreNotUtf8) {
  const PreTokenizer by_hand = split({.known = find_word_splitter(GetParam())});
  Random random(8, 0);
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (uint64_t n = random.next_below(40); n > 0; --n) {
      text += static_cast<char>(random.next_below(256));
    }
    std::string joined;
    for (const std::string& word : words_of(by_hand, text)) joined += word;
    ASSERT_EQ(joined, text);
  }
}

INSTANTIATE_TEST_SUITE_P(All, KnownSplitter,
                         ::testing::Values(kGpt2Regex, kQwenRegex, kLlama3Regex));

TEST(RegexTest, WhiteSpaceIsThatOfUnicode) {
  const PreTokenizer spaces = split({.regex = Regex(R"(\s)", "test")});
  EXPECT_EQ(words_of(spaces, "a\u3000b").size(), 3U);
  EXPECT_EQ(words_of(spaces, "a\u180Eb").size(), 1U);
}

TEST(RegexTest, CategoriesAreThoseOfUnicode16) {
  for (const std::string name : {"L", "Lu", "Ll", "Lo", "M", "Mn", "N", "Nd", "P", "S", "Z", "C"}) {
    const Regex regex("\\p{" + name + "}", "test");
    Regex::Matcher matcher;
    std::vector<bool> members(kNumCharacters);
    const std::vector<CharacterRange> ranges = category_ranges(name).value();
    for (const CharacterRange& range : ranges) {
      for (char32_t code = range.first; code <= range.last; ++code) members[code] = true;
    }
    for (char32_t code = 0; code < kNumCharacters; code += code < 0x3000 ? 1 : 7) {
      if (code >= 0xD800 && code <= 0xDFFF) continue;
      std::string text;
      append_utf8(code, text);
      ASSERT_EQ(matcher.find(regex, text, 0).has_value(), members[code])
          << name << " " << static_cast<uint32_t>(code);
    }
  }
}

TEST(RegexTest, RefusesWhatMayMeanSomethingElse) {
  for (const std::string pattern :
       {"\\h",         "\\w+",        "\\bx",  "[[:alpha:]]", "[a&&b]", "(?m:x)",     "(?i:ss)",
        "(?i:\u00E9)", "\\p{Greek}",  "a{,3}", "a{2}+",       "(a",     "a)",         "[a",
        "\\",          "\\x{110000}", "\\xff", "[b-a]",       "x*",     "(?<name>x)", "\\1"}) {
    EXPECT_THROW(Regex(pattern, "test"), UserError) << pattern;
  }
}

TEST(RegexTest, StopsWhenMatchingTakesTooLong) {
  const Regex regex("(?:a+)+(?:a+)+(?:a+)+b", "test");
  Regex::Matcher matcher;
  EXPECT_THROW(matcher.find(regex, std::string(2000, 'a') + "xb", 0), UserError);
}

TEST(PreTokenizerTest, BehaviorsOfSplits) {
  const auto words = [](SplitBehavior behavior, bool invert) {
    RegexSplit step{.regex = Regex("-", "test"), .behavior = behavior, .invert = invert};
    return words_of(split(std::move(step)), "the-final--countdown");
  };
  using List = std::vector<std::string>;
  EXPECT_EQ(words(SplitBehavior::kRemoved, false), (List{"the", "final", "countdown"}));
  EXPECT_EQ(words(SplitBehavior::kRemoved, true), (List{"-", "-", "-"}));
  EXPECT_EQ(words(SplitBehavior::kIsolated, false),
            (List{"the", "-", "final", "-", "-", "countdown"}));
  EXPECT_EQ(words(SplitBehavior::kMergedWithPrevious, false),
            (List{"the-", "final-", "-", "countdown"}));
  EXPECT_EQ(words(SplitBehavior::kMergedWithNext, false),
            (List{"the", "-final", "-", "-countdown"}));
  EXPECT_EQ(words(SplitBehavior::kContiguous, false),
            (List{"the", "-", "final", "--", "countdown"}));
}

}  // namespace
}  // namespace tessera
