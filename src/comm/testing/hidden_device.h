#pragma once

#include <cstddef>
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
    return hide(host_device().allocate(num_bytes));
  }
  void release(std::byte* data, int64_t num_bytes) noexcept override {
    host_device().release(find(data), num_bytes);
  }
  std::byte* allocate_shared(int64_t num_bytes) override {
    return host_device().allocate(num_bytes);
  }
  void release_shared(std::byte* data, int64_t num_bytes) noexcept override {
    host_device().release(data, num_bytes);
  }
  void copy(void* to, const void* from, int64_t num_bytes) override {
    host_device().copy(find(static_cast<std::byte*>(to)), find(static_cast<const std::byte*>(from)),
                       num_bytes);
  }
  void zero(void* data, int64_t num_bytes) override {
    host_device().zero(find(static_cast<std::byte*>(data)), num_bytes);
  }
  void synchronize() override {}
  Mark mark() override { return host_device().mark(); }
  void when_known(Mark begin, Mark end, std::function<void(Time, Time)> use) override {
    host_device().when_known(begin, end, std::move(use));
  }
  int64_t used_bytes() const override { return 0; }

 private:
  /// The processor takes no address with this bit alone among its highest.
  static constexpr ptrdiff_t kHidden = ptrdiff_t{1} << 60;

  static std::byte* hide(std::byte* data) { return data == nullptr ? nullptr : data + kHidden; }
  /// Where the memory is, hidden or not.
  template <typename T>
  static T* find(T* data) {
    const bool hidden = (reinterpret_cast<uintptr_t>(data) & uintptr_t{kHidden}) != 0;
    return hidden ? data - kHidden : data;
  }
};

/// A copy in the device's memory.
inline OwnedTensor copy_to_device(const Tensor& host, Device& device) {
  OwnedTensor copy(host.dtype, host.shape, "a copy", device);
  device.copy(copy.get().data, host.data, host.num_bytes());
  return copy;
}

}  // namespace tessera::testing
