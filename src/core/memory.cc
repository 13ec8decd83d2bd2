#include "core/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <utility>

#include "core/out_of_memory.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(int64_t num_bytes, std::string_view purpose, const Device& device,
                         MemoryKind kind) {
  const bool pinned = kind == MemoryKind::kShared && !device.is_host();
  const std::string state = pinned ? "" : device.describe_memory();
  throw OutOfMemory(fmt::format(
      "out of memory: {} for {} cannot be had {} {}{}{}; use a smaller micro-batch, model or more "
      "recomputation",
      format_bytes(num_bytes), purpose, pinned ? "as pinned memory of the host for" : "on",
      device.name(), state.empty() ? "" : ": ", state));
}

}  // namespace

Buffer::Buffer(int64_t num_bytes, std::string_view purpose, Device& device, MemoryKind kind)
    : num_bytes_(num_bytes), device_(&device), kind_(kind) {
  ensure(num_bytes >= 0, "negative buffer size {} for {}", num_bytes, purpose);
  if (num_bytes == 0) return;
  data_ = kind == MemoryKind::kOwn ? device.allocate(num_bytes) : device.allocate_shared(num_bytes);
  if (data_ != nullptr) return;
  refuse(num_bytes, purpose, device, kind);
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)),
      device_(other.device_),
      kind_(other.kind_) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    release();
    data_ = std::exchange(other.data_, nullptr);
    num_bytes_ = std::exchange(other.num_bytes_, 0);
    device_ = other.device_;
    kind_ = other.kind_;
  }
  return *this;
}

Buffer::~Buffer() {
  release();
}

void Buffer::release() noexcept {
  if (data_ == nullptr) return;
  if (kind_ == MemoryKind::kOwn) {
    device_->release(data_, num_bytes_);
  } else {
    device_->release_shared(data_, num_bytes_);
  }
  data_ = nullptr;
  num_bytes_ = 0;
}

bool Buffer::host_reaches() const {
  return device_ == nullptr || kind_ == MemoryKind::kShared || device_->is_host();
}

Tensor Buffer::tensor(int64_t offset, DType dtype, const Shape& shape) const {
  const int64_t needed = shape.num_elements() * dtype_size(dtype);
  ensure(offset >= 0 && needed <= num_bytes_ - offset,
         "a view of {} bytes at {} leaves a buffer of {}", needed, offset, num_bytes_);
  return {data_ + offset, dtype, shape, host_reaches() ? nullptr : device_};
}

OwnedTensor::OwnedTensor(DType dtype, const Shape& shape, std::string_view purpose, Device& device,
                         MemoryKind kind)
    : buffer_(std::max<int64_t>(shape.num_elements() * dtype_size(dtype), 1), purpose, device,
              kind),
      tensor_(buffer_.tensor(0, dtype, shape)) {}

void drop_mapped_pages(std::span<const std::byte> bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + bytes.size()) / page * page;
  if (last <= first) return;
  auto* pages = const_cast<std::byte*>(bytes.data()) + (first - begin);
  ::madvise(pages, last - first, MADV_DONTNEED);  // only saves memory: a failure changes nothing
}

ProcessMemory process_memory() {
  std::ifstream status("/proc/self/status");
  ProcessMemory memory;
  std::string line;
  while (std::getline(status, line)) {
    std::istringstream words(line);
    std::string key;
    int64_t kibibytes = 0;
    words >> key >> kibibytes;
    if (key == "VmRSS:") memory.resident = kibibytes * 1024;
    if (key == "RssFile:") memory.files = kibibytes * 1024;
    if (key == "VmHWM:") memory.peak = kibibytes * 1024;
  }
  return memory;
}

int64_t PeakMemory::sample() {
  const ProcessMemory now = process_memory();
  most_ = std::max(most_, now.held());
  if (now.peak > peak_) most_ = std::max(most_, now.peak - now.files);
  peak_ = now.peak;
  return most_;
}

std::string format_bytes(int64_t num_bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  auto value = static_cast<double>(num_bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", num_bytes) : fmt::format("{:.4g} {}", value, kUnits[unit]);
}

}  // namespace tessera
