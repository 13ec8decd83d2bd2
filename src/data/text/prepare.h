#pragma once

#include <functional>
#include <string>

#include "data/text/tokenize.h"

namespace tessera {

using PrepareProgress = TokenizeProgress;

/// tokenize_text into <cache_dir>/<name>-<hash>, a prefix of its own for each source and tokenizer:
/// written once, and anew when the text has changed. `pause` is that of a TokenizeRequest.
TokenizeSummary prepare_tokens(const TextSource& source, const Tokenizer& tokenizer,
                               const std::string& cache_dir,
                               const std::function<void(const TokenizeProgress&)>& progress = {},
                               const std::function<void()>& pause = {});

/// The name of the tokenizer that made a token file, as Tessera describes it beside the file; empty
/// where there is no such description.
std::string tokenizer_of(const std::string& prefix);

}  // namespace tessera
