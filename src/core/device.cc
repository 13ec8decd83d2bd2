#include "core/device.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "core/limits.h"
#include "core/memory.h"

namespace tessera {
namespace {

constexpr int64_t kMapThreshold = 1 << 20;
constexpr int64_t kHugePage = 2 << 20;

std::byte* map_memory(int64_t num_bytes) {
  void* memory =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, num_bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}

/// Addresses that nobody can touch yet, aligned to `alignment`.
std::byte* reserve_memory(int64_t num_bytes, int64_t alignment) {
  const int64_t all = num_bytes + alignment;
  void* const memory =
      ::mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(memory);
  const int64_t before =
      align_up(reinterpret_cast<int64_t>(begin), alignment) - reinterpret_cast<int64_t>(begin);
  if (before > 0) ::munmap(begin, before);
  ::munmap(begin + before + num_bytes, alignment - before);
  ::madvise(begin + before, num_bytes, MADV_HUGEPAGE);
  return begin + before;
}

/// Large blocks are mapped directly and returned to the system when released.
class HostDevice final : public Device {
 public:
  std::string name() const override { return "cpu"; }
  bool is_host() const override { return true; }

  std::byte* allocate(int64_t num_bytes) override {
    if (num_bytes >= kMapThreshold) return map_memory(num_bytes);
    void* memory = std::aligned_alloc(kAlignment, align_up(num_bytes));
    if (memory != nullptr) std::memset(memory, 0, num_bytes);
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* data, int64_t num_bytes) noexcept override {
    if (num_bytes >= kMapThreshold) {
      munmap(data, num_bytes);
    } else {
      std::free(data);
    }
  }
  int64_t page_bytes() const override { return kHugePage; }
  std::byte* reserve(int64_t num_bytes) override { return reserve_memory(num_bytes, kHugePage); }
  bool commit(std::byte* pages, int64_t num_bytes) override {
    return ::mprotect(pages, num_bytes, PROT_READ | PROT_WRITE) == 0;
  }
  void decommit(std::byte* pages, int64_t num_bytes) override {
    const bool done = ::madvise(pages, num_bytes, MADV_DONTNEED) == 0 &&
                      ::mprotect(pages, num_bytes, PROT_NONE) == 0;
    ensure(done, "memory could not be given back: {}", std::strerror(errno));
  }
  void release_reserved(std::byte* data, int64_t num_bytes) noexcept override {
    ::munmap(data, num_bytes);
  }
  void copy(void* to, const void* from, int64_t num_bytes) override {
    if (num_bytes > 0) std::memcpy(to, from, num_bytes);
  }
  void zero(void* data, int64_t num_bytes) override {
    if (num_bytes > 0) std::memset(data, 0, num_bytes);
  }
  void synchronize() override {}
  Mark mark() override {
    return static_cast<Mark>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  void when_known(Mark begin, Mark end, std::function<void(Time, Time)> use) override {
    const auto time = [](Mark mark) {
      return Time(Time::duration(static_cast<Time::duration::rep>(mark)));
    };
    use(time(begin), time(end));
  }
  int64_t used_bytes() const override { return process_memory().held(); }
  std::string describe_memory() const override { return describe_memory_limit(); }
};

/// Copies in the device's own order.
class DirectLane final : public CopyLane {
 public:
  explicit DirectLane(Device& device) : device_(device) {}
  Ticket give_parts(std::span<const Part> parts) override {
    for (const Part& part : parts) device_.copy(part.to, part.from, part.num_bytes);
    return 0;
  }
  Ticket give_work(std::function<void()> work) override {
    work();
    return 0;
  }
  void join(Ticket /*copy*/) override {}

 private:
  Device& device_;
};

}  // namespace

std::unique_ptr<CopyLane> Device::make_copy_lane() {
  return std::make_unique<DirectLane>(*this);
}

Device& host_device() {
  static HostDevice device;
  return device;
}

}  // namespace tessera
