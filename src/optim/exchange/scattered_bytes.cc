#include "optim/exchange/scattered_bytes.h"

#include "core/device.h"

namespace tessera {

ScatteredBytes::ScatteredBytes(std::span<const Tensor> tensors) {
  bool joined = true;
  if (!tensors.empty()) device_ = tensors.front().device;
  for (const Tensor& tensor : tensors) {
    if (tensor.num_bytes() == 0) continue;
    auto* data = static_cast<std::byte*>(tensor.data);
    joined =
        joined && (pieces_.empty() || pieces_.back().data + pieces_.back().bytes.count == data);
    pieces_.push_back({data, {num_bytes_, tensor.num_bytes()}});
    num_bytes_ += tensor.num_bytes();
  }
  if (joined && !pieces_.empty()) contiguous_ = pieces_.front().data;
}

template <typename Visit>
void ScatteredBytes::for_each_run(IndexRange range, const Visit& visit) const {
  ensure(range.begin >= 0 && range.count >= 0 && range.end() <= num_bytes_, "bytes [{}, {}) of {}",
         range.begin, range.end(), num_bytes_);
  for (const Piece& piece : pieces_) {
    const int64_t begin = std::max(range.begin, piece.bytes.begin);
    const int64_t end = std::min(range.end(), piece.bytes.end());
    if (begin < end)
      visit(piece.data + (begin - piece.bytes.begin), begin - range.begin, end - begin);
  }
}

void ScatteredBytes::read(IndexRange range, std::byte* memory) const {
  Device& device = device_ != nullptr ? *device_ : host_device();
  for_each_run(range, [&](const std::byte* data, int64_t offset, int64_t bytes) {
    device.copy(memory + offset, data, bytes);
  });
}

void ScatteredBytes::write(IndexRange range, const std::byte* memory) const {
  Device& device = device_ != nullptr ? *device_ : host_device();
  for_each_run(range, [&](std::byte* data, int64_t offset, int64_t bytes) {
    device.copy(data, memory + offset, bytes);
  });
}

}  // namespace tessera
