#include "tokenizer/sentencepiece_tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <utility>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/random.h"
#include "tokenizer/sentencepiece_model.h"
#include "tokenizer/text/workspace_pool.h"
#include "tokenizer/word_cache.h"

namespace tessera {
namespace {

using Type = SentencePieceSettings::Type;

constexpr std::string_view kMark = "\xE2\x96\x81";  // U+2581, which stands for a space

std::string replace_marks(std::string_view text) {
  std::string out;
  for (size_t found = text.find(kMark); found != text.npos; found = text.find(kMark)) {
    out += text.substr(0, found);
    out += ' ';
    text.remove_prefix(found + kMark.size());
  }
  return out + std::string(text);
}

/// The bytes that a piece stands for: none for a control symbol.
std::string piece_bytes(const SentencePieceSettings::Piece& piece,
                        const SentencePieceSettings& settings) {
  if (piece.type == Type::kControl) return {};
  if (piece.type == Type::kUnknown) return settings.unknown_surface;
  if (piece.type != Type::kByte) return replace_marks(piece.text);
  int byte = 0;  // "<0x0A>"
  std::from_chars(piece.text.data() + 3, piece.text.data() + 5, byte, 16);
  return std::string(1, static_cast<char>(byte));
}

void require_byte_pieces(const SentencePieceSettings& settings, const std::string& where) {
  for (const auto& piece : settings.pieces) {
    if (piece.type != Type::kByte) continue;
    int byte = -1;
    if (piece.text.size() == 6) {
      std::from_chars(piece.text.data() + 3, piece.text.data() + 5, byte, 16);
    }
    require(byte >= 0 && piece.text == fmt::format("<0x{:02X}>", byte),
            "{}: {} is no piece for a byte", where, quote_for_message(piece.text));
  }
}

/// Whether a piece has a mark behind something else, or a bare space.
bool crosses_spaces(const SentencePieceSettings::Piece& piece) {
  std::string_view text = piece.text;
  while (text.starts_with(kMark)) text.remove_prefix(kMark.size());
  return text.find(kMark) != text.npos || text.find(' ') != text.npos;
}

/// Whether the parts of a text before and behind the place between a letter and a space have ids of
/// their own: byte-pair merging, which compares no sums; pieces that never cross that place; and a
/// normalizer without rules across it.
bool words_are_independent(const SentencePieceSettings& settings) {
  constexpr std::array<std::string_view, 5> kNormalizers = {"identity", "nfkc", "nmt_nfkc",
                                                            "nfkc_cf", "nmt_nfkc_cf"};
  const bool known = settings.normalizer_map.empty() ||
                     std::ranges::find(kNormalizers, settings.normalizer) != kNormalizers.end();
  const bool has_mark = std::ranges::any_of(settings.pieces, [](const auto& piece) {
    return piece.text == kMark && piece.type == Type::kNormal;
  });
  return settings.model_type == 2 && known && has_mark && settings.escape_whitespaces &&
         !settings.whitespace_as_suffix &&
         (settings.add_dummy_prefix || !settings.remove_extra_whitespaces) &&
         std::ranges::none_of(settings.pieces, crosses_spaces);
}

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

bool is_word_start(std::string_view text, size_t position) {
  return text[position] == ' ' && position > 0 && position + 1 < text.size() &&
         is_letter(text[position - 1]) && is_letter(text[position + 1]);
}

struct LatticeWorkspace {
  WordCache cache;
  std::vector<int> ids;
};

}  // namespace

struct SentencePieceModel::State {
  std::string where;
  uint64_t hash = 0;
  SentencePieceSettings settings;
  sentencepiece::SentencePieceProcessor processor;
};

SentencePieceModel::SentencePieceModel(std::string bytes, const std::string& where)
    : state_(std::make_unique<State>()) {
  state_->where = where;
  state_->hash = hash_text(bytes.data(), bytes.size());
  state_->settings = parse_sentencepiece_settings(bytes, where);
  require(!state_->settings.has_denormalizer,
          "{}: a denormalizer is not supported in a SentencePiece model", where);
  require_byte_pieces(state_->settings, where);
  load(bytes);
  ensure(vocab_size() == state_->processor.GetPieceSize(), "{}: {} pieces, the library has {}",
         where, vocab_size(), state_->processor.GetPieceSize());
}

void SentencePieceModel::load(const std::string& bytes) {
  std::string error;
  try {
    const auto status = state_->processor.LoadFromSerializedProto(bytes);
    if (!status.ok()) error = status.message();
  } catch (const std::exception& exception) {
    error = exception.what();  // of the library's double array
  }
  require(error.empty(), "{} cannot be read as a SentencePiece model: {}", state_->where, error);
}

SentencePieceModel::SentencePieceModel(SentencePieceModel&&) noexcept = default;
SentencePieceModel::~SentencePieceModel() = default;

int64_t SentencePieceModel::vocab_size() const {
  return static_cast<int64_t>(state_->settings.pieces.size());
}

int32_t SentencePieceModel::end_of_sentence() const {
  return state_->processor.eos_id();
}

int32_t SentencePieceModel::find(std::string_view piece) const {
  const auto& pieces = state_->settings.pieces;
  const auto found = std::ranges::find(pieces, piece, &SentencePieceSettings::Piece::text);
  return found == pieces.end() ? -1 : static_cast<int32_t>(found - pieces.begin());
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(SentencePieceModel model, int32_t end_of_document)
      : model_(std::move(model)),
        end_of_document_(end_of_document),
        independent_(words_are_independent(settings())) {
    for (const auto& piece : settings().pieces) texts_.push_back(piece_bytes(piece, settings()));
  }

  std::string name() const override {
    return fmt::format("sentencepiece-{:016x}-eod{}", model_.state_->hash, end_of_document_);
  }
  int64_t vocab_size() const override { return model_.vocab_size(); }
  int32_t end_of_document() const override { return end_of_document_; }
  size_t cut(std::string_view text, size_t limit) const override;
  void encode(std::string_view text, std::vector<int32_t>& ids) const override;
  void encode_continuation(std::string_view text, std::vector<int32_t>& ids) const override {
    encode(without_first_space(text), ids);
  }
  std::string decode(std::span<const int32_t> ids) const override;
  std::string decode_continuation(std::span<const int32_t> ids) const override;

 private:
  const SentencePieceSettings& settings() const { return model_.state_->settings; }
  /// The library puts a space before each text.
  std::string_view without_first_space(std::string_view text) const {
    return settings().add_dummy_prefix && text.starts_with(' ') ? text.substr(1) : text;
  }
  void encode_part(std::string_view text, LatticeWorkspace& workspace,
                   std::vector<int32_t>& ids) const;
  const std::string& text_of(int32_t id) const;

  SentencePieceModel model_;
  int32_t end_of_document_;
  bool independent_;  ///< words_are_independent
  std::vector<std::string> texts_;
  mutable WorkspacePool<LatticeWorkspace> workspaces_;
};

size_t SentencePieceTokenizer::cut(std::string_view text, size_t limit) const {
  if (!independent_) return text.size();
  for (size_t position = limit; position > 0; --position) {
    if (is_word_start(text, position)) return position;
  }
  for (size_t position = limit + 1; position < text.size(); ++position) {
    if (is_word_start(text, position)) return position;
  }
  return text.size();
}

void SentencePieceTokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
  std::unique_ptr<LatticeWorkspace> workspace = workspaces_.take();
  bool first = true;
  while (!text.empty()) {
    size_t end = independent_ ? 1 : text.size();
    while (end < text.size() && !is_word_start(text, end)) ++end;
    const std::string_view part = text.substr(0, end);
    encode_part(first ? part : without_first_space(part), *workspace, ids);
    text.remove_prefix(end);
    first = false;
  }
  workspaces_.give_back(std::move(workspace));
}

