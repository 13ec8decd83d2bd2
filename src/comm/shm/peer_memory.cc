#include "comm/shm/peer_memory.h"

#include <poll.h>
#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "comm/copy.h"

namespace tessera {

PeerMemory::PeerMemory(int64_t pid, FileDescriptor process)
    : pid_(pid), process_(std::move(process)) {}

PeerMemory::Outcome PeerMemory::read_slice(uint64_t address, std::byte* to, int64_t bytes) const {
  while (bytes > 0) {
    const iovec here{to, static_cast<size_t>(bytes)};
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address of another process
    const iovec there{reinterpret_cast<void*>(address), static_cast<size_t>(bytes)};
    const ssize_t count = process_vm_readv(static_cast<pid_t>(pid_), &here, 1, &there, 1, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return errno == ESRCH ? Outcome::kGone : Outcome::kRefused;
    to += count;
    address += static_cast<uint64_t>(count);
    bytes -= count;
  }
  return Outcome::kRead;
}

PeerMemory::Outcome PeerMemory::read(uint64_t address, void* to, int64_t bytes) const {
  const int64_t slices = num_copy_slices(bytes);
  std::atomic<Outcome> outcome = Outcome::kRead;
  std::atomic<int> error = 0;
#pragma omp parallel for schedule(static) if (slices > 1)
  for (int64_t i = 0; i < slices; ++i) {
    const int64_t begin = copy_slice_begin(bytes, slices, i);
    const int64_t end = copy_slice_begin(bytes, slices, i + 1);
    const Outcome part = read_slice(address + static_cast<uint64_t>(begin),
                                    static_cast<std::byte*>(to) + begin, end - begin);
    if (part == Outcome::kRead) continue;
    error = errno;
    outcome = part;
  }
  errno = error;
  // The number could be another process's by now.
  return has_ended() ? Outcome::kGone : outcome.load();
}

bool PeerMemory::has_ended() const {
  pollfd state{process_.get(), POLLIN, 0};
  return poll(&state, 1, 0) > 0;
}

}  // namespace tessera
