#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/text/text_check.h"
#include "data/text/tokenize.h"
#include "data/token_file_writer.h"

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
  uint64_t content = 0;  ///< of all chunks so far, see chain_content
};

/// The hash of a text up to a chunk's end from that up to its begin and the chunk's.
uint64_t chain_content(uint64_t before, uint64_t chunk_hash);

/// When the files of a source were looked at, and how they looked. Files that look the same later
/// have the same content, unless they were changed at about that moment.
struct TextLook {
  std::string times;  ///< a hash of when each was changed
  int64_t at_ns = 0;
  bool is_settled = false;  ///< all changes lie well before that moment
};
TextLook look_at(const std::vector<TextFile>& files);

/// What the tokens depend on except for the content of the files, as JSON: source, format,
/// tokenizer, and the paths and sizes of the files.
std::string describe_tokens(const TextSource& source, const Tokenizer& tokenizer,
                            const std::vector<TextFile>& files);

/// Stores the state and what it belongs to, so that a kill leaves the old or the new.
void save_state(const std::filesystem::path& folder, const std::string& description,
                const TokenizeState& state, const TextLook& look);

/// A state that was found, and whether it belongs to `description`; nothing where there is none, or
/// one that cannot be read or cannot be. `difference` names what is different; whether the content
/// of the files is what it was remains to be seen.
struct FoundState {
  TokenizeState state;
  std::string difference;
  TextLook look;
};
std::optional<FoundState> load_state(const std::filesystem::path& folder,
                                     const std::string& description);

/// <prefix>.json, which says what finished tokens were made of.
std::filesystem::path description_path(const std::string& prefix);
void save_description(const std::string& prefix, const std::string& description,
                      const TokenizeState& state, const TextLook& look);
/// Finished tokens that belong to `description` and are whole.
struct FinishedTokens {
  TokenizeSummary summary;
  FoundState found;
};
std::optional<FinishedTokens> find_finished(const std::string& prefix,
                                            const std::string& description, int64_t vocab_size);

}  // namespace tessera
