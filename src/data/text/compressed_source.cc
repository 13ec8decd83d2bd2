#include "data/text/compressed_source.h"

#include <lzma.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr size_t kInputBytes = 1 << 17;
/// A stream that would need more memory to be decompressed is refused: xz's own largest preset
/// takes 65 MiB, zstd --long=31 2 GiB.
constexpr int kMaxMemoryBits = 31;

/// What all decoders share: the compressed bytes at hand, and the loop around one step of decoding.
class CompressedSource : public ByteSource {
 public:
  explicit CompressedSource(const fs::path& path) : file_(path), buffer_(kInputBytes) {}

  size_t read(std::span<std::byte> bytes) final {
    size_t filled = 0;
    while (filled < bytes.size() && !ended_) {
      if (input_.empty()) refill();
      if (input_.empty() && between_parts_) {
        require(started_, "{} is empty; even a compressed nothing has a header", path());
        ended_ = true;
      } else {
        filled += step(bytes.subspan(filled));
      }
    }
    return filled;
  }

  void skip(int64_t num_bytes) final {
    std::vector<std::byte> passed(std::min<int64_t>(num_bytes, 1 << 20));
    while (num_bytes > 0) {
      const auto wanted = std::min<int64_t>(num_bytes, static_cast<int64_t>(passed.size()));
      const size_t count = read(std::span(passed).first(wanted));
      require(count > 0, "{} has become shorter", path());
      num_bytes -= static_cast<int64_t>(count);
    }
  }

  int64_t file_position() const final { return taken_ - static_cast<int64_t>(input_.size()); }

 protected:
  /// One call of the library.
  struct Step {
    size_t consumed = 0;
    size_t produced = 0;
    bool ends_part = false;
  };
  /// Decodes from `input` to `output`. `at_end`: no input follows.
  virtual Step decode(std::span<const std::byte> input, std::span<std::byte> output,
                      bool at_end) = 0;
  /// Makes ready for another part behind the one that has ended.
  virtual void restart() = 0;

  std::string path() const { return file_.path().string(); }
  [[noreturn]] void damaged(const std::string& reason) const {
    user_error("{}: its compressed data is damaged before byte {} ({})", path(), taken_, reason);
  }

 private:
  void refill() {
    const size_t count = file_.read(buffer_);
    input_ = std::span(buffer_).first(count);
    taken_ += static_cast<int64_t>(count);
    file_ended_ = count == 0;
  }

  size_t step(std::span<std::byte> output) {
    if (between_parts_ && started_) restart();
    started_ = true;
    between_parts_ = false;
    const Step step = decode(input_, output, file_ended_);
    input_ = input_.subspan(step.consumed);
    between_parts_ = step.ends_part;
    const bool stuck = step.consumed == 0 && step.produced == 0 && !step.ends_part;
    require(!(stuck && file_ended_),
            "{} ends in the middle of its compressed data, after {} bytes; copy or download it "
            "again",
            path(), taken_);
    return step.produced;
  }

  InputFile file_;
  std::vector<std::byte> buffer_;
  std::span<const std::byte> input_;
  int64_t taken_ = 0;
  bool file_ended_ = false;
  bool started_ = false;
  bool between_parts_ = true;
  bool ended_ = false;
};

class GzipSource final : public CompressedSource {
 public:
  explicit GzipSource(const fs::path& path) : CompressedSource(path) {
    constexpr int kGzipWindow = 15 + 16;  // the largest window, gzip's header and checksum
    ensure(inflateInit2(&stream_, kGzipWindow) == Z_OK, "zlib cannot start");
  }
  ~GzipSource() override { inflateEnd(&stream_); }

 private:
  Step decode(std::span<const std::byte> input, std::span<std::byte> output, bool) override {
    constexpr size_t kMost = size_t{1} << 30;  // zlib counts in 32 bits
    const size_t room = std::min(output.size(), kMost);
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(input.data()));
    stream_.avail_in = static_cast<uInt>(input.size());
    stream_.next_out = reinterpret_cast<Bytef*>(output.data());
    stream_.avail_out = static_cast<uInt>(room);
    const int code = inflate(&stream_, Z_NO_FLUSH);
    if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR) {
      damaged(stream_.msg != nullptr ? stream_.msg : "zlib error " + std::to_string(code));
    }
    return {input.size() - stream_.avail_in, room - stream_.avail_out, code == Z_STREAM_END};
  }
  void restart() override { inflateReset(&stream_); }

  z_stream stream_{};
};

class ZstdSource final : public CompressedSource {
 public:
  explicit ZstdSource(const fs::path& path)
      : CompressedSource(path), context_(ZSTD_createDCtx(), ZSTD_freeDCtx) {
    ensure(context_ != nullptr, "zstd cannot start");
    ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, kMaxMemoryBits);
  }

 private:
  Step decode(std::span<const std::byte> input, std::span<std::byte> output, bool) override {
    ZSTD_inBuffer in = {input.data(), input.size(), 0};
    ZSTD_outBuffer out = {output.data(), output.size(), 0};
    const size_t code = ZSTD_decompressStream(context_.get(), &out, &in);
    if (ZSTD_isError(code) != 0) damaged(ZSTD_getErrorName(code));
    return {in.pos, out.pos, code == 0};
  }
  void restart() override { ZSTD_DCtx_reset(context_.get(), ZSTD_reset_session_only); }

  std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context_;
};

class XzSource final : public CompressedSource {
 public:
  explicit XzSource(const fs::path& path) : CompressedSource(path) { start(); }
  ~XzSource() override { lzma_end(&stream_); }

 private:
  void start() {
    ensure(
        lzma_stream_decoder(&stream_, uint64_t{1} << kMaxMemoryBits, LZMA_CONCATENATED) == LZMA_OK,
        "liblzma cannot start");
  }
  Step decode(std::span<const std::byte> input, std::span<std::byte> output, bool at_end) override {
    stream_.next_in = reinterpret_cast<const uint8_t*>(input.data());
    stream_.avail_in = input.size();
    stream_.next_out = reinterpret_cast<uint8_t*>(output.data());
    stream_.avail_out = output.size();
    const lzma_ret code = lzma_code(&stream_, at_end ? LZMA_FINISH : LZMA_RUN);
    if (code != LZMA_OK && code != LZMA_STREAM_END && code != LZMA_BUF_ERROR) {
      damaged(describe(code));
    }
    return {input.size() - stream_.avail_in, output.size() - stream_.avail_out,
            code == LZMA_STREAM_END};
  }
  void restart() override { start(); }

  static std::string describe(lzma_ret code) {
    switch (code) {
      case LZMA_FORMAT_ERROR:
        return "not in xz format";
      case LZMA_DATA_ERROR:
        return "a checksum or block is wrong";
      case LZMA_OPTIONS_ERROR:
        return "unknown options";
      case LZMA_MEMLIMIT_ERROR:
        return "needs more than 2 GiB to be decompressed";
      case LZMA_MEM_ERROR:
        return "out of memory";
      default:
        return "liblzma error " + std::to_string(static_cast<int>(code));
    }
  }

  lzma_stream stream_ = LZMA_STREAM_INIT;
};

}  // namespace

std::unique_ptr<ByteSource> open_gzip(const fs::path& path) {
  return std::make_unique<GzipSource>(path);
}
std::unique_ptr<ByteSource> open_zstd(const fs::path& path) {
  return std::make_unique<ZstdSource>(path);
}
std::unique_ptr<ByteSource> open_xz(const fs::path& path) {
  return std::make_unique<XzSource>(path);
}

}  // namespace tessera
