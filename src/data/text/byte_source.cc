#include "data/text/byte_source.h"

#include "core/error.h"
#include "core/file/file.h"
#include "data/text/compressed_source.h"

namespace tessera {
namespace {

class PlainSource final : public ByteSource {
 public:
  explicit PlainSource(const std::filesystem::path& path) : file_(path) {}

  size_t read(std::span<std::byte> bytes) override {
    const size_t count = file_.read(bytes);
    position_ += static_cast<int64_t>(count);
    return count;
  }

  void skip(int64_t num_bytes) override {
    require(num_bytes <= file_.num_bytes() - position_, "{} has become shorter: it has {} bytes",
            file_.path().string(), file_.num_bytes());
    position_ += num_bytes;
    file_.seek(position_);
  }

  int64_t file_position() const override { return position_; }

 private:
  InputFile file_;
  int64_t position_ = 0;
};

}  // namespace

std::string lower_extension(const std::filesystem::path& path) {
  std::string extension = path.extension().string();
  for (char& c : extension) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return extension;
}

FileCompression compression_of(const std::filesystem::path& path) {
  const std::string extension = lower_extension(path);
  if (extension == ".gz") return FileCompression::kGzip;
  if (extension == ".zst") return FileCompression::kZstd;
  return extension == ".xz" ? FileCompression::kXz : FileCompression::kNone;
}

std::unique_ptr<ByteSource> open_byte_source(const std::filesystem::path& path) {
  switch (compression_of(path)) {
    case FileCompression::kGzip:
      return open_gzip(path);
    case FileCompression::kZstd:
      return open_zstd(path);
    case FileCompression::kXz:
      return open_xz(path);
    case FileCompression::kNone:
      break;
  }
  return std::make_unique<PlainSource>(path);
}

}  // namespace tessera
