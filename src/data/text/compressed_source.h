#pragma once

#include <filesystem>
#include <memory>

#include "data/text/byte_source.h"

namespace tessera {

/// Decompressing sources (zlib, libzstd, liblzma), whatever the file's name. Each part's own
/// checksum is verified.
std::unique_ptr<ByteSource> open_gzip(const std::filesystem::path& path);
std::unique_ptr<ByteSource> open_zstd(const std::filesystem::path& path);
std::unique_ptr<ByteSource> open_xz(const std::filesystem::path& path);

}  // namespace tessera
