#include "model/run/pass_statistics.h"

namespace tessera {
namespace {

constexpr int64_t kScalarBytes = kAlignment;

int64_t counts_bytes(int64_t num_experts) {
  return align_up(num_experts * dtype_size(DType::kF32));
}
int64_t layer_bytes(int64_t num_experts) {
  return 3 * kScalarBytes + 2 * counts_bytes(num_experts);
}

}  // namespace

void LayerStatistics::set_ports(PortTensors& ports) const {
  ports.set(Port::kBalanceLoss, balance_loss);
  ports.set(Port::kZLoss, z_loss);
  ports.set(Port::kScoreMeans, score_means);
  ports.set(Port::kCounts, counts);
  ports.set(Port::kDropped, dropped);
}

PassStatistics::PassStatistics(int64_t num_layers, int64_t num_experts, int64_t num_losses,
                               Device& device)
    : num_layers_(num_layers),
      num_experts_(num_experts),
      device_(device),
      block_(num_layers * layer_bytes(num_experts) + num_losses * kScalarBytes,
             "losses and counts of experts", device) {}

LayerStatistics PassStatistics::layer_in(const Buffer& block, int64_t idx) const {
  int64_t offset = idx * layer_bytes(num_experts_);
  const auto next = [&](DType dtype, int64_t size) {
    const Tensor tensor = block.tensor(offset, dtype, {size});
    offset += align_up(tensor.num_bytes());
    return tensor;
  };
  LayerStatistics layer;
  layer.balance_loss = next(DType::kF32, 1);
  layer.z_loss = next(DType::kF32, 1);
  layer.score_means = next(DType::kF32, num_experts_);
  layer.counts = next(DType::kF32, num_experts_);
  layer.dropped = next(DType::kI64, 1);
  return layer;
}

Tensor PassStatistics::loss_in(const Buffer& block, int64_t idx) const {
  return block.tensor(num_layers_ * layer_bytes(num_experts_) + idx * kScalarBytes, DType::kF32,
                      {1});
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
  taken_ = num_taken_++;
}

LayerStatistics PassStatistics::taken_layer(int64_t idx) const {
  return layer_in(copies_.at(taken_), idx);
}

float PassStatistics::taken_loss(int64_t idx) const {
  return *loss_in(copies_.at(taken_), idx).as<float>();
}

}  // namespace tessera
