#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "core/memory.h"

namespace tessera::testing {

/// A device without hardware: its own memory has addresses that the host cannot read or write, so
/// whoever takes a device's tensor for the host's is ended on the spot.
class HiddenDevice final : public Device {
 public:
  std::string name() const override { return "hidden"; }
  bool is_host() const override { return false; }
  std::byte* allocate(int64_t num_bytes) override {
    return flip(host_device().allocate(num_bytes), true);
  }
  void release(std::byte* data, int64_t num_bytes) noexcept override {
    host_device().release(flip(data, false), num_bytes);
  }
  std::byte* allocate_shared(int64_t num_bytes) override {
    return host_device().allocate(num_bytes);
  }
  void release_shared(std::byte* data, int64_t num_bytes) noexcept override {
    host_device().release(data, num_bytes);
  }
  void copy(void* to, const void* from, int64_t num_bytes) override {
    host_device().copy(flip(to, false), flip(const_cast<void*>(from), false), num_bytes);
  }
  void zero(void* data, int64_t num_bytes) override {
    host_device().zero(flip(data, false), num_bytes);
  }
  void synchronize() override {}
  Mark mark() override { return host_device().mark(); }
  void when_known(Mark begin, Mark end, std::function<void(Time, Time)> use) override {
    host_device().when_known(begin, end, std::move(use));
  }
  int64_t used_bytes() const override { return 0; }

 private:
  /// The processor takes no address with this bit alone among its highest.
  static constexpr uintptr_t kHidden = uintptr_t{1} << 60;

  static std::byte* flip(void* address, bool hidden) {
    const auto value = reinterpret_cast<uintptr_t>(address);
    if (value == 0) return nullptr;
    return reinterpret_cast<std::byte*>(hidden ? value | kHidden : value & ~kHidden);
  }
};

/// A copy in the device's memory.
inline OwnedTensor copy_to_device(const Tensor& host, Device& device) {
  OwnedTensor copy(host.dtype, host.shape, "a copy", device);
  device.copy(copy.get().data, host.data, host.num_bytes());
  return copy;
}

}  // namespace tessera::testing
