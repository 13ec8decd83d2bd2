#include "data/file_identity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class FileIdentity : public testing::Test {
 protected:
  FileIdentity() { fs::create_directories(folder_); }
  ~FileIdentity() override { fs::remove_all(folder_); }

  fs::path write(const std::string& name, const std::string& content) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return folder_ / name;
  }
  static std::string identify(const std::vector<fs::path>& files) { return identify_files(files); }

  const fs::path folder_ = fs::path(testing::TempDir()) / unique_name("file_identity-");
};

TEST_F(FileIdentity, CopiesAreAlike) {
  const fs::path a = write("a/x", "some text");
  const fs::path b = write("b/x", "some text");
  fs::last_write_time(b, fs::file_time_type::clock::now() - std::chrono::hours(5));
  EXPECT_EQ(identify({a}), identify({b}));
  EXPECT_EQ(identify({a, write("a/y", "")}), identify({b, write("b/y", "")}));
  EXPECT_THAT(identify({a}), testing::StartsWith("1 file of 9 bytes with hash "));
}

TEST_F(FileIdentity, ContentSizeOrderAndNamesCount) {
  const fs::path a = write("a", "some text");
  EXPECT_NE(identify({a}), identify({write("b", "some test")}));
  EXPECT_NE(identify({a}), identify({write("c", "some text.")}));
  EXPECT_NE(identify({a, write("d", "")}), identify({a, write("e", "")}));
  EXPECT_NE(identify({a, write("d", "")}), identify({folder_ / "d", a}));
  EXPECT_EQ(identify({}), identify({}));
}

/// Of a large file a sample counts: its first and last bytes, and others between.
TEST_F(FileIdentity, LargeFilesAreSampled) {
  std::string content(40 << 20, 'x');
  const std::string before = identify({write("a", content)});
  for (const size_t place : {size_t{0}, content.size() - 1}) {
    std::string other = content;
    other[place] = 'y';
    EXPECT_NE(identify({write("a", other)}), before) << place;
  }
  for (size_t i = content.size() / 3; i < content.size() / 2; ++i) content[i] = 'y';
  EXPECT_NE(identify({write("a", content)}), before);
}

TEST_F(FileIdentity, ManyFilesAreAllCounted) {
  std::vector<fs::path> files;
  for (int i = 0; i < 600; ++i) files.push_back(write(std::to_string(i), "text"));
  const std::string before = identify(files);
  write("333", "texts");
  EXPECT_NE(identify(files), before);
}

TEST_F(FileIdentity, AMissingFileIsNamed) {
  try {
    identify({folder_ / "nothing"});
    FAIL();
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("nothing: No such file"));
  }
}

}  // namespace
}  // namespace tessera
