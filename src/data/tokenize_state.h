#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/text_check.h"
#include "data/token_file_writer.h"
#include "data/tokenize.h"

namespace tessera {

/// Where tokenizing stands between two chunks: all that a later call needs to go on.
struct TokenizeState {
  bool finishing = false;  ///< all is written; the files only wait for their names
  TextPosition position;
  TokenCounts counts;
  TextDamage damage;              ///< of the file being read
  bool document_is_blank = true;  ///< of the document being read, so far
  int64_t text_bytes = 0;
  int64_t silent_tokens = 0;
  int64_t blank_documents = 0;
  int64_t skipped_lines = 0;
  std::string first_skipped;
};

/// What the tokens depend on, as JSON: source, format, tokenizer, and the paths, sizes and times of
/// the files. Equal texts mean equal token files.
std::string describe_tokens(const TextSource& source, const Tokenizer& tokenizer,
                            const std::vector<TextFile>& files);

/// Stores the state and what it belongs to, so that a kill leaves the old or the new.
void save_state(const std::filesystem::path& folder, const std::string& description,
                const TokenizeState& state);

/// A state that was found, and whether it belongs to `description`; nothing where there is none, or
/// one that cannot be read. `difference` names what is different.
struct FoundState {
  TokenizeState state;
  std::string difference;
};
std::optional<FoundState> load_state(const std::filesystem::path& folder,
                                     const std::string& description);

/// <prefix>.json, which says what finished tokens were made of.
std::filesystem::path description_path(const std::string& prefix);
void save_description(const std::string& prefix, const std::string& description,
                      const TokenizeState& state);
/// The summary of finished tokens that belong to `description` and are whole.
std::optional<TokenizeSummary> find_finished(const std::string& prefix,
                                             const std::string& description, int64_t vocab_size);

}  // namespace tessera
