#include "data/text/tokenize.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/file/file.h"
#include "core/process/stopwatch.h"
#include "data/text/chunk_encoder.h"
#include "data/text/ordered_pipeline.h"
#include "data/text/tokenize_state.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

int count_threads(int wanted) {
  constexpr int64_t kMostThreads = 4096;
  require(wanted >= 0 && wanted <= kMostThreads,
          "the number of threads is {}; expected 0 (all cores) or more, at most {}", wanted,
          kMostThreads);
  return wanted > 0 ? wanted : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// One tokenizing of a source from where it stands to its end.
class Tokenization {
 public:
  Tokenization(const TokenizeRequest& request, const Tokenizer& tokenizer,
               const std::vector<TextFile>& files, std::string description, TextLook look,
               std::shared_ptr<PartialFolder> folder, const std::optional<TokenizeState>& found)
      : request_(request),
        tokenizer_(tokenizer),
        files_(files),
        description_(std::move(description)),
        look_(std::move(look)),
        folder_(std::move(folder)),
        state_(found.value_or(TokenizeState{})),
        writer_(folder_,
                {.prefix = request.prefix,
                 .vocab_size = tokenizer.vocab_size(),
                 .with_modes = request.source.instructions},
                found ? std::optional(found->counts) : std::nullopt) {
    for (const TextFile& file : files_) progress_.bytes_total += file.num_bytes;
    for (int64_t i = 0; i < state_.position.file; ++i) bytes_before_ += file_at(i).num_bytes;
  }

  /// Everything but the names of the files.
  void run() {
    ChunkReader reader(
        request_.source, files_,
        [this](std::string_view text, size_t limit) { return tokenizer_.cut(text, limit); },
        request_.chunks);
    reader.seek(state_.position);
    const ChunkEncoder encoder(request_.source, files_, tokenizer_);
    const int num_threads = count_threads(request_.num_threads);
    const OrderedPipeline<TextChunk, EncodedChunk> pipeline{
        .produce = [&reader] { return reader.next(); },
        .transform = [&encoder](const TextChunk& chunk) { return encoder.encode(chunk); },
        .consume = [this](const TextChunk& chunk,
                          const EncodedChunk& encoded) { consume(chunk, encoded); },
        .weigh = [](const TextChunk& chunk) { return static_cast<int64_t>(chunk.text.size()) + 1; },
        .max_weight = 2 * num_threads * static_cast<int64_t>(request_.chunks.chunk_bytes),
        .pause = request_.pause};
    pipeline.run(num_threads);
    require(writer_.num_documents() > 0, "{} has no text but blanks", request_.source.name());
    writer_.write_index();
    state_.finishing = true;
    save();
  }

  const TokenizeState& state() const { return state_; }
  int64_t new_text_bytes() const { return progress_.text_bytes; }

 private:
  const TextFile& file_at(int64_t index) const { return files_[index]; }

  void consume(const TextChunk& chunk, const EncodedChunk& encoded) {
    check_damage(chunk, encoded);
    append(encoded);
    state_.content = chain_content(state_.content, encoded.content_hash);
    state_.text_bytes += encoded.text_bytes;
    state_.blank_documents += encoded.blank_documents;
    if (state_.skipped_lines == 0) state_.first_skipped = encoded.skipped.first;
    state_.skipped_lines += encoded.skipped.count;
    state_.position = chunk.end;
    // A document that is blank so far may be discarded, from before the state too.
    const bool may_discard = state_.document_is_blank && writer_.counts().document_tokens > 0;
    if (!may_discard && seconds_since(last_save_) >= request_.sync_seconds) save();
    report(chunk, encoded);
  }

  /// Counts bytes that are no UTF-8, which are judged against the whole file.
  void check_damage(const TextChunk& chunk, const EncodedChunk& encoded) {
    const TextFile& file = file_at(chunk.begin.file);
    state_.damage.add(encoded.damage);
    const bool plain = compression_of(file.path) == FileCompression::kNone;
    if (plain || chunk.ends_file) {
      const int64_t content = std::max(chunk.content_bytes, plain ? file.num_bytes : 0);
      require_text(state_.damage, content, file.path);
    }
    if (chunk.ends_file) state_.damage = {};
  }

  void append(const EncodedChunk& encoded) {
    std::span<const std::byte> tokens = encoded.tokens;
    const auto id_bytes = static_cast<size_t>(dtype_size(token_dtype(tokenizer_.vocab_size())));
    for (const EncodedPart& part : encoded.parts) {
      const size_t size = static_cast<size_t>(part.num_tokens) * id_bytes;
      writer_.append_packed(tokens.first(size), part.has_loss);
      tokens = tokens.subspan(size);
      if (!part.has_loss) state_.silent_tokens += part.num_tokens;
      state_.document_is_blank = state_.document_is_blank && part.is_blank;
      if (part.ends_document) end_document();
    }
  }

  void end_document() {
    if (state_.document_is_blank) {
      writer_.discard_document();
    } else {
      writer_.end_document();
    }
    state_.document_is_blank = true;
  }

  void save() {
    writer_.sync();
    state_.counts = writer_.counts();
    save_state(folder_->path(), description_, state_, look_);
    folder_->keep();
    last_save_ = Clock::now();
  }

  void report(const TextChunk& chunk, const EncodedChunk& encoded) {
    progress_.text_bytes += encoded.text_bytes;
    progress_.num_tokens = writer_.num_tokens();
    const int64_t whole = file_at(chunk.begin.file).num_bytes;
    progress_.bytes_done = bytes_before_ + std::min(chunk.file_position, whole);
    if (chunk.ends_file) bytes_before_ += whole;
    if (request_.progress) request_.progress(progress_);
  }

  const TokenizeRequest& request_;
  const Tokenizer& tokenizer_;
  const std::vector<TextFile>& files_;
  std::string description_;
  TextLook look_;
  std::shared_ptr<PartialFolder> folder_;
  TokenizeState state_;
  TokenFileWriter writer_;
  TokenizeProgress progress_;
  int64_t bytes_before_ = 0;  // of files that are done
  Clock::time_point last_save_ = Clock::now();
};

/// Refuses to replace what was made otherwise, unless that is asked for.
void check_replaceable(const TokenizeRequest& request, const std::string& prefix,
                       const std::optional<FoundState>& found) {
  if (request.other == OtherTokens::kReplace) return;
  require(!found || found->difference.empty(),
          "{}.partial holds unfinished tokens of other text or options ({}); repeat the command "
          "that began them, or start over with --overwrite",
          prefix, found ? found->difference : "");
  require((found && found->state.finishing) || !path_exists(token_idx_path(prefix)),
          "{} exists and holds other text, or was made with other options; choose another output "
          "or replace it with --overwrite",
          token_idx_path(prefix).string());
}

/// A text that is to be tokenized, and what is known of it before.
struct TextJob {
  const TokenizeRequest& request;
  const Tokenizer& tokenizer;
  std::vector<TextFile> files;
  TextLook look;
  std::string description;

  int64_t num_bytes() const {
    int64_t total = 0;
    for (const TextFile& file : files) total += file.num_bytes;
    return total;
  }
};

/// Texts up to this size are read again each time; of larger ones, which takes minutes a terabyte,
/// only those whose files look changed.
constexpr int64_t kAlwaysRead = int64_t{128} << 20;

/// The hash of the text up to a position, or nothing where no chunk ends there.
std::optional<uint64_t> hash_content(const TextJob& job, const TextPosition& end) {
  ChunkReader reader(
      job.request.source, job.files,
      [&job](std::string_view text, size_t limit) { return job.tokenizer.cut(text, limit); },
      job.request.chunks);
  TokenizeProgress progress{.bytes_total = job.num_bytes()};
  const bool tell = progress.bytes_total > kAlwaysRead && job.request.progress;
  uint64_t content = 0;
  int64_t bytes_before = 0;
  for (TextPosition at; at != end;) {
    const auto chunk = reader.next();
    if (!chunk) return std::nullopt;
    content = chain_content(content, hash_chunk(*chunk));
    at = chunk->end;
    progress.bytes_done = bytes_before + chunk->file_position;
    if (chunk->ends_file) bytes_before = progress.bytes_done;
    if (tell) job.request.progress(progress);
    if (job.request.pause) job.request.pause();
  }
  return content;
}

/// Whether the files still hold what the state was made of.
bool holds_same_text(const TextJob& job, const FoundState& found) {
  const bool looks_same = found.look.is_settled && found.look.times == job.look.times;
  if (looks_same && job.num_bytes() > kAlwaysRead) return true;
  try {
    return hash_content(job, found.state.position) == found.state.content;
  } catch (const UserError&) {
    return false;  // as tokenizing will say
  }
}

/// Whether the tokens in the folder reach as far as the state says.
bool has_tokens(const PartialFolder& folder, const TokenizeState& state, int64_t vocab_size) {
  return state.finishing || partial_tokens(folder.path(), vocab_size) >= state.counts.num_tokens;
}

/// Gives finished tokens their names, and says beside them what they were made of.
void publish(const std::string& prefix, const TextJob& job, const TokenizeState& state,
             PartialFolder& folder) {
  remove_path(description_path(prefix));  // of tokens that are replaced now
  publish_token_file(prefix);
  save_description(prefix, job.description, state, job.look);
  folder.remove();
}

/// What an earlier call has left in the folder, unless it is of no use.
std::optional<TokenizeState> find_state(const TextJob& job, const std::string& prefix,
                                        PartialFolder& folder) {
  auto found = load_state(folder.path(), job.description);
  if (found && !has_tokens(folder, found->state, job.tokenizer.vocab_size())) found.reset();
  if (found) folder.keep();
  if (found && found->difference.empty() && !holds_same_text(job, *found)) {
    found->difference = "a file has changed";
  }
  check_replaceable(job.request, prefix, found);
  if (!found || !found->difference.empty()) return std::nullopt;
  return found->state;
}

TokenizeSummary tokenize_new(const TextJob& job) {
  const std::string& prefix = job.request.prefix;
  const auto folder = std::make_shared<PartialFolder>(prefix);
  std::optional<TokenizeState> state = find_state(job, prefix, *folder);
  const int64_t resumed_at = state ? state->counts.num_tokens : 0;
  int64_t new_text_bytes = 0;
  if (!state || !state->finishing) {
    Tokenization work(job.request, job.tokenizer, job.files, job.description, job.look, folder,
                      state);
    work.run();
    state = work.state();
    new_text_bytes = work.new_text_bytes();
  }
  publish(prefix, job, *state, *folder);
  auto finished = find_finished(prefix, job.description, job.tokenizer.vocab_size());
  ensure(finished.has_value(), "{}: what was written cannot be read", prefix);
  TokenizeSummary& summary = finished->summary;
  summary.reused = false;
  summary.resumed_at = resumed_at;
  summary.new_text_bytes = new_text_bytes;
  return summary;
}

/// What a kill between the last two steps leaves behind finished tokens.
void remove_leftover(const std::string& prefix, const std::string& description) {
  if (!path_exists(PartialFolder::path_for(prefix))) return;
  PartialFolder folder(prefix);
  const auto found = load_state(folder.path(), description);
  if (found && !found->difference.empty()) folder.keep();
}

/// Finished tokens of the same text, or nothing.
std::optional<TokenizeSummary> reuse_finished(const TextJob& job) {
  const std::string& prefix = job.request.prefix;
  const auto finished = find_finished(prefix, job.description, job.tokenizer.vocab_size());
  if (!finished || !holds_same_text(job, finished->found)) return std::nullopt;
  const TextLook& look = finished->found.look;
  const bool read_for_its_looks = !look.is_settled || look.times != job.look.times;
  if (read_for_its_looks && job.num_bytes() > kAlwaysRead) {
    try {
      save_description(prefix, job.description, finished->found.state, job.look);
    } catch (const UserError&) {  // in a folder that is only read, the text is read each time
    }
  }
  remove_leftover(prefix, job.description);
  return finished->summary;
}

}  // namespace

TokenizeSummary tokenize_text(const TokenizeRequest& request, const Tokenizer& tokenizer) {
  const auto started = Clock::now();
  require(!request.prefix.empty(), "no output is given; name the prefix of the token file");
  require(std::filesystem::path(request.prefix).has_filename(),
          "the output {} is a folder; name the token file in it too, such as {}text",
          request.prefix, request.prefix);
  count_threads(request.num_threads);
  TokenizeRequest resolved = request;
  resolved.prefix = token_prefix(request.prefix);
  TextJob job{resolved, tokenizer, list_text_files(request.source), {}, {}};
  job.look = look_at(job.files);
  job.description = describe_tokens(request.source, tokenizer, job.files);
  auto summary = reuse_finished(job);
  if (!summary) summary = tokenize_new(job);
  summary->seconds = seconds_since(started);
  return *summary;
}

}  // namespace tessera
