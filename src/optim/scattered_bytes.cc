#include "optim/scattered_bytes.h"

#include <cstring>

namespace tessera {

ScatteredBytes::ScatteredBytes(std::span<const Tensor> tensors) {
  bool joined = true;
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
  for_each_run(range, [&](const std::byte* data, int64_t offset, int64_t bytes) {
    std::memcpy(memory + offset, data, static_cast<size_t>(bytes));
  });
}

void ScatteredBytes::write(IndexRange range, const std::byte* memory) const {
  for_each_run(range, [&](std::byte* data, int64_t offset, int64_t bytes) {
    std::memcpy(data, memory + offset, static_cast<size_t>(bytes));
  });
}

}  // namespace tessera
