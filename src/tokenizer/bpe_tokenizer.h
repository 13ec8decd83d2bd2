#pragma once

#include <memory>

#include "tokenizer/tokenizer.h"
#include "tokenizer/tokenizer_json.h"

namespace tessera {

/// The tokenizer of a description; documents are separated by the token of that id.
std::unique_ptr<Tokenizer> make_bpe_tokenizer(TokenizerDescription description,
                                              int32_t end_of_document);

/// The id of a token by its text in the file, or -1.
int32_t find_token(const TokenizerDescription& description, std::string_view text);

}  // namespace tessera
