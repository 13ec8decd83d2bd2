#include "core/process/lost_page.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class LostPages : public ::testing::Test {
 protected:
  LostPages() { fs::create_directories(folder_); }
  ~LostPages() override { fs::remove_all(folder_); }

  const fs::path folder_ = fs::temp_directory_path() / unique_name("lost page ");
};

TEST_F(LostPages, AreToldWithTheFilesName) {
  const fs::path path = folder_ / "tokens.bin";
  std::ofstream(path) << std::string(1 << 16, 'x');
  EXPECT_EXIT(
      {
        const LostPageMessage message;
        const MappedFile file(path);
        fs::resize_file(path, 100);
        volatile auto byte = file.bytes()[1 << 15];
        static_cast<void>(byte);
      },
      ::testing::ExitedWithCode(2), "tessera: cannot read .*lost page .*tokens.bin: it was cut");
}

TEST_F(LostPages, OtherMemoryEndsTheProcessAsBefore) {
  EXPECT_EXIT(
      {
        const LostPageMessage message;
        ::raise(SIGBUS);
      },
      ::testing::KilledBySignal(SIGBUS), "^$");
}

}  // namespace
}  // namespace tessera
