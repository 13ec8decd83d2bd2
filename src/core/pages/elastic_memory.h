#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/pages/page_ledger.h"

namespace tessera {

/// Owned addresses of a device, of which only the pages that were asked for have memory, so that
/// what is placed at its largest size takes no more than its actual one. Addresses never change;
/// pages stay until they are taken back. The device must outlive it. Move-only.
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
  using Piece = PageLedger::Piece;
  /// Gives memory, of undefined content, to the offsets [begin, end) where they have none. What has
  /// memory keeps it, and the device's work goes on. Throws OutOfMemory.
  void commit(int64_t begin, int64_t end);
  /// The same in two steps: says that the offsets are needed and returns what of them has no
  /// memory; then gives a piece of that memory, false where there is none.
  std::vector<Piece> need(int64_t begin, int64_t end);
  bool give(const Piece& piece);
  /// What has memory now stays. What comes later does so in small pieces, which can be taken back
  /// when they were left.
  void keep();
  /// Pages wholly within [begin, end) are not needed until somebody asks for them again, and their
  /// content may be lost. `now` never decreases.
  void leave(int64_t begin, int64_t end, int64_t now);
  int64_t idle_bytes() const { return pages_ ? pages_->idle_bytes() : 0; }
  std::vector<Piece> idle() const;
  /// REQUIRES that the device has done all work that uses them.
  void take_back(const Piece& idle);
  [[noreturn]] void refuse(int64_t num_bytes) const;

 private:
  std::unique_ptr<std::byte, Release> addresses_{nullptr, Release{}};
  int64_t num_bytes_ = 0;
  std::string purpose_;
  std::unique_ptr<PageLedger> pages_;  // null where all has memory
  bool kept_ = false;
};

}  // namespace tessera
