#include "core/file/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class FileTest : public ::testing::Test {
 protected:
  FileTest() { make_folder(folder_); }
  ~FileTest() override { remove_path(folder_); }

  const fs::path folder_ = fs::path(::testing::TempDir()) / unique_name("file_test-");
};

TEST_F(FileTest, WritesAndReadsBack) {
  OutputFile file(folder_ / "a");
  file.write("one ");
  file.write("");
  file.write("two");
  EXPECT_EQ(file.num_bytes(), 7);
  file.sync();
  file.close();
  EXPECT_EQ(read_text_file(folder_ / "a"), "one two");
  EXPECT_EQ(MappedFile(folder_ / "a").num_bytes(), 7);
}

TEST_F(FileTest, MapsAnEmptyFile) {
  write_file_synced(folder_ / "empty", "");
  EXPECT_EQ(MappedFile(folder_ / "empty").num_bytes(), 0);
  EXPECT_EQ(read_text_file(folder_ / "empty"), "");
}

TEST_F(FileTest, MovesAMapping) {
  write_file_synced(folder_ / "a", "text");
  MappedFile first(folder_ / "a");
  MappedFile second(std::move(first));
  EXPECT_EQ(second.num_bytes(), 4);
  first = std::move(second);
  EXPECT_EQ(first.num_bytes(), 4);
}

TEST_F(FileTest, NamesPathAndReason) {
  const auto message = [](const char* path, const char* reason) {
    return ThrowsMessage<UserError>(AllOf(HasSubstr(path), HasSubstr(reason)));
  };
  EXPECT_THAT([&] { MappedFile(folder_ / "absent"); }, message("absent", "No such file"));
  EXPECT_THAT([&] { MappedFile{folder_}; }, message("file_test-", "it is a folder"));
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_THAT([&] { MappedFile(folder_ / "pipe"); }, message("pipe", "not a regular file"));
  EXPECT_THAT([&] { OutputFile(folder_ / "no" / "a"); }, message("no/a", "No such file"));
  write_file_synced(folder_ / "a", "12345");
  EXPECT_THAT([&] { read_text_file(folder_ / "a", 4); }, message("a is 5 bytes", "at most 4"));
}

TEST_F(FileTest, AFullDiskIsNamed) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  OutputFile file("/dev/full");
  EXPECT_THAT([&] { file.write("x"); },
              ThrowsMessage<UserError>(AllOf(HasSubstr("No space left"), HasSubstr("/dev/full"),
                                             HasSubstr("disk or quota is full"))));
}

TEST_F(FileTest, ReplacesInOneStep) {
  const fs::path path = folder_ / "a";
  replace_file(path, "old");
  replace_file(path, "new");
  EXPECT_EQ(read_text_file(path), "new");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
}

TEST_F(FileTest, AFailedReplacementKeepsTheOldFile) {
  fs::create_directory(folder_ / "a");
  EXPECT_THROW(replace_file(folder_ / "a", "new"), UserError);
  EXPECT_TRUE(fs::is_directory(folder_ / "a"));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
}

TEST_F(FileTest, MakesAndRemovesFolders) {
  make_folder(folder_ / "a" / "b");
  make_folder(folder_ / "a" / "b");
  write_file_synced(folder_ / "a" / "b" / "c", "x");
  fs::create_symlink(folder_ / "a", folder_ / "link");
  remove_path(folder_ / "link");
  EXPECT_TRUE(path_exists(folder_ / "a" / "b" / "c"));
  remove_path(folder_ / "a");
  remove_path(folder_ / "a");
  EXPECT_FALSE(path_exists(folder_ / "a"));
  write_file_synced(folder_ / "file", "x");
  EXPECT_THROW(make_folder(folder_ / "file" / "sub"), UserError);
}

TEST_F(FileTest, Exchanges) {
  write_file_synced(folder_ / "a", "A");
  write_file_synced(folder_ / "b", "B");
  if (!try_exchange_paths(folder_ / "a", folder_ / "b")) GTEST_SKIP() << "no swap of names here";
  EXPECT_EQ(read_text_file(folder_ / "a"), "B");
  EXPECT_EQ(read_text_file(folder_ / "b"), "A");
  EXPECT_THROW(try_exchange_paths(folder_ / "a", folder_ / "absent"), UserError);
}

TEST_F(FileTest, UniqueNamesDiffer) {
  std::set<std::string> names;
  for (int i = 0; i < 1000; ++i) names.insert(unique_name(".tmp-"));
  EXPECT_EQ(names.size(), 1000U);
  EXPECT_TRUE(names.begin()->starts_with(".tmp-"));
}

TEST_F(FileTest, AFolderIsLockedOnceAndFreedByDeath) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FolderLock lock(folder_);
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THAT([&] { FolderLock lock(folder_); },
              ThrowsMessage<UserError>(HasSubstr("another process is writing")));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(FolderLock(folder_).held());
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace tessera
