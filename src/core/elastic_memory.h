#pragma once

#include <memory>
#include <string>

#include "core/device.h"
#include "core/page_set.h"

namespace tessera {

/// Owned addresses of a device, of which only the pages that were asked for have memory, so that
/// what is placed at its largest size takes no more than its actual one. Addresses never change;
/// pages stay until the object goes. The device must outlive it. Move-only.
class ElasticMemory {
  struct Release {
    Device* device;
    int64_t num_bytes;
    bool by_page;
    void operator()(std::byte* data) const noexcept;
  };

 public:
  ElasticMemory() = default;
  /// All at once, or page by page, for which the device must have pages. `purpose` names the memory
  /// in errors. Throws OutOfMemory where there is not as much, or not as many addresses.
  enum class Kind : uint8_t { kWhole, kByPage };
  ElasticMemory(Kind kind, int64_t num_bytes, std::string purpose, Device& device);
  ElasticMemory(ElasticMemory&& other) noexcept = default;
  ElasticMemory& operator=(ElasticMemory&& other) noexcept = default;
  ElasticMemory(const ElasticMemory&) = delete;
  ElasticMemory& operator=(const ElasticMemory&) = delete;
  ~ElasticMemory() = default;

  std::byte* data() const { return addresses_.get(); }
  /// Of addresses.
  int64_t num_bytes() const { return num_bytes_; }
  bool is_by_page() const { return pages_ != nullptr; }
  /// Of memory.
  int64_t committed_bytes() const;
  bool contains(const std::byte* address) const {
    return address >= data() && address < data() + num_bytes_;
  }
  /// Gives memory, of undefined content, to the offsets [begin, end) where they have none. What has
  /// memory keeps it, and the device's work goes on. Throws OutOfMemory.
  void commit(int64_t begin, int64_t end);

 private:
  std::unique_ptr<std::byte, Release> addresses_{nullptr, Release{}};
  int64_t num_bytes_ = 0;
  std::string purpose_;
  std::unique_ptr<PageSet> pages_;  // null where all has memory
};

}  // namespace tessera
