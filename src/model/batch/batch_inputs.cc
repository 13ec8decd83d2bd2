#include "model/batch/batch_inputs.h"

#include <algorithm>

#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/noise.h"

namespace tessera {
namespace {

MirroredTensor make_one(Device& device) {
  MirroredTensor tensor(DType::kF32, {1}, device);
  *tensor.get().as<float>() = 1;
  tensor.upload();
  return tensor;
}

MirroredTensor make_token_order(const BatchShape& shape, const StageGroups& groups,
                                Device& device) {
  MirroredTensor tensor(DType::kI32, {shape.num_tokens}, device);
  int32_t* order = tensor.get().as<int32_t>();
  const TokenSharding sharding = token_sharding(shape, groups);
  for (int64_t place = 0; place < sharding.ring; ++place) {
    for (const int64_t token : ring_tokens(sharding, place)) *order++ = static_cast<int32_t>(token);
  }
  tensor.upload();
  return tensor;
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
    : token_order(make_token_order(shape, groups, device)),
      grad_loss(make_one(device)),
      token_loss(DType::kF32, {own_tokens(shape, groups)}, "losses of tokens", device),
      device_(&device) {
  const PortContext context{.config = config, .shape = shape, .groups = groups};
  block_ = Buffer(place(context, nullptr, nullptr), "inputs of a micro-batch", device);
  place(context, block_.data(), device.is_host() ? nullptr : &device);
  staging_ = Staging(staged_bytes_, device);
}

/// Sets the block's tensors, and returns its bytes.
int64_t BatchInputs::place(const PortContext& context, std::byte* block, Device* device) {
  int64_t offset = 0;
  const auto next = [&](Port port) {
    const ValueType type = port_type(port, context);
    const Tensor tensor{block == nullptr ? nullptr : block + offset, type.dtype, type.shape,
                        device};
    offset += align_up(tensor.num_bytes());
    return tensor;
  };
  // A rank whose own tokens are all has the gathered labels in the same memory.
  const auto gathered = [&](const Tensor& own) {
    return context.groups.token_ranks() == 1 ? own : next(Port::kGatheredLabels);
  };
  tokens = next(Port::kTokens);
  if (!context.config.moe.hash_layers.empty())
    own_ids = context.groups.tp->size() == 1 ? tokens : next(Port::kOwnTokens);
  labels = next(Port::kLabels);
  gathered_labels = gathered(labels);
  positions = next(Port::kPositions);
  cu_seqlens = next(Port::kCuSeqlens);
  if (context.config.has_chunks()) {
    chunk_ = context.config.window;
    chunk_bounds = next(Port::kChunkBounds);
  }
  if (context.config.has_temperatures()) {
    temperature_rule_ = Temperatures(context.config);
    temperatures = next(Port::kTemperatures);
  }
  if (context.shape.weighted_tokens) token_weights = next(Port::kTokenWeights);
  if (context.shape.replays_routing) {
    const ValueType type = port_type(Port::kReplayedExperts, context);
    experts = {block == nullptr ? nullptr : block + offset,
               type.dtype,
               {context.config.num_moe_layers(), type.shape[0], type.shape[1]},
               device};
    offset += align_up(experts.num_bytes());
  }
  if (numbers_tokens(context.config.moe, context.shape)) token_numbers = next(Port::kTokenNumbers);
  if (takes_noise(context.config.moe, context.shape)) {
    router_jitter_ = context.config.moe.router_jitter;
    noise = {block == nullptr ? nullptr : block + offset,
             DType::kI32,
             {context.config.num_moe_layers(), kNumNoiseWords},
             device};
    offset += align_up(noise.num_bytes());
  }
  segments_are_sequences_ = context.config.moe.balance_scope == BalanceTokens::kSequence;
  loss_scale = next(Port::kLossScale);
  mtp_scale = next(Port::kLossScale);
  grad_balance = next(Port::kBalanceLoss);
  grad_z_loss = next(Port::kZLoss);
  predictions.resize(context.config.mtp_layers);
  for (Prediction& prediction : predictions) {
    prediction.tokens = next(Port::kTokens);
    prediction.labels = next(Port::kLabels);
    prediction.gathered_labels = gathered(prediction.labels);
  }
  staged_bytes_ = offset;
  segments = next(Port::kSegments);  // last: else zeros that nobody brings
  if (segments_are_sequences_) staged_bytes_ = offset;
  return offset;
}

int64_t BatchInputs::count_bytes(const BatchShape& shape, const StageGroups& groups,
                                 const ModelConfig& config) {
  const PortContext context{.config = config, .shape = shape, .groups = groups};
  BatchInputs inputs;
  return inputs.place(context, nullptr, nullptr) +
         port_type(Port::kTokenOrder, context).num_bytes() +
         port_type(Port::kTokenLoss, context).num_bytes();
}

PortTensors BatchInputs::ports() const {
  PortTensors ports;
  ports.set(Port::kTokens, tokens);
  ports.set(Port::kOwnTokens, own_ids);
  ports.set(Port::kLabels, labels);
  ports.set(Port::kGatheredLabels, gathered_labels);
  ports.set(Port::kPositions, positions);
  ports.set(Port::kCuSeqlens, cu_seqlens);
  ports.set(Port::kChunkBounds, chunk_bounds);
  ports.set(Port::kTemperatures, temperatures);
  ports.set(Port::kSegments, segments);
  ports.set(Port::kTokenOrder, token_order);
  ports.set(Port::kLossScale, loss_scale);
  ports.set(Port::kTokenWeights, token_weights);
  ports.set(Port::kTokenNumbers, token_numbers);
  ports.set(Port::kTokenLoss, token_loss);
  return ports;
}

Tensor BatchInputs::experts_of(int64_t moe_layer) const {
  if (!experts) return {};
  const Shape one = {experts.shape[1], experts.shape[2]};
  const int64_t bytes = one.num_elements() * dtype_size(experts.dtype);
  return {static_cast<std::byte*>(experts.data) + moe_layer * bytes, experts.dtype, one,
          experts.device};
}

Tensor BatchInputs::noise_of(int64_t moe_layer) const {
  if (!noise) return {};
  const int64_t bytes = kNumNoiseWords * dtype_size(noise.dtype);
  return {static_cast<std::byte*>(noise.data) + moe_layer * bytes,
          noise.dtype,
          {kNumNoiseWords},
          noise.device};
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

}  // namespace tessera
