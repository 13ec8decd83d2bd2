#include "data/token_file_writer.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "core/error.h"
#include "data/token_format.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace token_format;

constexpr size_t kFlushBytes = 1 << 20;
/// From this vocabulary on Megatron stores ids in four bytes.
constexpr int64_t kWideVocab = 65'500;

/// A sequence that is ended, as it waits for the index.
struct SequenceRecord {
  int32_t num_tokens = 0;
  int8_t mode = kHasLoss;
  int8_t ends_document = 0;
  int16_t unused = 0;
};
static_assert(sizeof(SequenceRecord) == 8);

fs::path tokens_path(const fs::path& folder) {
  return folder / "tokens";
}
fs::path sequences_path(const fs::path& folder) {
  return folder / "sequences";
}
fs::path index_path(const fs::path& folder) {
  return folder / "index";
}

OutputFile open_output(const fs::path& path, const std::optional<int64_t>& kept_bytes) {
  return kept_bytes ? OutputFile(path, *kept_bytes) : OutputFile(path);
}

template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

/// Writes a file of small values by way of a buffer.
class BufferedOutput {
 public:
  explicit BufferedOutput(const fs::path& path) : file_(path) {}

  template <typename T>
  void put(const T& value) {
    const auto bytes = bytes_of(value);
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    if (buffer_.size() >= kFlushBytes) flush();
  }
  void finish() {
    flush();
    file_.sync();
    file_.close();
  }

 private:
  void flush() {
    file_.write(buffer_);
    buffer_.clear();
  }

  OutputFile file_;
  std::vector<std::byte> buffer_;
};

/// The recorded sequences, one pass after the other.
class Records {
 public:
  explicit Records(const fs::path& path) : file_(path) {}

  int64_t count() const { return file_.num_bytes() / static_cast<int64_t>(sizeof(SequenceRecord)); }
  void for_each(const std::function<void(int64_t, const SequenceRecord&)>& use) const {
    for (int64_t i = 0; i < count(); ++i) {
      SequenceRecord record;
      std::memcpy(&record, file_.bytes().data() + i * sizeof(record), sizeof(record));
      use(i, record);
    }
  }

 private:
  MappedFile file_;
};

}  // namespace

DType token_dtype(int64_t vocab_size) {
  return vocab_size < kWideVocab ? DType::kU16 : DType::kI32;
}

void pack_tokens(std::span<const int32_t> ids, int64_t vocab_size, std::vector<std::byte>& bytes) {
  for (const int32_t id : ids) {
    ensure(id >= 0 && id < vocab_size, "token id {} in a vocabulary of {}", id, vocab_size);
  }
  const size_t before = bytes.size();
  if (token_dtype(vocab_size) == DType::kI32) {
    bytes.resize(before + ids.size_bytes());
    std::copy_n(std::as_bytes(ids).begin(), ids.size_bytes(), bytes.begin() + before);
    return;
  }
  bytes.resize(before + ids.size() * sizeof(uint16_t));
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto id = static_cast<uint16_t>(ids[i]);
    std::memcpy(bytes.data() + before + i * sizeof(id), &id, sizeof(id));
  }
}

fs::path PartialFolder::path_for(const std::string& prefix) {
  return token_prefix(prefix) + ".partial";
}

PartialFolder::PartialFolder(const std::string& prefix) : path_(path_for(prefix)) {
  make_folder(path_);
  lock_.emplace(path_);
}

PartialFolder::~PartialFolder() {
  std::error_code ignored;
  if (!kept_) fs::remove_all(path_, ignored);
}

void PartialFolder::remove() {
  kept_ = true;  // what may stand there later is another writer's
  remove_path(path_);
}

void TokenFileWriter::GrowingFile::append(std::span<const std::byte> bytes) {
  pending.insert(pending.end(), bytes.begin(), bytes.end());
  if (pending.size() >= kFlushBytes) flush();
}

void TokenFileWriter::GrowingFile::flush() {
  file.write(pending);
  pending.clear();
}

void TokenFileWriter::GrowingFile::truncate(int64_t num_bytes) {
  if (num_bytes >= file.num_bytes()) {
    pending.resize(num_bytes - file.num_bytes());
    return;
  }
  pending.clear();
  file.truncate(num_bytes);
}

TokenFileWriter::TokenFileWriter(const std::string& prefix, int64_t vocab_size)
    : TokenFileWriter({.prefix = prefix, .vocab_size = vocab_size}) {}

TokenFileWriter::TokenFileWriter(const TokenFileOptions& options)
    : TokenFileWriter(std::make_shared<PartialFolder>(options.prefix), options, std::nullopt) {}

TokenFileWriter::TokenFileWriter(std::shared_ptr<PartialFolder> folder,
                                 const TokenFileOptions& options,
                                 const std::optional<TokenCounts>& counts)
    : options_(options),
      folder_(std::move(folder)),
      id_bytes_(dtype_size(token_dtype(options.vocab_size))),
      counts_(counts.value_or(TokenCounts{})),
      tokens_{open_output(tokens_path(folder_->path()),
                          counts ? std::optional(counts->num_tokens * id_bytes_) : std::nullopt),
              {}},
      sequences_{open_output(sequences_path(folder_->path()),
                             counts ? std::optional(counts->num_sequences *
                                                    static_cast<int64_t>(sizeof(SequenceRecord)))
                                    : std::nullopt),
                 {}} {
  options_.prefix = token_prefix(options.prefix);
}

