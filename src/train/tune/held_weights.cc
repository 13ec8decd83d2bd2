#include "train/tune/held_weights.h"

namespace tessera {

HeldWeights::HeldWeights(Trainer& trainer) : trainer_(trainer) {
  const std::vector<NamedSlice> slices = trainer.state().owned_model();
  for (const NamedSlice& slice : slices) shapes_[slice.name] = slice.slice.global;
  if (!trainer.backend().is_host()) {
    snapshot_ =
        std::make_unique<Snapshot>(Snapshot::count_bytes(slices), trainer.backend().device());
  }
  for (const NamedSlice& slice : slices) {
    if (slice.slice.is_whole() || joined_.contains(slice.name)) continue;
    const int64_t num_bytes = slice.slice.global.num_elements() * dtype_size(slice.tensor.dtype);
    joined_.emplace(slice.name, Buffer(num_bytes, "exported weights"));
  }
}

int64_t HeldWeights::num_bytes() const {
  int64_t total = snapshot_ ? snapshot_->num_bytes() : 0;
  for (const auto& [name, buffer] : joined_) total += buffer.num_bytes();
  return total;
}

const HeldTensors& HeldWeights::take() {
  trainer_.state().wait_weights();
  std::vector<NamedSlice> slices = trainer_.state().owned_model();
  if (snapshot_) {
    snapshot_->take(slices, {});
    snapshot_->wait();
    slices.assign(snapshot_->model().begin(), snapshot_->model().end());
  }
  tensors_.clear();
  for (const NamedSlice& slice : slices) {
    const auto joined = joined_.find(slice.name);
    if (joined == joined_.end()) {
      tensors_[slice.name] = slice.tensor;
      continue;
    }
    const Tensor whole{joined->second.data(), slice.tensor.dtype, slice.slice.global};
    copy_slice_into(slice.slice, slice.tensor, whole);
    tensors_[slice.name] = whole;
  }
  return tensors_;
}

}  // namespace tessera
