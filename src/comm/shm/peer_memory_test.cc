#include "comm/shm/peer_memory.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <vector>

namespace tessera {
namespace {

using Bytes = std::vector<uint8_t>;

/// A child that has what this process had when it was started, until it is killed.
class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ > 0) return;
    while (true) pause();
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  PeerMemory memory() const {
    return {pid_, FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)))};
  }
  void end() {
    if (ended_) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    ended_ = true;
  }

 private:
  pid_t pid_;
  bool ended_ = false;
};

TEST(PeerMemory, IsReadAsItIsThere) {
  Bytes theirs((5 << 20) + 3);
  for (size_t i = 0; i < theirs.size(); ++i) theirs[i] = static_cast<uint8_t>(i % 253);
  const Bytes expected = theirs;
  const Child child;
  std::ranges::fill(theirs, 0);  // here, not in the child
  const PeerMemory memory = child.memory();
  for (const int64_t bytes : {int64_t{1}, int64_t{4097}, std::ssize(theirs) - 5}) {
    Bytes read(static_cast<size_t>(bytes));
    const auto address = reinterpret_cast<uint64_t>(theirs.data()) + 5;
    EXPECT_EQ(memory.read(address, read.data(), bytes), PeerMemory::Outcome::kRead);
    EXPECT_TRUE(std::equal(read.begin(), read.end(), expected.begin() + 5)) << bytes;
  }
  EXPECT_FALSE(memory.has_ended());
}

TEST(PeerMemory, OfAnEndedProcessIsGone) {
  const int value = 7;
  Child child;
  const PeerMemory memory = child.memory();
  child.end();
  int read = 0;
  EXPECT_EQ(memory.read(reinterpret_cast<uint64_t>(&value), &read, sizeof(read)),
            PeerMemory::Outcome::kGone);
  EXPECT_TRUE(memory.has_ended());
}

TEST(PeerMemory, OfAnAddressWithoutMemoryIsRefused) {
  const Child child;
  int read = 0;
  EXPECT_EQ(child.memory().read(64, &read, sizeof(read)), PeerMemory::Outcome::kRefused);
  EXPECT_EQ(errno, EFAULT);
}

}  // namespace
}  // namespace tessera
