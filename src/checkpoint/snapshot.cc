#include "checkpoint/snapshot.h"

#include <cstring>

#include "core/device.h"

namespace tessera {
namespace {

void copy_to_host(const Tensor& from, const Tensor& to) {
  if (from.num_bytes() == 0) return;
  if (from.device == nullptr) {
    std::memcpy(to.data, from.data, static_cast<size_t>(from.num_bytes()));
  } else {
    from.device->copy(to.data, from.data, from.num_bytes());
  }
}

}  // namespace

int64_t Snapshot::count_bytes(std::span<const NamedSlice> slices) {
  int64_t num_bytes = 0;
  for (const NamedSlice& slice : slices) num_bytes += align_up(slice.tensor.num_bytes());
  return num_bytes;
}

Snapshot::Snapshot(int64_t num_bytes) : buffer_(num_bytes, "the copy that saves are written from") {
  // Now, so that the first save does not wait for the system to find the pages.
  if (num_bytes > 0) std::memset(buffer_.data(), 0, static_cast<size_t>(num_bytes));
}

void Snapshot::take(std::span<const NamedSlice> model, std::span<const NamedSlice> optimizer) {
  int64_t offset = 0;
  model_ = copy(model, offset);
  optimizer_ = copy(optimizer, offset);
}

std::vector<NamedSlice> Snapshot::copy(std::span<const NamedSlice> slices, int64_t& offset) const {
  std::vector<NamedSlice> copies;
  for (const NamedSlice& slice : slices) {
    NamedSlice& copied = copies.emplace_back(slice);
    copied.tensor = buffer_.tensor(offset, slice.tensor.dtype, slice.tensor.shape);
    copy_to_host(slice.tensor, copied.tensor);
    offset += align_up(slice.tensor.num_bytes());
  }
  return copies;
}

}  // namespace tessera
