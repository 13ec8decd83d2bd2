#include "model/batch/batch_inputs.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "core/random.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/noise.h"

namespace tessera {
namespace {

void check_array(const Tensor& array, int64_t size, std::string_view what) {
  ensure(array.dtype == DType::kI32 && array.shape == Shape{size},
         "batch {} is {} {}, expected i32 [{}]", what, dtype_name(array.dtype),
         array.shape.to_string(), size);
}

void take(const Tensor& from, const std::vector<int64_t>& idx, bool is_whole, const Tensor& to) {
  const int32_t* source = from.as<int32_t>();
  if (is_whole) {
    std::copy_n(source, idx.size(), to.as<int32_t>());
    return;
  }
  std::ranges::transform(idx, to.as<int32_t>(), [&](int64_t i) { return source[i]; });
}

void take_shifted(const Tensor& from, const std::vector<int64_t>& shifted,
                  const std::vector<int64_t>& idx, const Tensor& to) {
  const int32_t* source = from.as<int32_t>();
  std::ranges::transform(idx, to.as<int32_t>(), [&](int64_t i) {
    const int64_t at = shifted[i];
    return at >= 0 ? source[at] : kIgnoredLabel;
  });
}

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
  if (jitters(context.config.moe, context.shape)) token_numbers = next(Port::kTokenNumbers);
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

std::byte* BatchInputs::next_block() {
  if (device_->is_host()) return block_.data();
  if (num_released_ == num_staged_) clear();
  if (num_staged_ == staging_.size()) {
    staging_.emplace_back(staged_bytes_, "inputs of micro-batches", *device_, MemoryKind::kShared);
  }
  return staging_[num_staged_++].data();
}

/// At the same place in the block that the host fills.
Tensor BatchInputs::staged(const Tensor& tensor) const {
  const std::ptrdiff_t offset = static_cast<std::byte*>(tensor.data) - block_.data();
  return {staged_ + offset, tensor.dtype, tensor.shape};
}

void BatchInputs::bring() {
  if (device_->is_host()) return;
  ensure(num_brought_ < num_staged_, "a micro-batch is brought that was not staged");
  device_->copy(block_.data(), staging_[num_brought_++].data(), staged_bytes_);
}

void BatchInputs::stage(const MicroBatch& batch, const TokenShare& share, const LossScales& scales,
                        int64_t token_ranks) {
  const auto total = static_cast<int64_t>(batch.tokens.num_elements());
  for (const auto& [array, what] :
       {std::pair{batch.tokens, "tokens"}, std::pair{batch.labels, "labels"},
        std::pair{batch.positions, "positions"}})
    check_array(array, total, what);
  check_array(batch.cu_seqlens, cu_seqlens.num_elements(), "cu_seqlens");
  staged_ = next_block();
  take(batch.tokens, share.group, share.is_whole, staged(tokens));
  take(batch.labels, share.own, share.is_whole, staged(labels));
  if (!share.is_whole) take(batch.labels, share.group, false, staged(gathered_labels));
  stage_positions(batch, share);
  if (token_weights) stage_weights(batch, share);
  if (experts) stage_experts(batch, share);
  if (noise) stage_noise(batch.noise, share);
  stage_predictions(batch, share);
  if (segments_are_sequences_) stage_segments(batch, share);
  *staged(loss_scale).as<float>() = scales.loss;
  *staged(mtp_scale).as<float>() = scales.mtp;
  *staged(grad_balance).as<float>() = scales.balance;
  // Of the mean over all tokens, each rank has its share.
  *staged(grad_z_loss).as<float>() = scales.z_loss / static_cast<float>(token_ranks);
}

void BatchInputs::stage_positions(const MicroBatch& batch, const TokenShare& share) {
  const bool of_own = positions.num_elements() == std::ssize(share.own);
  const auto bounds = batch.cu_seqlens.span<int32_t>();
  take(batch.positions, of_own ? share.own : share.group, share.is_whole, staged(positions));
  std::ranges::copy(bounds, staged(cu_seqlens).as<int32_t>());
  if (chunk_bounds) fill_chunk_bounds(bounds, chunk_, staged(chunk_bounds).span<int32_t>());
  if (!temperatures) return;
  std::ranges::transform(staged(positions).span<int32_t>(), staged(temperatures).as<float>(),
                         [&](int32_t position) { return temperature_rule_.at(position); });
}

void BatchInputs::stage_weights(const MicroBatch& batch, const TokenShare& share) {
  float* const to = staged(token_weights).as<float>();
  if (!batch.weights) {
    std::fill_n(to, share.own.size(), 1.0F);
    return;
  }
  const auto given = batch.weights.span<float>();
  ensure(given.size() == batch.tokens.span<int32_t>().size(), "batch weights of {} tokens",
         given.size());
  std::ranges::transform(share.own, to, [&](int64_t token) { return given[token]; });
}

void BatchInputs::stage_experts(const MicroBatch& batch, const TokenShare& share) {
  const auto to = staged(experts).span<int32_t>();
  if (!batch.experts) {
    std::ranges::fill(to, -1);
    return;
  }
  const int64_t top_k = experts.shape[2];
  const int64_t num_tokens = batch.tokens.num_elements();
  require(batch.experts.num_elements() == experts.shape[0] * num_tokens * top_k,
          "a micro-batch names {} experts; it must name {} for each of {} tokens in each of {} MoE "
          "layers",
          batch.experts.num_elements(), top_k, num_tokens, experts.shape[0]);
  const int32_t* const from = batch.experts.as<int32_t>();
  int32_t* next = to.data();
  for (int64_t layer = 0; layer < experts.shape[0]; ++layer) {
    for (const int64_t token : share.own)
      next = std::copy_n(from + (layer * num_tokens + token) * top_k, top_k, next);
  }
}

void BatchInputs::stage_noise(const RouterNoise& given, const TokenShare& share) {
  if (token_numbers) {
    std::ranges::transform(share.own, staged(token_numbers).as<int64_t>(),
                           [&](int64_t token) { return given.first_token + token; });
  }
  const auto eps = given.training ? static_cast<float>(router_jitter_) : 0.0F;
  int32_t* words = staged(noise).as<int32_t>();
  for (int64_t layer = 0; layer < noise.shape[0]; ++layer, words += kNumNoiseWords) {
    const uint64_t key = mix(given.key, static_cast<uint64_t>(layer));
    words[kNoiseKeyLow] = static_cast<int32_t>(static_cast<uint32_t>(key));
    words[kNoiseKeyHigh] = static_cast<int32_t>(static_cast<uint32_t>(key >> 32U));
    words[kNoiseSize] = std::bit_cast<int32_t>(eps);
    words[kNoiseTraining] = given.training ? 1 : 0;
  }
}

void BatchInputs::stage_segments(const MicroBatch& batch, const TokenShare& share) {
  const auto ends = batch.cu_seqlens.span<int32_t>();
  int32_t* const to = staged(segments).as<int32_t>();
  for (size_t i = 0; i < share.own.size(); ++i) {
    const auto after = std::ranges::upper_bound(ends, static_cast<int32_t>(share.own[i]));
    to[i] = static_cast<int32_t>(after - ends.begin() - 1);
  }
}

/// Where a sequence ends before the shifted token there is nothing to predict; the layer is shown
/// the sequence's last token then, which no prediction depends on.
void BatchInputs::stage_predictions(const MicroBatch& batch, const TokenShare& share) {
  const int64_t total = batch.tokens.num_elements();
  const auto ends = batch.cu_seqlens.span<int32_t>();
  for (size_t i = 0; i < predictions.size(); ++i) {
    auto shifted = shift_in_sequences(ends, total, static_cast<int64_t>(i) + 1);
    take_shifted(batch.labels, shifted, share.own, staged(predictions[i].labels));
    if (!share.is_whole)
      take_shifted(batch.labels, shifted, share.group, staged(predictions[i].gathered_labels));
    for (int64_t token = 0; token < total; ++token) {
      int64_t& at = shifted[token];
      if (at < 0) at = *std::ranges::upper_bound(ends, static_cast<int32_t>(token)) - 1;
    }
    take_shifted(batch.tokens, shifted, share.group, staged(predictions[i].tokens));
  }
}

}  // namespace tessera
