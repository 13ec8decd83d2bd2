#include "model/batch/pass_statistics.h"

#include "core/prefetch.h"

namespace tessera {
namespace {

constexpr int64_t kScalarBytes = kAlignment;

int64_t floats_bytes(int64_t count) {
  return align_up(count * dtype_size(DType::kF32));
}
int64_t layer_bytes(int64_t num_experts) {
  return 3 * kScalarBytes + 2 * floats_bytes(num_experts);
}
/// Where the losses begin, and behind these the logits.
int64_t losses_offset(const StatisticsSizes& sizes) {
  return sizes.moe_layers * layer_bytes(sizes.num_experts);
}
int64_t logits_offset(const StatisticsSizes& sizes) {
  return losses_offset(sizes) + sizes.num_losses * kScalarBytes;
}

}  // namespace

void LayerStatistics::set_ports(PortTensors& ports) const {
  ports.set(Port::kBalanceLoss, balance_loss);
  ports.set(Port::kZLoss, z_loss);
  ports.set(Port::kScoreMeans, score_means);
  ports.set(Port::kCounts, counts);
  ports.set(Port::kDropped, dropped);
}

PassStatistics::PassStatistics(const StatisticsSizes& sizes, Device& device)
    : sizes_(sizes),
      device_(device),
      block_(logits_offset(sizes) + sizes.logit_layers * floats_bytes(sizes.num_heads),
             "losses and counts of experts", device) {}

LayerStatistics PassStatistics::layer_in(const Buffer& block, int64_t idx) const {
  int64_t offset = idx * layer_bytes(sizes_.num_experts);
  const auto next = [&](DType dtype, int64_t size) {
    const Tensor tensor = block.tensor(offset, dtype, {size});
    offset += align_up(tensor.num_bytes());
    return tensor;
  };
  LayerStatistics layer;
  layer.balance_loss = next(DType::kF32, 1);
  layer.z_loss = next(DType::kF32, 1);
  layer.score_means = next(DType::kF32, sizes_.num_experts);
  layer.counts = next(DType::kF32, sizes_.num_experts);
  layer.dropped = next(DType::kI64, 1);
  return layer;
}

Tensor PassStatistics::loss_in(const Buffer& block, int64_t idx) const {
  return block.tensor(losses_offset(sizes_) + idx * kScalarBytes, DType::kF32, {1});
}

Tensor PassStatistics::logits_in(const Buffer& block, int64_t idx) const {
  return block.tensor(logits_offset(sizes_) + idx * floats_bytes(sizes_.num_heads), DType::kF32,
                      {sizes_.num_heads});
}

Buffer PassStatistics::make_copy() const {
  return {block_.num_bytes(), "losses and counts of experts", device_, MemoryKind::kShared};
}

size_t PassStatistics::next_copy() {
  if (num_taken_ == num_published_) clear();
  return num_published_++;
}

void PassStatistics::publish() {
  const size_t idx = next_copy();
  if (idx == copies_.size()) copies_.push_back(make_copy());
  device_.copy(copies_[idx].data(), block_.data(), block_.num_bytes());
}

void PassStatistics::publish_again() {
  ensure(next_copy() < copies_.size(), "statistics of a micro-batch that never ran");
}

void PassStatistics::read() {
  if (current_.num_bytes() == 0) current_ = make_copy();
  device_.copy(current_.data(), block_.data(), block_.num_bytes());
  device_.synchronize();
}

void PassStatistics::take() {
  ensure(num_taken_ < num_published_, "statistics of a micro-batch that did not end");
  if (num_taken_ == 0) {
    for (size_t idx = 0; idx < num_published_; ++idx) prefetch(copies_[idx].bytes());
  }
  taken_ = num_taken_++;
}

LayerStatistics PassStatistics::taken_layer(int64_t idx) const {
  return layer_in(copies_.at(taken_), idx);
}

float PassStatistics::taken_loss(int64_t idx) const {
  return *loss_in(copies_.at(taken_), idx).as<float>();
}

}  // namespace tessera
