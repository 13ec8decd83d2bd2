#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/device.h"
#include "core/tensor.h"

namespace tessera {

/// Which of a device's memory: its own, or what the host reaches too.
enum class MemoryKind : uint8_t { kOwn, kShared };

/// Owned, zeroed, 64-byte aligned memory of a device, which must outlive it. Move-only. Throws
/// UserError with the size and the purpose when memory cannot be had.
class Buffer {
 public:
  Buffer() = default;
  /// `purpose` names the memory in error messages, e.g. "optimizer state".
  Buffer(int64_t num_bytes, std::string_view purpose, Device& device = host_device(),
         MemoryKind kind = MemoryKind::kOwn);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  std::byte* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }
  std::span<std::byte> bytes() const { return {data_, static_cast<size_t>(num_bytes_)}; }
  /// A view of elements at a byte offset. Throws InternalError when it would leave the buffer.
  Tensor tensor(int64_t offset, DType dtype, const Shape& shape) const;

 private:
  bool host_reaches() const;
  void release() noexcept;

  std::byte* data_ = nullptr;
  int64_t num_bytes_ = 0;
  Device* device_ = nullptr;
  MemoryKind kind_ = MemoryKind::kOwn;
};

/// A buffer that holds one tensor.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(DType dtype, const Shape& shape, std::string_view purpose = "a tensor",
              Device& device = host_device(), MemoryKind kind = MemoryKind::kOwn);
  operator Tensor() const { return tensor_; }
  const Tensor& get() const { return tensor_; }

 private:
  Buffer buffer_;
  Tensor tensor_;
};

/// Rounds a byte count up to the alignment of every planned value.
inline constexpr int64_t kAlignment = 64;
inline int64_t align_up(int64_t num_bytes, int64_t alignment = kAlignment) {
  return (num_bytes + alignment - 1) / alignment * alignment;
}

/// Lets the system take back the pages of a mapped file that lie wholly within `bytes`, so that
/// reading a large file once does not fill the memory. They are read again when touched.
void drop_mapped_pages(std::span<const std::byte> bytes);

/// Resident memory of this process in bytes, now and at its highest (Linux /proc).
struct ProcessMemory {
  int64_t resident = 0;
  int64_t files = 0;  ///< of `resident`, pages of files: code, token files, checkpoints
  int64_t peak = 0;
  /// What the system cannot take back: it drops pages of files where memory is short, and reads
  /// them again when they are touched.
  int64_t held() const { return resident - files; }
};
ProcessMemory process_memory();

/// The most that the process held at any time since construction, as far as samples tell.
class PeakMemory {
 public:
  PeakMemory() : peak_(process_memory().peak) {}
  /// Takes a sample and returns the most so far. Between samples only the highest resident memory
  /// is known, pages of files included: where it rose, those of now count as those of then.
  int64_t sample();

 private:
  int64_t peak_;
  int64_t most_ = 0;
};

/// "1.5 GiB", "12 KiB".
std::string format_bytes(int64_t num_bytes);

}  // namespace tessera
