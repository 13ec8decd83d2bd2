#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/checkpoint_testing.h"
#include "checkpoint/layout.h"
#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t num_bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{num_bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  sighandler_t handler_;
};

TEST_F(CheckpointTest, AFailedWriteAtAnySizeLeavesTheOthers) {
  save(1);
  // The largest file is the manifest; a limit below its size fails the save in one file or another.
  const auto largest =
      static_cast<rlim_t>(fs::file_size(root_ / "step-00000001" / "manifest.json"));
  for (rlim_t limit = 0; limit < largest; limit += 37) {
    const FileSizeLimit limited(limit);
    EXPECT_THAT([&] { save(2); },
                ThrowsMessage<UserError>(AllOf(HasSubstr("step 2 not saved"), HasSubstr("write"),
                                               HasSubstr("limit on the size"))));
    ASSERT_THAT(root_names(), ElementsAre("latest", "step-00000001"));
  }
  expect_loads(*find_latest(root_).path);
}

/// Mounts a file system of 1 MiB in a mount namespace of this process. False where that is not
/// allowed.
bool mount_small_disk(const fs::path& folder) {
  if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  return ::mount("none", folder.c_str(), "tmpfs", 0, "size=1m") == 0;
}

constexpr int kNotAllowed = 77;

/// Runs in a process of its own: saves on a small disk until it is full. The exit code: 0 when the
/// message is right and the earlier checkpoint loads.
int fill_small_disk(const fs::path& root) {
  if (!mount_small_disk(root)) return kNotAllowed;
  RandomTensors tensors(1);
  tensors.add("w", DType::kU8, {600'000});
  save_checkpoint(root, {.step = 1, .model = tensors.named()});
  try {
    save_checkpoint(root, {.step = 2, .model = tensors.named()});
    return 2;
  } catch (const UserError& error) {
    const std::string message = error.what();
    if (message.find("disk or quota is full") == std::string::npos) return 3;
  }
  const OwnedTensor loaded(DType::kU8, {600'000});
  CheckpointReader(*find_latest(root).path).load_into("w", loaded);
  if (!same_bits(loaded, tensors.named()[0].tensor)) return 4;
  return list_prefixed(root, ".tmp").empty() ? 0 : 5;
}

TEST_F(CheckpointTest, AFullDiskLeavesTheOthers) {
  make_folder(root_);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(fill_small_disk(root_));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "mounting is not allowed here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace tessera
