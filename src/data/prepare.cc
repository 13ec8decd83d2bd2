#include "data/prepare.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "core/random.h"
#include "data/token_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kFingerprintVersion = 1;
/// Text is encoded in pieces of this size, so that memory does not grow with the documents.
constexpr size_t kPieceBytes = 1 << 20;

uint64_t hash(const std::string& text) {
  return hash_text(text.data(), text.size());
}

std::string dump(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string separator_text(const TextSource& source) {
  return source.separator_line ? "line:" + *source.separator_line : "none";
}

/// What the tokens depend on; equal fingerprints mean equal token files.
Json fingerprint(const TextSource& source, const Tokenizer& tokenizer,
                 const std::vector<TextFile>& files) {
  uint64_t listing = 0;
  int64_t num_bytes = 0;
  for (const TextFile& file : files) {
    listing = mix(listing, hash(file.path.string()));
    listing = mix(listing, static_cast<uint64_t>(file.num_bytes));
    listing = mix(listing, static_cast<uint64_t>(file.modified_ns));
    num_bytes += file.num_bytes;
  }
  return {{"version", kFingerprintVersion},
          {"source", source.path},
          {"separator", separator_text(source)},
          {"tokenizer", tokenizer.name()},
          {"num_files", files.size()},
          {"num_bytes", num_bytes},
          {"listing", fmt::format("{:016x}", listing)}};
}

/// <cache_dir>/<name>-<hash>, different for each source, tokenizer and separator.
std::string prefix_for(const TextSource& source, const Tokenizer& tokenizer,
                       const std::string& cache_dir) {
  const fs::path path = fs::weakly_canonical(source.path);
  const std::string what =
      fmt::format("{}\n{}\n{}", path.string(), tokenizer.name(), separator_text(source));
  std::string name = path.stem().string();
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '_'; }, '_');
  return (fs::path(cache_dir) / fmt::format("{}-{:016x}", name, hash(what))).string();
}

fs::path fingerprint_path(const std::string& prefix) {
  return prefix + ".json";
}

/// The tokens that an earlier call wrote, if they are whole and of the same text.
std::optional<PreparedTokens> find_prepared(const std::string& prefix, const Json& wanted,
                                            int64_t vocab_size) {
  std::error_code error;
  if (!fs::exists(fingerprint_path(prefix), error)) return std::nullopt;
  try {
    const Json found = Json::parse(read_text_file(fingerprint_path(prefix)), nullptr, false);
    if (dump(found) != dump(wanted)) return std::nullopt;
    const TokenFile file(prefix, vocab_size);
    return PreparedTokens{prefix, true, file.num_tokens(), file.num_documents()};
  } catch (const UserError&) {
    return std::nullopt;  // unreadable or damaged: written anew
  }
}

/// One run over the text files: encodes documents into the writer and says how far it is.
class Preparation {
 public:
  using Report = std::function<void(const PrepareProgress&)>;

  Preparation(const Tokenizer& tokenizer, TokenFileWriter& writer, const Report& report)
      : tokenizer_(tokenizer), writer_(writer), report_(report) {}

  void run(const std::vector<TextFile>& files, const std::optional<std::string>& separator_line) {
    for (const TextFile& file : files) progress_.bytes_total += file.num_bytes;
    int64_t bytes_before = 0;
    for (const TextFile& file : files) {
      for_each_document(file, separator_line, [this](std::string_view text) { encode(text); });
      bytes_before += file.num_bytes;
      advance(bytes_before - progress_.bytes_done);
    }
  }

 private:
  void encode(std::string_view text) {
    while (!text.empty()) {
      const size_t size =
          text.size() > kPieceBytes ? tokenizer_.cut(text, kPieceBytes) : text.size();
      ids_.clear();
      tokenizer_.encode(text.substr(0, size), ids_);
      writer_.append(ids_);
      advance(static_cast<int64_t>(size));
      text.remove_prefix(size);
    }
    const int32_t end = tokenizer_.end_of_document();
    writer_.append({&end, 1});
    writer_.end_document();
  }

  void advance(int64_t num_bytes) {
    progress_.bytes_done += num_bytes;
    if (report_) report_(progress_);
  }

  const Tokenizer& tokenizer_;
  TokenFileWriter& writer_;
  const Report& report_;
  PrepareProgress progress_;
  std::vector<int32_t> ids_;
};

/// What killed processes left behind; only the holder of the folder's lock may remove it.
void remove_leftovers(const std::string& prefix) {
  const fs::path target(prefix);
  const std::string begin = target.filename().string() + ".";
  for (const auto& entry : fs::directory_iterator(target.parent_path())) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(begin) && name.find(".tmp-") != std::string::npos) {
      remove_all(entry.path());
    }
  }
}

}  // namespace

PreparedTokens prepare_tokens(const TextSource& source, const Tokenizer& tokenizer,
                              const std::string& cache_dir,
                              const std::function<void(const PrepareProgress&)>& progress) {
  require(!cache_dir.empty(), "no folder is given for the token file");
  const std::vector<TextFile> files = list_text_files(source);
  const Json wanted = fingerprint(source, tokenizer, files);
  const std::string prefix = prefix_for(source, tokenizer, cache_dir);
  if (auto prepared = find_prepared(prefix, wanted, tokenizer.vocab_size())) return *prepared;
  make_folder(cache_dir);
  const FolderLock lock(cache_dir);
  if (lock.held()) remove_leftovers(prefix);
  remove_all(fingerprint_path(prefix));
  TokenFileWriter writer(prefix, tokenizer.vocab_size());
  Preparation(tokenizer, writer, progress).run(files, source.separator_line);
  require(writer.num_documents() > 0, "{} has no text but blanks", source.path);
  writer.finish();
  replace_file(fingerprint_path(prefix), dump(wanted));
  return {prefix, false, writer.num_tokens(), writer.num_documents()};
}

}  // namespace tessera
