#include "data/text/byte_source.h"

#include "data/data_testing.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

struct Codec {
  std::string extension;
  std::string (*compress)(const std::string&);
};
const std::vector<Codec> kCodecs = {{".gz", gzip}, {".zst", zstd}, {".xz", xz}};

class ByteSourceTest : public DataTest {
 protected:
  /// Everything from `skipped` on, read in pieces of random size.
  std::string read(const std::string& name, int64_t skipped = 0) {
    const auto source = open_byte_source(path(name));
    if (skipped > 0) source->skip(skipped);
    std::string text;
    for (;;) {
      std::string piece(1 + random_.next_below(random_.next_below(2) == 0 ? 10 : 100'000), '\0');
      const size_t count = source->read(std::as_writable_bytes(std::span(piece)));
      text += piece.substr(0, count);
      EXPECT_LE(source->file_position(),
                static_cast<int64_t>(std::filesystem::file_size(path(name))));
      if (count < piece.size()) break;
    }
    EXPECT_EQ(source->file_position(),
              static_cast<int64_t>(std::filesystem::file_size(path(name))));
    return text;
  }

  Random random_{3, 0};
};

TEST_F(ByteSourceTest, PlainFilesAreReadAsTheyStand) {
  for (const size_t size : {0, 1, 1000, 300'000}) {
    const std::string text = random_text(random_, size);
    write("a.txt", text);
    EXPECT_EQ(read("a.txt"), text);
    const auto skipped = static_cast<int64_t>(text.size() / 3);
    EXPECT_EQ(read("a.txt", skipped), text.substr(text.size() / 3));
  }
}

TEST_F(ByteSourceTest, CompressedFilesAreDecompressed) {
  for (const Codec& codec : kCodecs) {
    for (const size_t size : {0, 1, 1000, 300'000}) {
      const std::string text = random_text(random_, size);
      const std::string name = "a.txt" + codec.extension;
      write(name, codec.compress(text));
      EXPECT_EQ(read(name), text) << name;
      const auto skipped = static_cast<int64_t>(text.size() / 3);
      EXPECT_EQ(read(name, skipped), text.substr(text.size() / 3)) << name;
    }
  }
}

TEST_F(ByteSourceTest, PartsOneAfterTheOtherAreOneFile) {
  for (const Codec& codec : kCodecs) {
    const std::string name = "a" + codec.extension;
    write(name, codec.compress("one ") + codec.compress("") + codec.compress("two"));
    EXPECT_EQ(read(name), "one two") << name;
  }
}

TEST_F(ByteSourceTest, TruncationAndDamageAreNamed) {
  const std::string text = random_text(random_, 50'000);
  for (const Codec& codec : kCodecs) {
    const std::string name = "a" + codec.extension;
    const std::string packed = codec.compress(text);
    for (const size_t size :
         {size_t{0}, size_t{1}, size_t{9}, packed.size() / 2, packed.size() - 1}) {
      write(name, packed.substr(0, size));
      EXPECT_THAT(error_of([&] { read(name); }), HasSubstr(path(name))) << size;
    }
    write(name, packed.substr(0, packed.size() / 2));
    EXPECT_THAT(error_of([&] { read(name); }),
                HasSubstr("ends in the middle of its compressed data"));
    write(name, packed + "garbage");
    EXPECT_THAT(error_of([&] { read(name); }), HasSubstr("its compressed data"));
    write(name, text);
    EXPECT_THAT(error_of([&] { read(name); }), HasSubstr("damaged"));
    int refused = 0;
    for (int round = 0; round < 20; ++round) {
      std::string damaged = packed;
      damaged[random_.next_below(damaged.size())] ^= static_cast<char>(1 + random_.next_below(255));
      write(name, damaged);
      // zstd's frames have no checksum by default; the others find every change but in the header.
      refused += error_of([&] { read(name); }).empty() ? 0 : 1;
    }
    EXPECT_GE(refused, codec.extension == ".zst" ? 0 : 18) << name;
  }
}

TEST_F(ByteSourceTest, RefusesWhatIsNoFile) {
  EXPECT_THROW(open_byte_source(path("none.gz")), UserError);
  EXPECT_THROW(open_byte_source(path(".")), UserError);
  write("short.txt", "abc");
  EXPECT_THROW(open_byte_source(path("short.txt"))->skip(4), UserError);
  write("short.gz", gzip("abc"));
  EXPECT_THROW(open_byte_source(path("short.gz"))->skip(4), UserError);
}

}  // namespace
}  // namespace tessera
