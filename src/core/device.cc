#include "core/device.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "core/limits.h"
#include "core/memory.h"

namespace tessera {
namespace {

constexpr int64_t kMapThreshold = 1 << 20;

std::byte* map_memory(int64_t num_bytes) {
  void* memory =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, num_bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
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
  int64_t used_bytes() const override { return process_memory().peak; }
  std::string describe_memory() const override { return describe_memory_limit(); }
};

/// Copies in the device's own order.
class DirectLane final : public CopyLane {
 public:
  explicit DirectLane(Device& device) : device_(device) {}
  Ticket give(void* to, const void* from, int64_t num_bytes) override {
    device_.copy(to, from, num_bytes);
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
