#include "tokenizer/bpe_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "tokenizer/cut_finder.h"
#include "tokenizer/text/workspace_pool.h"
#include "tokenizer/token_texts.h"
#include "tokenizer/word_cache.h"

namespace tessera {
namespace {

/// What one call of `encode` needs, kept for later calls.
struct Workspace {
  PreTokenizer::Scratch splitting;
  BpeModel::Scratch merging;
  WordCache cache;
  std::vector<AddedTokens::Piece> raw_pieces;
  std::vector<AddedTokens::Piece> pieces;
  std::vector<std::string_view> words;
  std::string normalized;
};

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(TokenizerDescription description, int32_t end_of_document)
      : name_(fmt::format("bpe-{:016x}-eod{}", description.hash, end_of_document)),
        end_of_document_(end_of_document),
        normalizer_(std::move(description.normalizer)),
        pre_tokenizer_(std::move(description.pre_tokenizer)),
        model_(description.model, description.source),
        texts_(description.tokens, description.added, normalizer_, description.decoder),
        added_(std::move(description.added), normalizer_),
        cuts_(normalizer_, added_, cut_rules(description, normalizer_, pre_tokenizer_, model_)) {}

  std::string name() const override { return name_; }
  int64_t vocab_size() const override { return texts_.size(); }
  int32_t end_of_document() const override { return end_of_document_; }
  size_t cut(std::string_view text, size_t limit) const override { return cuts_.cut(text, limit); }

  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    std::unique_ptr<Workspace> workspace = workspaces_.take();
    encode_with(*workspace, text, ids);
    workspaces_.give_back(std::move(workspace));
  }
  void encode_continuation(std::string_view text, std::vector<int32_t>& ids) const override {
    encode(cuts_.continuation(text), ids);
  }
  std::string decode(std::span<const int32_t> ids) const override {
    return texts_.decode(ids, /*from_start=*/true);
  }
  std::string decode_continuation(std::span<const int32_t> ids) const override {
    return texts_.decode(ids, /*from_start=*/false);
  }

 private:
  void encode_with(Workspace& workspace, std::string_view text, std::vector<int32_t>& ids) const;
  void encode_piece(Workspace& workspace, std::string_view text, bool first,
                    std::vector<int32_t>& ids) const;
  void encode_word(Workspace& workspace, std::string_view word, std::vector<int32_t>& ids) const;

  std::string name_;
  int32_t end_of_document_;
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  BpeModel model_;
  TokenTexts texts_;
  AddedTokens added_;
  CutFinder cuts_;
  mutable WorkspacePool<Workspace> workspaces_;
};

void BpeTokenizer::encode_with(Workspace& workspace, std::string_view text,
                               std::vector<int32_t>& ids) const {
  workspace.raw_pieces.clear();
  added_.split_raw(text, workspace.raw_pieces);
  for (const AddedTokens::Piece& raw : workspace.raw_pieces) {
    if (raw.id >= 0) {
      ids.push_back(raw.id);
      continue;
    }
    const bool first = raw.text.data() == text.data();
    const std::string_view normalized = normalizer_.apply(raw.text, workspace.normalized);
    workspace.pieces.clear();
    added_.split_normalized(normalized, workspace.pieces);
    for (const AddedTokens::Piece& piece : workspace.pieces) {
      if (piece.id >= 0) {
        ids.push_back(piece.id);
      } else {
        encode_piece(workspace, piece.text, first && piece.text.data() == normalized.data(), ids);
      }
    }
  }
}

void BpeTokenizer::encode_piece(Workspace& workspace, std::string_view text, bool first,
                                std::vector<int32_t>& ids) const {
  pre_tokenizer_.run(text, first, workspace.splitting, workspace.words);
  for (const std::string_view word : workspace.words) {
    cuts_.for_each_part(word, [&](std::string_view part) { encode_word(workspace, part, ids); });
  }
}

void BpeTokenizer::encode_word(Workspace& workspace, std::string_view word,
                               std::vector<int32_t>& ids) const {
  const uint64_t hash = WordCache::hash(word);
  const std::span<const int32_t> known = workspace.cache.find(word, hash);
  if (!known.empty()) {
    ids.insert(ids.end(), known.begin(), known.end());
    return;
  }
  const size_t before = ids.size();
  model_.encode_word(word, workspace.merging, ids);
  workspace.cache.insert(word, hash, std::span(ids).subspan(before));
}

}  // namespace

std::unique_ptr<Tokenizer> make_bpe_tokenizer(TokenizerDescription description,
                                              int32_t end_of_document) {
  return std::make_unique<BpeTokenizer>(std::move(description), end_of_document);
}

int32_t find_token(const TokenizerDescription& description, std::string_view text) {
  for (const AddedToken& token : description.added) {
    if (token.content == text) return token.id;
  }
  const auto found = std::ranges::find(description.tokens, text);
  const bool known = !text.empty() && found != description.tokens.end();
  return known ? static_cast<int32_t>(found - description.tokens.begin()) : -1;
}

}  // namespace tessera
