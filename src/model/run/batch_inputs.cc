#include "model/run/batch_inputs.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace tessera {
namespace {

void check_array(const Tensor& array, int64_t size, std::string_view what) {
  ensure(array.dtype == DType::kI32 && array.shape == Shape{size},
         "batch {} is {} {}, expected i32 [{}]", what, dtype_name(array.dtype),
         array.shape.to_string(), size);
}

void take(const Tensor& from, const std::vector<int64_t>& idx, const MirroredTensor& to) {
  const int32_t* source = from.as<int32_t>();
  std::ranges::transform(idx, to.get().as<int32_t>(), [&](int64_t i) { return source[i]; });
}

/// Both sides begin as zero.
void set_scalar(const MirroredTensor& tensor, float value) {
  float& known = *tensor.get().as<float>();
  if (known == value) return;
  known = value;
  tensor.upload();
}

}  // namespace

std::vector<int64_t> shift_in_sequences(std::span<const int32_t> cu_seqlens, int64_t num_tokens,
                                        int64_t shift) {
  std::vector<int64_t> shifted(num_tokens, -1);
  for (size_t sequence = 1; sequence < cu_seqlens.size(); ++sequence) {
    for (int64_t token = cu_seqlens[sequence - 1]; token + shift < cu_seqlens[sequence]; ++token)
      shifted[token] = token + shift;
  }
  return shifted;
}

int64_t count_mtp_labels(const MicroBatch& batch, int64_t mtp_layers) {
  const auto labels = batch.labels.span<int32_t>();
  int64_t count = 0;
  for (int64_t shift = 1; shift <= mtp_layers; ++shift) {
    const auto shifted =
        shift_in_sequences(batch.cu_seqlens.span<int32_t>(), std::ssize(labels), shift);
    count += std::ranges::count_if(shifted,
                                   [&](int64_t i) { return i >= 0 && labels[i] != kIgnoredLabel; });
  }
  return count;
}

BatchInputs::BatchInputs(const BatchShape& shape, const StageGroups& groups,
                         const ModelConfig& config, Device& device)
    : token_loss(DType::kF32, {own_tokens(shape, groups)}, "losses of tokens", device),
      segments_are_sequences_(config.moe.balance_scope == BalanceTokens::kSequence) {
  const PortContext context{.config = config, .shape = shape, .groups = groups};
  const auto make = [&](Port port) {
    const ValueType type = port_type(port, context);
    return MirroredTensor(type.dtype, type.shape, device);
  };
  tokens = make(Port::kTokens);
  labels = make(Port::kLabels);
  gathered_labels = make(Port::kGatheredLabels);
  positions = make(Port::kPositions);
  cu_seqlens = make(Port::kCuSeqlens);
  segments = make(Port::kSegments);
  token_order = make(Port::kTokenOrder);
  loss_scale = make(Port::kLossScale);
  mtp_scale = make(Port::kLossScale);
  grad_loss = make(Port::kLoss);
  grad_balance = make(Port::kBalanceLoss);
  grad_z_loss = make(Port::kZLoss);
  set_scalar(grad_loss, 1);
  for (int64_t i = 0; i < config.mtp_layers; ++i) {
    predictions.push_back({.tokens = make(Port::kTokens),
                           .labels = make(Port::kLabels),
                           .gathered_labels = make(Port::kGatheredLabels)});
  }
  int32_t* order = token_order.get().as<int32_t>();
  const TokenSharding sharding = token_sharding(shape, groups);
  for (int64_t place = 0; place < sharding.ring; ++place) {
    for (const int64_t token : ring_tokens(sharding, place)) *order++ = static_cast<int32_t>(token);
  }
  token_order.upload();
}

int64_t BatchInputs::count_bytes(const BatchShape& shape, const StageGroups& groups,
                                 const ModelConfig& config) {
  const PortContext context{.config = config, .shape = shape, .groups = groups};
  const auto bytes = [&](Port port) { return port_type(port, context).num_bytes(); };
  const int64_t labelled =
      bytes(Port::kTokens) + bytes(Port::kLabels) + bytes(Port::kGatheredLabels);
  return (1 + config.mtp_layers) * labelled + bytes(Port::kPositions) + bytes(Port::kCuSeqlens) +
         bytes(Port::kSegments) + bytes(Port::kTokenOrder) + bytes(Port::kTokenLoss);
}

