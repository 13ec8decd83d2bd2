#include "tokenizer/tokenizer.h"

#include <filesystem>

#include "core/error.h"
#include "core/file/file.h"
#include "core/file/path.h"
#include "tokenizer/bpe_tokenizer.h"
#include "tokenizer/end_of_document.h"
#include "tokenizer/sentencepiece_tokenizer.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxFileBytes = int64_t{1} << 29;

/// The file that a path means: itself, or what a folder holds.
fs::path tokenizer_file(const fs::path& path) {
  require(path_exists(path),
          "tokenizer '{}' is neither 'byte' nor a file or folder (a tokenizer.json, a "
          "SentencePiece .model, or a folder with either)",
          path.string());
  if (!fs::is_directory(path)) return path;
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    if (path_exists(path / name)) return path / name;
  }
  user_error("the folder {} has neither tokenizer.json nor tokenizer.model", path.string());
}

std::unique_ptr<Tokenizer> open_json(const fs::path& path, const std::string& choice) {
  TokenizerDescription description =
      parse_tokenizer_json(read_text_file(path, kMaxFileBytes), path.string());
  int64_t vocab_size = static_cast<int64_t>(description.tokens.size());
  for (const AddedToken& token : description.added) {
    vocab_size = std::max<int64_t>(vocab_size, token.id + 1);
  }
  const int32_t end = find_end_of_document(
      {.choice = choice,
       .path = path,
       .vocab_size = vocab_size,
       .find = [&](std::string_view text) { return find_token(description, text); }});
  return make_bpe_tokenizer(std::move(description), end);
}

std::unique_ptr<Tokenizer> open_model(const fs::path& path, const std::string& choice) {
  SentencePieceModel model(read_text_file(path, kMaxFileBytes), path.string());
  require(!path_exists(path.parent_path() / "added_tokens.json"),
          "{} has added_tokens.json beside it, whose tokens a .model does not know; give a "
          "tokenizer.json instead",
          path.string());
  const int32_t end =
      find_end_of_document({.choice = choice,
                            .path = path,
                            .own = model.end_of_sentence(),
                            .vocab_size = model.vocab_size(),
                            .find = [&](std::string_view text) { return model.find(text); }});
  return make_sentencepiece_tokenizer(std::move(model), end);
}

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const TokenizerSpec& spec) {
  if (spec.path == "byte") {
    require(spec.end_of_document.empty(),
            "data.end_of_document is {}, but the byte tokenizer has its own", spec.end_of_document);
    return make_byte_tokenizer();
  }
  if (spec.path == "none") return make_no_tokenizer();
  const fs::path path = tokenizer_file(spec.path);
  return path.extension() == ".model" ? open_model(path, spec.end_of_document)
                                      : open_json(path, spec.end_of_document);
}

}  // namespace tessera
