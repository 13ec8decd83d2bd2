#include "tokenizer/train_bpe.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/text/names.h"
#include "core/text/utf8.h"
#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe_merger.h"
#include "tokenizer/cut_finder.h"
#include "tokenizer/text/normalizer.h"
#include "tokenizer/text/pre_tokenizer.h"
#include "tokenizer/tokenizer_json.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kNumBytes = 256;
/// Documents are collected up to this size and then counted on all threads.
constexpr size_t kBatchBytes = size_t{32} << 20;
constexpr size_t kPieceBytes = size_t{1} << 18;

struct SplitStyle {
  std::string_view name;
  std::string_view regex;
  bool nfc = false;
};

const std::array<SplitStyle, 3>& split_styles() {
  static const std::array<SplitStyle, 3> styles = {
      {{"gpt2", kGpt2Regex}, {"qwen", kQwenRegex, true}, {"llama3", kLlama3Regex}}};
  return styles;
}

const SplitStyle& find_style(const std::string& name) {
  std::vector<std::string> names;
  for (const SplitStyle& style : split_styles()) {
    if (style.name == name) return style;
    names.emplace_back(style.name);
  }
  user_error("unknown way to split '{}'; gpt2, qwen and llama3 are known{}", name,
             did_you_mean(name, names));
}

std::vector<AddedToken> special_tokens(const BpeTrainingOptions& options) {
  std::vector<AddedToken> tokens;
  for (const std::string& content : options.special_tokens) {
    tokens.push_back(
        {.content = content, .id = static_cast<int32_t>(tokens.size()), .special = true});
  }
  return tokens;
}

struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using Counts = std::unordered_map<std::string, int64_t, TextHash, std::equal_to<>>;

/// Counts words on all threads.
class WordCounter {
 public:
  explicit WordCounter(const BpeTrainingOptions& options)
      : style_(find_style(options.split)),
        splitter_(*find_word_splitter(style_.regex)),
        special_(special_tokens(options), Normalizer()),
        counts_(omp_get_max_threads()) {
    if (style_.nfc) normalizer_ = Normalizer({{.kind = NormalizerStep::Kind::kNfc}});
  }

  void add(std::string_view document) {
    const CutFinder cuts(normalizer_, special_, {.at_lines = true, .at_spaces = true});
    while (!document.empty()) {
      const size_t size =
          document.size() > kPieceBytes ? cuts.cut(document, kPieceBytes) : document.size();
      batch_.emplace_back(document.substr(0, size));
      document.remove_prefix(size);
      batch_bytes_ += size;
      if (batch_bytes_ >= kBatchBytes) count_batch();
    }
  }

  /// All words, in order of their bytes.
  std::vector<CountedWord> finish() {
    count_batch();
    Counts& all = counts_[0];
    for (size_t i = 1; i < counts_.size(); ++i) {
      for (const auto& [word, count] : counts_[i]) all[word] += count;
      counts_[i].clear();
    }
    std::vector<CountedWord> words;
    for (const auto& [word, count] : all) words.push_back({word, count});
    std::ranges::sort(words, {}, &CountedWord::text);
    return words;
  }

 private:
  void count_batch() {
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < batch_.size(); ++i) count(batch_[i], counts_[omp_get_thread_num()]);
    batch_.clear();
    batch_bytes_ = 0;
  }

  void count(std::string_view document, Counts& counts) const {
    std::vector<AddedTokens::Piece> pieces;
    std::string buffer;
    special_.split_raw(document, pieces);
    for (const AddedTokens::Piece& piece : pieces) {
      if (piece.id < 0) count_words(normalizer_.apply(piece.text, buffer), counts);
    }
  }

  void count_words(std::string_view text, Counts& counts) const {
    for (size_t position = 0; position < text.size();) {
      const size_t end = splitter_.next(text, position);
      const std::string_view word = text.substr(position, end - position);
      const auto found = counts.find(word);
      if (found == counts.end()) {
        counts.emplace(word, 1);
      } else {
        ++found->second;
      }
      position = end;
    }
  }

  const SplitStyle& style_;
  WordSplitter splitter_;
  Normalizer normalizer_;
  AddedTokens special_;
  std::vector<Counts> counts_;  ///< one a thread
  std::vector<std::string> batch_;
  size_t batch_bytes_ = 0;
};

