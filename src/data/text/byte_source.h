#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

namespace tessera {

/// The ending of a name, with its dot, in small letters: some systems write them large.
std::string lower_extension(const std::filesystem::path& path);

/// How a file is compressed; its name's ending says so: .gz, .zst or .xz.
enum class FileCompression { kNone, kGzip, kZstd, kXz };

FileCompression compression_of(const std::filesystem::path& path);

/// The content of a file from start to end, decompressed. Errors of the file, of its compression
/// (damage, an end in the middle) and of the system are UserErrors with the file's name.
class ByteSource {
 public:
  ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;
  virtual ~ByteSource() = default;

  /// Fills `bytes`; gives fewer only at the end of the content.
  virtual size_t read(std::span<std::byte> bytes) = 0;
  /// Passes over the next `num_bytes` bytes of the content. Throws UserError where it is shorter.
  virtual void skip(int64_t num_bytes) = 0;
  /// Bytes of the file taken so far, as they lie on the disk.
  virtual int64_t file_position() const = 0;
};

/// Opens a file by the ending of its name. Files of several compressed parts one after the other
/// are read as one.
std::unique_ptr<ByteSource> open_byte_source(const std::filesystem::path& path);

}  // namespace tessera
