#include "core/file/output_path.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class OutputPath : public ::testing::Test {
 protected:
  OutputPath() { make_folder(folder_); }
  ~OutputPath() override {
    fs::permissions(folder_, fs::perms::owner_all);
    remove_path(folder_);
  }

  static std::string refusal(const fs::path& path) {
    try {
      check_output_path("--html", path);
      return "";
    } catch (const UserError& error) {
      return error.what();
    }
  }
  int64_t num_files() const { return std::distance(fs::directory_iterator(folder_), {}); }

  const fs::path folder_ = fs::path(::testing::TempDir()) / unique_name("output_path_test-");
};

TEST_F(OutputPath, ThatCanBeWrittenIsLeftAsItIs) {
  EXPECT_EQ(refusal(folder_ / "new"), "");
  EXPECT_EQ(num_files(), 0);
  write_file_synced(folder_ / "old", "text");
  EXPECT_EQ(refusal(folder_ / "old"), "");
  EXPECT_EQ(read_text_file(folder_ / "old"), "text");
  EXPECT_EQ(num_files(), 1);
  EXPECT_EQ(refusal("/dev/null"), "");
}

TEST_F(OutputPath, ThatIsNoFilesIsRefused) {
  EXPECT_EQ(
      refusal(folder_),
      fmt::format("--html: cannot write {}: it is a folder; name a file in it", folder_.string()));
  EXPECT_THAT(refusal(folder_ / ""), HasSubstr("it is a folder"));
  EXPECT_THAT(refusal(folder_ / "none" / ""), HasSubstr("it is a folder"));
  EXPECT_THAT(refusal(folder_ / "none" / "a"),
              HasSubstr("there is no folder " + (folder_ / "none").string()));
  write_file_synced(folder_ / "file", "");
  EXPECT_THAT(refusal(folder_ / "file" / "a"), HasSubstr("file is not a folder"));
  EXPECT_THAT(refusal(folder_ / std::string(300, 'a')), HasSubstr("File name too long"));
  EXPECT_EQ(num_files(), 1);
}

TEST_F(OutputPath, OfAPipeIsWrittenToAndNotReplaced) {
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  const FileDescriptor reader(::open((folder_ / "pipe").c_str(), O_RDONLY | O_NONBLOCK));
  replace_file(folder_ / "pipe", "text");
  EXPECT_TRUE(fs::is_fifo(folder_ / "pipe"));
  char found[8] = {};
  EXPECT_EQ(::read(reader.get(), found, sizeof(found)), 4);
  EXPECT_STREQ(found, "text");
}

TEST_F(OutputPath, ThatIsClosedIsRefused) {
  if (::geteuid() == 0) GTEST_SKIP() << "nothing is closed to root";
  write_file_synced(folder_ / "file", "");
  fs::permissions(folder_ / "file", fs::perms::owner_read);
  EXPECT_THAT(refusal(folder_ / "file"), HasSubstr("Permission denied"));
  fs::permissions(folder_, fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_THAT(refusal(folder_ / "new"), HasSubstr("Permission denied"));
}

TEST_F(OutputPath, OfAReadOnlyDiskIsRefused) {
  if (!fs::exists("/proc/self")) GTEST_SKIP() << "no /proc";
  EXPECT_THAT(refusal("/proc/self/new"), HasSubstr("cannot write /proc/self/new"));
}

}  // namespace
}  // namespace tessera
