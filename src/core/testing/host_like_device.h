#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "core/device.h"

namespace tessera::testing {

/// A device that is the host in all that a test does not change.
class HostLikeDevice : public Device {
 public:
  bool is_host() const override { return true; }
  std::byte* allocate(int64_t num_bytes) override { return host_device().allocate(num_bytes); }
  void release(std::byte* data, int64_t num_bytes) noexcept override {
    host_device().release(data, num_bytes);
  }
  void copy(void* to, const void* from, int64_t num_bytes) override {
    host_device().copy(to, from, num_bytes);
  }
  void zero(void* data, int64_t num_bytes) override { host_device().zero(data, num_bytes); }
  void synchronize() override {}
  Mark mark() override { return host_device().mark(); }
  void when_known(Mark begin, Mark end, std::function<void(Time, Time)> use) override {
    host_device().when_known(begin, end, std::move(use));
  }
  int64_t used_bytes() const override { return host_device().used_bytes(); }
};

}  // namespace tessera::testing
