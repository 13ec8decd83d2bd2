#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct BpeTrainingOptions {
  int64_t vocab_size = 32768;  ///< with the 256 bytes and the special tokens
  /// In the order of their ids, from 0 on; text that spells one out is not trained on.
  std::vector<std::string> special_tokens = {"<|endoftext|>"};
  std::string split = "gpt2";  ///< how text becomes words: gpt2, qwen (with NFC) or llama3
  int64_t min_frequency = 2;   ///< of a pair that is merged
};

/// Throws UserError for options that cannot be met.
void validate(const BpeTrainingOptions& options);

/// Calls the function that it is given once with each document.
using DocumentSource = std::function<void(const std::function<void(std::string_view)>&)>;
/// Is told how many of how many merges are done.
using MergeProgress = std::function<void(int64_t done, int64_t total)>;

/// Trains a byte-level byte-pair encoding (Sennrich, Haddow and Birch, 2016; on bytes as in GPT-2):
/// counts the words of all documents, then merges the most frequent pair again and again; of equal
/// counts the pair of the lower ids. The same documents in any order and with any number of threads
/// give the same text: a tokenizer.json. Ends early when no pair is left that is frequent enough.
/// Throws UserError for options that cannot be met and for a source without text.
std::string train_bpe(const BpeTrainingOptions& options, const DocumentSource& documents,
                      const MergeProgress& progress = {});

}  // namespace tessera
