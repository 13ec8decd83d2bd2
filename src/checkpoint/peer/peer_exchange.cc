#include "checkpoint/peer/peer_exchange.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/layout.h"
#include "core/error.h"
#include "core/file/file.h"
#include "core/file/hash.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPieceBytes = int64_t{16} << 20;

Tensor tensor_of(std::span<std::byte> bytes) {
  return {bytes.data(), DType::kU8, {std::ssize(bytes)}};
}

/// Of a file: the bytes of the piece that begins at `offset`.
int64_t piece_bytes(int64_t offset, int64_t num_bytes) {
  return std::min(kPieceBytes, num_bytes - offset);
}

/// Keeps the first failure of what this rank does alone, since the other rank waits for all of it.
class Failures {
 public:
  template <typename Action>
  void attempt(const Action& action) {
    if (failure_) return;
    try {
      action();
    } catch (const std::exception&) {
      failure_ = std::current_exception();
    }
  }
  bool failed() const { return failure_ != nullptr; }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::exception_ptr failure_;
};

/// What a part's files have in common on both sides: how far the exchange has come.
class Exchange {
 public:
  Exchange(Communicator& world, int64_t peer, fs::path folder)
      : world_(world), peer_(peer), folder_(std::move(folder)) {}

  bool ended() const { return next_ == files_.size(); }
  const Failures& failures() const { return failures_; }

 protected:
  void list_files(const std::string& text, const std::string& whose) {
    const Manifest manifest = parse_manifest_part(text, whose);
    files_.assign(manifest.files.begin(), manifest.files.end());
  }
  const FileRecord& record() const { return files_[next_].second; }
  fs::path path() const { return folder_ / files_[next_].first; }
  /// Behind a piece; true where it was the file's last.
  bool advance() {
    offset_ += std::ssize(piece_);
    if (offset_ < record().num_bytes) return false;
    ++next_;
    offset_ = 0;
    return true;
  }

  Communicator& world_;
  int64_t peer_;
  fs::path folder_;
  Failures failures_;
  std::string text_;
  int64_t length_ = 0;
  std::vector<std::pair<std::string, FileRecord>> files_;
  size_t next_ = 0;
  int64_t offset_ = 0;
  std::vector<std::byte> piece_;
};

/// The files that this rank gives, piece by piece. Where one cannot be read to its end, the other
/// rank is given what does not fit its hash.
class Giving : public Exchange {
 public:
  Giving(Communicator& world, const GivenPart& part) : Exchange(world, part.to, part.folder) {
    failures_.attempt([&] {
      std::string text = read_complete_manifest(folder_);
      list_files(text, (folder_ / kManifestFile).string());
      text_ = std::move(text);
    });
  }

  /// Of its manifest; 0 where the part cannot be read.
  Pending give_length() {
    length_ = std::ssize(text_);
    return world_.send(view(std::span(&length_, 1), {1}), peer_);
  }
  Pending give_text() {
    if (length_ > 0) return world_.send(tensor_of(std::as_writable_bytes(std::span(text_))), peer_);
    files_.clear();
    return {};
  }
  /// REQUIRES !ended(). The piece before it must have been waited for.
  Pending give_next() {
    piece_.assign(piece_bytes(offset_, record().num_bytes), std::byte{0});
    failures_.attempt([&] {
      if (offset_ == 0) file_.emplace(path());
      require(file_->read(piece_) == piece_.size(), "{} is damaged: it ends before byte {}",
              file_->path().string(), record().num_bytes);
    });
    advance();
    return world_.send(tensor_of(piece_), peer_);
  }

 private:
  std::optional<InputFile> file_;
};

/// The files that come.
class Taking : public Exchange {
 public:
  Taking(Communicator& world, const TakenPart& part) : Exchange(world, part.from, part.folder) {}

  Pending take_length() { return world_.receive(view(std::span(&length_, 1), {1}), peer_); }
  Pending take_text() {
    text_.resize(length_);
    if (length_ == 0) return {};
    return world_.receive(tensor_of(std::as_writable_bytes(std::span(text_))), peer_);
  }
  void begin() {
    if (length_ > 0) list_files(text_, fmt::format("the part of rank {}", peer_));
    failures_.attempt([&] {
      require(length_ > 0, "rank {} cannot read the part that it was to give", peer_);
      make_folder(folder_);
      open_next();
    });
  }
  /// REQUIRES !ended(). The piece is to be waited for, and then written.
  Pending take_next() {
    piece_.resize(piece_bytes(offset_, record().num_bytes));
    return world_.receive(tensor_of(piece_), peer_);
  }
  void write() {
    failures_.attempt([&] {
      hash_.update(piece_);
      file_->write(piece_);
    });
    const auto& [name, record] = files_[next_];
    if (!advance()) return;
    failures_.attempt([&, path = folder_ / name, checksum = record.checksum] {
      file_->close();
      require(hash_.digest() == checksum, "{} was damaged on its way from rank {}", path.string(),
              peer_);
    });
    failures_.attempt([&] { open_next(); });
  }
  /// Marks the part as complete, or removes it.
  void finish() {
    failures_.attempt([&] { complete_folder(folder_, text_); });
    if (!failures_.failed()) return;
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

 private:
  void open_next() {
    hash_ = {};
    if (!ended()) file_.emplace(path());
  }

  std::optional<OutputFile> file_;
  Hash64 hash_;
};

/// Starts what is taken, then what is given, and waits for both.
template <typename Take, typename Give>
void at_once(std::optional<Taking>& taking, std::optional<Giving>& giving, const Take& take,
             const Give& give) {
  Pending coming = taking ? take(*taking) : Pending();
  Pending going = giving ? give(*giving) : Pending();
  coming.wait();
  going.wait();
}

}  // namespace

void exchange_parts(Communicator& world, const std::optional<GivenPart>& given,
                    const std::optional<TakenPart>& taken) {
  std::optional<Giving> giving;
  std::optional<Taking> taking;
  if (given) giving.emplace(world, *given);
  if (taken) taking.emplace(world, *taken);
  at_once(
      taking, giving, [](Taking& part) { return part.take_length(); },
      [](Giving& part) { return part.give_length(); });
  at_once(
      taking, giving, [](Taking& part) { return part.take_text(); },
      [](Giving& part) { return part.give_text(); });
  if (taking) taking->begin();
  for (;;) {
    const bool takes = taking && !taking->ended();
    if (!takes && (!giving || giving->ended())) break;
    at_once(
        taking, giving, [](Taking& part) { return part.ended() ? Pending() : part.take_next(); },
        [](Giving& part) { return part.ended() ? Pending() : part.give_next(); });
    if (takes) taking->write();
  }
  if (taking) taking->finish();
  if (giving) giving->failures().rethrow();
  if (taking) taking->failures().rethrow();
}

}  // namespace tessera