void SentencePieceTokenizer::encode_part(std::string_view text, LatticeWorkspace& workspace,
                                         std::vector<int32_t>& ids) const {
  const uint64_t hash = WordCache::hash(text);
  const std::span<const int32_t> known = workspace.cache.find(text, hash);
  if (!known.empty()) {
    ids.insert(ids.end(), known.begin(), known.end());
    return;
  }
  const auto status =
      model_.state_->processor.Encode(absl::string_view(text.data(), text.size()), &workspace.ids);
  require(status.ok(), "{}: encoding {} bytes of text failed: {}", model_.state_->where,
          text.size(), status.message());
  workspace.cache.insert(text, hash, workspace.ids);
  ids.insert(ids.end(), workspace.ids.begin(), workspace.ids.end());
}

const std::string& SentencePieceTokenizer::text_of(int32_t id) const {
  require(id >= 0 && id < vocab_size(), "token id {} is outside the tokenizer's vocabulary of {}",
          id, vocab_size());
  return texts_[id];
}

/// As the library does it: the first piece that shows gives up the space that it begins with, and
/// where white space is removed every piece does until one shows.
std::string SentencePieceTokenizer::decode(std::span<const int32_t> ids) const {
  const bool strips = settings().add_dummy_prefix || settings().remove_extra_whitespaces;
  std::string text;
  bool at_start = strips;
  for (const int32_t id : ids) {
    std::string_view piece = text_of(id);
    const Type type = settings().pieces[id].type;
    const bool marked = at_start && type != Type::kByte && type != Type::kUnknown &&
                        settings().pieces[id].text.starts_with(kMark);
    if (marked) piece.remove_prefix(1);
    if (marked && !settings().remove_extra_whitespaces) at_start = false;
    text += piece;
    if (!text.empty()) at_start = false;
  }
  return text;
}

std::string SentencePieceTokenizer::decode_continuation(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += text_of(id);
  return text;
}

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(SentencePieceModel model,
                                                        int32_t end_of_document) {
  return std::make_unique<SentencePieceTokenizer>(std::move(model), end_of_document);
}

}  // namespace tessera