void TokenFileWriter::append(std::span<const int32_t> ids, bool has_loss) {
  std::vector<std::byte> packed;
  pack_tokens(ids, options_.vocab_size, packed);
  append_packed(packed, has_loss);
}

void TokenFileWriter::append_packed(std::span<const std::byte> packed, bool has_loss) {
  ensure(has_loss || options_.with_modes, "{}: tokens without loss in a file without modes",
         options_.prefix);
  while (!packed.empty()) {
    const bool full = counts_.sequence_tokens == options_.max_sequence_tokens;
    if (counts_.sequence_tokens > 0 && (full || counts_.sequence_has_loss != has_loss)) {
      end_sequence();
    }
    counts_.sequence_has_loss = has_loss;
    const int64_t room = options_.max_sequence_tokens - counts_.sequence_tokens;
    const int64_t count = std::min(room, static_cast<int64_t>(packed.size()) / id_bytes_);
    const size_t size = count * id_bytes_;
    tokens_.append(packed.first(size));
    packed = packed.subspan(size);
    counts_.num_tokens += count;
    counts_.sequence_tokens += count;
    counts_.document_tokens += count;
  }
}

void TokenFileWriter::end_sequence() {
  const SequenceRecord record = {.num_tokens = static_cast<int32_t>(counts_.sequence_tokens),
                                 .mode = counts_.sequence_has_loss ? kHasLoss : kSilent};
  sequences_.append(bytes_of(record));
  ++counts_.num_sequences;
  ++counts_.document_sequences;
  counts_.sequence_tokens = 0;
  counts_.sequence_has_loss = true;
}

void TokenFileWriter::end_document() {
  const SequenceRecord record = {.num_tokens = static_cast<int32_t>(counts_.sequence_tokens),
                                 .mode = counts_.sequence_has_loss ? kHasLoss : kSilent,
                                 .ends_document = 1};
  sequences_.append(bytes_of(record));
  counts_ = {.num_tokens = counts_.num_tokens,
             .num_sequences = counts_.num_sequences + 1,
             .num_documents = counts_.num_documents + 1};
}

void TokenFileWriter::discard_document() {
  counts_ = {.num_tokens = counts_.num_tokens - counts_.document_tokens,
             .num_sequences = counts_.num_sequences - counts_.document_sequences,
             .num_documents = counts_.num_documents};
  tokens_.truncate(counts_.num_tokens * id_bytes_);
  sequences_.truncate(counts_.num_sequences * static_cast<int64_t>(sizeof(SequenceRecord)));
}

void TokenFileWriter::sync() {
  for (GrowingFile* growing : {&tokens_, &sequences_}) {
    growing->flush();
    growing->file.sync();
  }
}

void TokenFileWriter::write_index() {
  ensure(counts_.document_tokens == 0 && counts_.document_sequences == 0,
         "token file: {} tokens are in no document", counts_.document_tokens);
  sync();
  const Records records(sequences_path(folder_->path()));
  BufferedOutput out(index_path(folder_->path()));
  for (const char c : kMagic) out.put(c);
  out.put(kVersion);
  out.put(type_code(token_dtype(options_.vocab_size)));
  out.put(static_cast<uint64_t>(counts_.num_sequences));
  out.put(static_cast<uint64_t>(counts_.num_documents + 1));
  records.for_each([&](int64_t, const SequenceRecord& record) { out.put(record.num_tokens); });
  int64_t pointer = 0;
  records.for_each([&](int64_t, const SequenceRecord& record) {
    out.put(pointer);
    pointer += record.num_tokens * id_bytes_;
  });
  out.put(int64_t{0});
  records.for_each([&](int64_t i, const SequenceRecord& record) {
    if (record.ends_document != 0) out.put(i + 1);
  });
  if (options_.with_modes) {
    records.for_each([&](int64_t, const SequenceRecord& record) { out.put(record.mode); });
  }
  out.finish();
  sync_folder(folder_->path());
}

void TokenFileWriter::finish() {
  write_index();
  publish_token_file(options_.prefix);
  folder_->remove();
}

int64_t partial_tokens(const fs::path& folder, int64_t vocab_size) {
  std::error_code missing;
  const auto bytes = fs::file_size(tokens_path(folder), missing);
  return missing ? 0 : static_cast<int64_t>(bytes) / dtype_size(token_dtype(vocab_size));
}

void publish_token_file(const std::string& prefix) {
  const fs::path folder = PartialFolder::path_for(prefix);
  const fs::path target = token_bin_path(prefix).parent_path();
  const fs::path parent = target.empty() ? fs::path(".") : target;
  // An old index must never be seen beside the new tokens.
  if (path_exists(index_path(folder))) {
    remove_path(token_idx_path(prefix));
    sync_folder(parent);
  }
  if (path_exists(tokens_path(folder))) rename_path(tokens_path(folder), token_bin_path(prefix));
  if (path_exists(index_path(folder))) rename_path(index_path(folder), token_idx_path(prefix));
  sync_folder(parent);
}

}  // namespace tessera
