#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lzma.h>
#include <zlib.h>
#include <zstd.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/file/file.h"
#include "core/random.h"
#include "data/token_file.h"
#include "data/token_file_writer.h"

namespace tessera {

/// A test with a folder of its own.
class DataTest : public ::testing::Test {
 protected:
  DataTest() { std::filesystem::create_directories(folder_); }
  ~DataTest() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((folder_ / name).parent_path());
    write_file_synced(path(name), text);
    return path(name);
  }

 private:
  std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) / unique_name("data_test-");
};

/// The message of the UserError that the action throws, or "".
inline std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

inline std::string gzip(const std::string& text) {
  z_stream stream{};
  deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string packed(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

inline std::string zstd(const std::string& text) {
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 3));
  return packed;
}

inline std::string xz(const std::string& text) {
  std::string packed(lzma_stream_buffer_bound(text.size()), '\0');
  size_t size = 0;
  EXPECT_EQ(lzma_easy_buffer_encode(
                1, LZMA_CHECK_CRC64, nullptr, reinterpret_cast<const uint8_t*>(text.data()),
                text.size(), reinterpret_cast<uint8_t*>(packed.data()), &size, packed.size()),
            LZMA_OK);
  packed.resize(size);
  return packed;
}

/// Words and lines, some of them with characters of several bytes.
inline std::string random_text(Random& random, size_t num_bytes) {
  const std::vector<std::string> words = {"a",    "the", "river", "\xC3\xA9t\xC3\xA9", "\n",
                                          "\n\n", " ",   "x1",    "\xE6\xB0\xB4",      "1234",
                                          ".",    "\r\n"};
  std::string text;
  while (text.size() < num_bytes) text += words[random.next_below(words.size())] + " ";
  return text;
}

inline std::vector<int32_t> read_ids(const TokenFile& file) {
  std::vector<int32_t> ids(file.num_tokens());
  file.read(0, ids);
  return ids;
}

}  // namespace tessera
