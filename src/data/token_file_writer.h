#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/file/file.h"
#include "data/token_file.h"

namespace tessera {

/// Two bytes where the vocabulary is below 65500 (Megatron's rule), else four.
DType token_dtype(int64_t vocab_size);

/// Appends ids as they are stored in a file of that type. Throws InternalError for an id outside
/// the vocabulary.
void pack_tokens(std::span<const int32_t> ids, int64_t vocab_size, std::vector<std::byte>& bytes);

/// The folder <prefix>.partial, in which a token file grows; made and locked, and removed with all
/// in it when destroyed, unless it is kept. Throws UserError when another process holds it.
class PartialFolder {
 public:
  explicit PartialFolder(const std::string& prefix);
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  static std::filesystem::path path_for(const std::string& prefix);
  const std::filesystem::path& path() const { return path_; }
  /// Leaves it there when destroyed.
  void keep() { kept_ = true; }
  /// Removes it now.
  void remove();

 private:
  std::filesystem::path path_;
  std::optional<FolderLock> lock_;
  bool kept_ = false;
};

/// How far a token file has been written.
struct TokenCounts {
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;    ///< that are ended
  int64_t num_documents = 0;    ///< that are ended
  int64_t sequence_tokens = 0;  ///< of the sequence being written
  bool sequence_has_loss = true;
  int64_t document_tokens = 0;     ///< of the document being written
  int64_t document_sequences = 0;  ///< ended ones of the document being written
  bool operator==(const TokenCounts&) const = default;
};

struct TokenFileOptions {
  std::string prefix;
  int64_t vocab_size = 0;
  bool with_modes = false;  ///< say of each sequence whether its tokens carry loss
  /// A longer document becomes several sequences.
  int64_t max_sequence_tokens = std::numeric_limits<int32_t>::max();
};

/// Writes a token file document by document, in memory that does not depend on its size: tokens and
/// the lengths of sequences go to files in <prefix>.partial, and only `finish` gives .bin and .idx
/// their names, .idx last. A write that is cut short by a full disk or a killed process leaves the
/// old pair untouched, or no .idx at all.
class TokenFileWriter {
 public:
  /// A writer that starts anew. Makes the folder.
  TokenFileWriter(const std::string& prefix, int64_t vocab_size);
  explicit TokenFileWriter(const TokenFileOptions& options);
  /// Goes on in a folder where an earlier writer had `counts` at a sync(), and has not discarded
  /// the document of that moment since; without counts it starts anew.
  TokenFileWriter(std::shared_ptr<PartialFolder> folder, const TokenFileOptions& options,
                  const std::optional<TokenCounts>& counts);

  /// Adds ids to the document being written. Where `has_loss` changes, a sequence ends; a file
  /// without modes takes only tokens with loss.
  void append(std::span<const int32_t> ids, bool has_loss = true);
  /// The same for ids from pack_tokens.
  void append_packed(std::span<const std::byte> packed, bool has_loss = true);
  /// Ends the document being written, even an empty one.
  void end_document();
  /// Forgets the document being written.
  void discard_document();

  /// Waits until all that was written is on the disk.
  void sync();
  const TokenCounts& counts() const { return counts_; }
  int64_t num_tokens() const { return counts_.num_tokens; }
  int64_t num_documents() const { return counts_.num_documents; }

  /// The index, and all else in the folder, on the disk; publish_token_file can follow. All
  /// documents must be ended.
  void write_index();
  /// write_index, publish_token_file, and removes the folder.
  void finish();

 private:
  /// A file that grows at its end.
  struct GrowingFile {
    OutputFile file;
    std::vector<std::byte> pending;

    void append(std::span<const std::byte> bytes);
    void flush();
    void truncate(int64_t num_bytes);
  };

  void end_sequence();

  TokenFileOptions options_;
  std::shared_ptr<PartialFolder> folder_;
  int64_t id_bytes_;
  TokenCounts counts_;
  GrowingFile tokens_;
  GrowingFile sequences_;
};

/// How many tokens a folder <prefix>.partial holds; 0 where it holds none.
int64_t partial_tokens(const std::filesystem::path& folder, int64_t vocab_size);

/// Gives the files in <prefix>.partial, which have been finished, their names. May be repeated
/// after a kill in the middle.
void publish_token_file(const std::string& prefix);

}  // namespace tessera