PortTensors BatchInputs::ports() const {
  PortTensors ports;
  ports.set(Port::kTokens, tokens);
  ports.set(Port::kLabels, labels);
  ports.set(Port::kGatheredLabels, gathered_labels);
  ports.set(Port::kPositions, positions);
  ports.set(Port::kCuSeqlens, cu_seqlens);
  ports.set(Port::kSegments, segments);
  ports.set(Port::kTokenOrder, token_order);
  ports.set(Port::kLossScale, loss_scale);
  ports.set(Port::kTokenLoss, token_loss);
  return ports;
}

PortTensors BatchInputs::prediction_ports(int64_t layer) const {
  const Prediction& prediction = predictions[layer];
  PortTensors all = ports();
  all.set(Port::kTokens, prediction.tokens);
  all.set(Port::kLabels, prediction.labels);
  all.set(Port::kGatheredLabels, prediction.gathered_labels);
  all.set(Port::kLossScale, mtp_scale);
  return all;
}

void BatchInputs::load(const MicroBatch& batch, const TokenShare& share) {
  const auto total = static_cast<int64_t>(batch.tokens.num_elements());
  for (const auto& [array, what] :
       {std::pair{batch.tokens, "tokens"}, std::pair{batch.labels, "labels"},
        std::pair{batch.positions, "positions"}})
    check_array(array, total, what);
  check_array(batch.cu_seqlens, cu_seqlens.get().num_elements(), "cu_seqlens");
  take(batch.tokens, share.group, tokens);
  take(batch.labels, share.own, labels);
  take(batch.labels, share.group, gathered_labels);
  take(batch.positions,
       positions.get().num_elements() == std::ssize(share.own) ? share.own : share.group,
       positions);
  std::ranges::copy(batch.cu_seqlens.span<int32_t>(), cu_seqlens.get().as<int32_t>());
  load_predictions(batch, share);

  for (const MirroredTensor* given : {&tokens, &labels, &gathered_labels, &positions, &cu_seqlens})
    given->upload();

  if (!segments_are_sequences_) return;
  const auto ends = batch.cu_seqlens.span<int32_t>();
  for (size_t i = 0; i < share.own.size(); ++i) {
    const auto after = std::ranges::upper_bound(ends, static_cast<int32_t>(share.own[i]));
    segments.get().as<int32_t>()[i] = static_cast<int32_t>(after - ends.begin() - 1);
  }
  segments.upload();
}

/// Where a sequence ends before the shifted token there is nothing to predict; the layer is shown
/// the sequence's last token then, which no prediction depends on.
void BatchInputs::load_predictions(const MicroBatch& batch, const TokenShare& share) {
  const auto take_shifted = [](const Tensor& from, const std::vector<int64_t>& shifted,
                               const std::vector<int64_t>& idx, const MirroredTensor& to) {
    const int32_t* source = from.as<int32_t>();
    std::ranges::transform(idx, to.get().as<int32_t>(), [&](int64_t i) {
      const int64_t at = shifted[i];
      return at >= 0 ? source[at] : kIgnoredLabel;
    });
    to.upload();
  };
  const int64_t total = batch.tokens.num_elements();
  const auto ends = batch.cu_seqlens.span<int32_t>();
  for (size_t i = 0; i < predictions.size(); ++i) {
    auto shifted = shift_in_sequences(ends, total, static_cast<int64_t>(i) + 1);
    take_shifted(batch.labels, shifted, share.own, predictions[i].labels);
    take_shifted(batch.labels, shifted, share.group, predictions[i].gathered_labels);
    for (int64_t token = 0; token < total; ++token) {
      int64_t& at = shifted[token];
      if (at < 0) at = *std::ranges::upper_bound(ends, static_cast<int32_t>(token)) - 1;
    }
    take_shifted(batch.tokens, shifted, share.group, predictions[i].tokens);
  }
}

void BatchInputs::set_scales(const LossScales& scales, int64_t token_ranks) {
  set_scalar(loss_scale, scales.loss);
  set_scalar(mtp_scale, scales.mtp);
  set_scalar(grad_balance, scales.balance);
  // Of the mean over all tokens, each rank has its share.
  set_scalar(grad_z_loss, scales.z_loss / static_cast<float>(token_ranks));
}

}  // namespace tessera
