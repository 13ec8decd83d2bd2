#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace tessera {

/// Which token of a tokenizer stands between documents.
struct EndOfDocumentSearch {
  std::string choice;          ///< the user's: text or id; empty: none
  std::filesystem::path path;  ///< of the tokenizer; tokenizer_config.json may stand beside it
  int32_t own = -1;            ///< what the tokenizer's file itself says, or -1
  int64_t vocab_size = 0;      ///< ids are below it
  std::function<int32_t(std::string_view)> find;  ///< the id of a token by its text, or -1
};

/// The id: the user's choice, else the eos_token of tokenizer_config.json, else the file's own,
/// else a well-known token. Throws UserError where there is none, or none of that text.
int32_t find_end_of_document(const EndOfDocumentSearch& search);

}  // namespace tessera