Json pre_tokenizer_json(const SplitStyle& style) {
  Json byte_level = {{"type", "ByteLevel"},
                     {"add_prefix_space", false},
                     {"trim_offsets", true},
                     {"use_regex", style.name == "gpt2"}};
  if (style.name == "gpt2") return byte_level;
  const Json split = {{"type", "Split"},
                      {"pattern", {{"Regex", style.regex}}},
                      {"behavior", "Isolated"},
                      {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level})}};
}

Json added_tokens_json(const BpeTrainingOptions& options) {
  Json list = Json::array();
  for (const AddedToken& token : special_tokens(options)) {
    list.push_back({{"id", token.id},
                    {"content", token.content},
                    {"single_word", false},
                    {"lstrip", false},
                    {"rstrip", false},
                    {"normalized", false},
                    {"special", true}});
  }
  return list;
}

/// Letters of the bytes in the order of the letters, which is how the package numbers them; merged
/// tokens follow in the order in which they were made.
std::vector<std::string> token_order(const BpeMerger& merger) {
  std::vector<std::string> letters;
  for (const std::string& token : merger.tokens()) letters.push_back(encode_byte_letters(token));
  std::sort(letters.begin(), letters.begin() + kNumBytes);
  return letters;
}

Json model_json(const BpeTrainingOptions& options, const BpeMerger& merger) {
  Json vocabulary = Json::object();
  int64_t id = 0;
  for (const std::string& token : options.special_tokens) vocabulary[token] = id++;
  for (const std::string& token : token_order(merger)) vocabulary[token] = id++;
  Json merges = Json::array();
  for (const auto& [left, right] : merger.merges()) {
    merges.push_back(
        {encode_byte_letters(merger.tokens()[left]), encode_byte_letters(merger.tokens()[right])});
  }
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"ignore_merges", false},
          {"vocab", std::move(vocabulary)},
          {"merges", std::move(merges)}};
}

Json tokenizer_json(const BpeTrainingOptions& options, const BpeMerger& merger) {
  const SplitStyle& style = find_style(options.split);
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added_tokens_json(options)},
          {"normalizer", style.nfc ? Json{{"type", "NFC"}} : Json()},
          {"pre_tokenizer", pre_tokenizer_json(style)},
          {"post_processor", nullptr},
          {"decoder",
           {{"type", "ByteLevel"},
            {"add_prefix_space", true},
            {"trim_offsets", true},
            {"use_regex", true}}},
          {"model", model_json(options, merger)}};
}

}  // namespace

void validate(const BpeTrainingOptions& options) {
  constexpr int64_t kMaxVocabulary = int64_t{1} << 22;
  find_style(options.split);
  const int64_t least = kNumBytes + static_cast<int64_t>(options.special_tokens.size());
  require(
      options.vocab_size >= least && options.vocab_size <= kMaxVocabulary,
      "a vocabulary of {} tokens; it must have from {} (the bytes and the special tokens) to {}",
      options.vocab_size, least, kMaxVocabulary);
  require(options.min_frequency >= 1, "the least frequency of a pair is {}; it must be at least 1",
          options.min_frequency);
  std::unordered_set<std::string_view> seen;
  std::string bytes;
  for (const std::string& token : options.special_tokens) {
    require(!token.empty() && valid_utf8_prefix(token) == token.size(),
            "a special token is empty or not UTF-8");
    require(seen.insert(token).second, "special token {} is given twice", quote_for_message(token));
    require(token.size() >= 3, "special token {} is so short that it could be learned from text",
            quote_for_message(token));
  }
}

std::string train_bpe(const BpeTrainingOptions& options, const DocumentSource& documents,
                      const MergeProgress& progress) {
  validate(options);
  WordCounter counter(options);
  documents([&counter](std::string_view document) { counter.add(document); });
  const std::vector<CountedWord> words = counter.finish();
  require(!words.empty(), "there is no text to train a tokenizer on");
  BpeMerger merger(words);
  const auto num_special = static_cast<int64_t>(options.special_tokens.size());
  const int64_t total = options.vocab_size - num_special - kNumBytes;
  while (merger.num_tokens() < options.vocab_size - num_special &&
         merger.merge_next(options.min_frequency)) {
    if (progress) progress(merger.num_tokens() - kNumBytes, total);
  }
  return tokenizer_json(options, merger).dump() + "\n";
}

}  // namespace tessera
