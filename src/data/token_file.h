#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/file/file.h"

namespace tessera {

// Megatron's token files (megatron/core/datasets/indexed_dataset.py): <prefix>.bin holds the token
// ids of all sequences one after the other; <prefix>.idx says where each begins. All numbers are
// little-endian:
//
//   9 bytes  "MMIDIDX\0\0"
//   u64      version, 1
//   u8       type of an id: 1 u8, 4 i32, 5 i64, 8 u16
//   u64      number of sequences
//   u64      number of document indices: documents + 1
//   i32[sequences]         length of each sequence, in tokens
//   i64[sequences]         where it begins in .bin, in bytes
//   i64[documents + 1]     the first sequence of each document, and at last the number of sequences
//   i8[sequences]          modes; optional
//
// Documents here are what their document indices say. Megatron leaves the meaning of modes to the
// program that wrote them, and passes over them in text. Here they are 0 for a sequence whose
// tokens carry loss and 1 for one whose tokens carry none, such as a prompt; without modes all
// carry loss.

std::filesystem::path token_bin_path(const std::string& prefix);
std::filesystem::path token_idx_path(const std::string& prefix);
/// The path without ".bin" or ".idx" at its end.
std::string token_prefix(std::string path);

/// Tokens [begin, end) of a file's stream.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t num_tokens() const { return end - begin; }
  bool operator==(const TokenRange&) const = default;
};

/// What an index says, checked against the size of the tokens.
struct TokenIndex {
  DType dtype = DType::kU16;
  int64_t num_sequences = 0;
  int64_t num_tokens = 0;
  std::vector<int64_t> document_offsets;  ///< see TokenFile
  std::vector<TokenRange> silent_ranges;  ///< see TokenFile
};

/// Reads the content of a .idx file whose .bin file has `bin_bytes` bytes. Throws UserError that
/// begins with `name` and gives the field, what was found and what was expected.
TokenIndex parse_token_index(std::span<const std::byte> idx, int64_t bin_bytes,
                             const std::string& name);

/// Reads a token file through a memory map. The constructor checks sizes before anything else, then
/// every length, pointer and document index, so that no later access can leave the file; ids are
/// checked when they are read. A file that breaks a rule throws UserError with file, field, what
/// was found and what was expected.
///
/// Sequences must lie in .bin in order and without gaps, as Megatron's own builder writes them: the
/// tokens of the file are then one stream, addressed from 0 to num_tokens. Const functions may run
/// on any thread.
class TokenFile {
 public:
  /// `prefix` is the path without ".bin" or ".idx"; either of those is also taken. Ids must be
  /// below `vocab_size`.
  TokenFile(const std::string& prefix, int64_t vocab_size);

  int64_t num_tokens() const { return index_.num_tokens; }
  int64_t num_documents() const { return static_cast<int64_t>(index_.document_offsets.size()) - 1; }
  int64_t num_sequences() const { return index_.num_sequences; }
  DType dtype() const { return index_.dtype; }
  int64_t vocab_size() const { return vocab_size_; }
  const std::string& prefix() const { return prefix_; }

  /// Where each document begins in the stream of tokens, ascending, and at last num_tokens;
  /// documents + 1 offsets.
  std::span<const int64_t> document_offsets() const { return index_.document_offsets; }
  /// The tokens that carry no loss, as ascending ranges that do not touch.
  std::span<const TokenRange> silent_ranges() const { return index_.silent_ranges; }
  /// The document that holds the token at `offset`; empty documents hold none.
  int64_t document_at(int64_t offset) const;

  /// Copies the ids of tokens [offset, offset + ids.size()). Throws InternalError for a range
  /// outside the file and UserError for an id that is negative or not below vocab_size.
  void read(int64_t offset, std::span<int32_t> ids) const;

  /// A hash by which other tokens are told from these: of the index, and of all tokens up to 256
  /// MiB, or of 1024 stretches spread over more. Reads them from the disk. Throws UserError.
  uint64_t fingerprint() const;

 private:
  std::string prefix_;
  int64_t vocab_size_ = 0;
  MappedFile bin_;
  TokenIndex index_;
};

}  // namespace tessera
