#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "data/text_source.h"
#include "tokenizer/tokenizer.h"

namespace tessera {

/// How far the work is.
struct PrepareProgress {
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
};

struct PreparedTokens {
  std::string prefix;   ///< of the token file, for TokenFile
  bool reused = false;  ///< written by an earlier call
  int64_t num_tokens = 0;
  int64_t num_documents = 0;
};

/// Writes the tokens of the source to <cache_dir>/<name>-<hash>.{bin,idx}, each document followed
/// by end_of_document, and last a fingerprint beside them (.json): the tokenizer's name, the
/// separator, and the paths, sizes and times of the text files. When the fingerprint already there
/// agrees and the token file is whole, nothing is written. A process killed half-way leaves no
/// fingerprint; the next call removes what it left and starts anew. Throws UserError for what
/// list_text_files and for_each_document refuse, for a source without any text, and when another
/// process is writing in the folder.
PreparedTokens prepare_tokens(const TextSource& source, const Tokenizer& tokenizer,
                              const std::string& cache_dir,
                              const std::function<void(const PrepareProgress&)>& progress = {});

}  // namespace tessera
