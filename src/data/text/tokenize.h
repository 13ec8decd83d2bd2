#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "data/text/chunk_reader.h"
#include "data/text/text_source.h"
#include "tokenizer/tokenizer.h"

namespace tessera {

/// How far the work is.
struct TokenizeProgress {
  int64_t bytes_done = 0;  ///< of the files as they lie on the disk
  int64_t bytes_total = 0;
  int64_t text_bytes = 0;  ///< of documents, encoded by this call
  int64_t num_tokens = 0;
};

/// What to do where there are tokens already, of other text or made otherwise.
enum class OtherTokens { kRefuse, kReplace };

struct TokenizeRequest {
  TextSource source;
  std::string prefix;       ///< of the files to write
  int num_threads = 0;      ///< 0: all cores
  double sync_seconds = 5;  ///< between states that a later call can go on from
  OtherTokens other = OtherTokens::kRefuse;
  std::function<void(const TokenizeProgress&)> progress = {};  ///< from one thread at a time
  ChunkOptions chunks = {};
  /// Called by the caller's thread now and then; what it throws ends the work.
  std::function<void()> pause = {};
};

struct TokenizeSummary {
  std::string prefix;
  bool reused = false;     ///< nothing was to be done
  int64_t resumed_at = 0;  ///< tokens that an earlier call, cut short, had written
  int64_t num_documents = 0;
  int64_t num_tokens = 0;
  int64_t text_bytes = 0;       ///< of the documents' text, encoded
  int64_t silent_tokens = 0;    ///< that carry no loss
  int64_t blank_documents = 0;  ///< lines of JSONL without text, left out
  int64_t skipped_lines = 0;    ///< lines of JSONL that could not be used
  std::string first_skipped;    ///< place and reason of one of them
  double seconds = 0;           ///< of this call
  int64_t new_text_bytes = 0;   ///< encoded by this call
};

/// Turns the documents of a source into the token file <prefix>.{bin,idx}, each document followed
/// by end_of_document, in the order of the source whatever the number of threads, in memory that
/// depends on the number of threads alone (except for lines of JSONL, which are held whole, up to
/// 256 MiB). Instructions give a file with modes, see token_file.h. Beside it, <prefix>.json says
/// what it was made of.
///
/// The work grows in <prefix>.partial. Killed at any time, the next call with the same request goes
/// on from the last state on the disk and leaves the same bytes; an error leaves that state too.
/// Where <prefix> was made of the same text in the same way, nothing is written.
///
/// Throws UserError for what list_text_files refuses; for text with NUL bytes or with more than one
/// byte in 1000 that is no UTF-8; for a line of JSONL that cannot be used, with its place; for
/// damaged compressed data; for a source without any document; when another process writes there;
/// and for a full disk.
TokenizeSummary tokenize_text(const TokenizeRequest& request, const Tokenizer& tokenizer);

}  // namespace tessera
