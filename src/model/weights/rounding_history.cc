#include "model/weights/rounding_history.h"

#include <algorithm>
#include <bit>
#include <map>

#include "model/layers/layer_program.h"
#include "model/layers/vocabulary_program.h"
#include "model/weights/parameters.h"
#include "ops/round_values/round_math.h"

namespace tessera {
namespace {

constexpr std::string_view kName = "rounding.amax";

/// The weights of the operands of each layer of the model, which no layout changes.
std::vector<std::vector<std::string>> list_weights(const ModelConfig& config,
                                                   const BatchShape& shape) {
  std::vector<std::vector<std::string>> layers;
  if (!shape.products.is_delayed()) return layers;
  std::map<LayerKind, std::vector<std::string>> of_kinds;
  for (int64_t layer = 0; layer < config.all_layers(); ++layer) {
    const auto [found, is_new] = of_kinds.try_emplace(config.layer_kind(layer));
    if (is_new) {
      const ModelProgram program = build_layer(config, found->first, shape, single_rank_groups());
      found->second = operand_weights(product_weights(program.forward));
    }
    layers.push_back(found->second);
  }
  return layers;
}

Shape history_shape(const std::vector<std::string>& weights, const DelayedScaling& scaling) {
  return {std::ssize(weights) * kOperandKinds, scaling.history};
}

float largest_of_row(int64_t row) {
  const bool is_gradient = row % kOperandKinds == static_cast<int64_t>(OperandKind::kGradient);
  return largest_of(is_gradient ? NarrowNumber::kE5M2 : NarrowNumber::kE4M3);
}

/// Of the steps of one operand, the newest first.
float choose_amax(std::span<const float> steps, AmaxChoice choice) {
  if (choice == AmaxChoice::kMax) return std::ranges::max(steps);
  const auto known = std::ranges::find_if(steps, [](float amax) { return amax > 0; });
  return known == steps.end() ? 0 : *known;
}

double share(int64_t part, int64_t all) {
  return all == 0 ? 0 : static_cast<double>(part) / static_cast<double>(all);
}

}  // namespace

RoundingHistory::RoundingHistory(const ModelConfig& config, const BatchShape& shape, Device& device)
    : scaling_(shape.products.delayed) {
  for (std::vector<std::string>& weights : list_weights(config, shape)) {
    const int64_t number = std::ssize(layers_);
    OwnedTensor amax(DType::kF32, history_shape(weights, scaling_), "largest values of operands",
                     device, MemoryKind::kShared);
    layers_.push_back({number, std::move(weights), std::move(amax)});
    names_.push_back(layer_parameter_name(config, number, kName));
  }
}

int64_t RoundingHistory::count_bytes(const ModelConfig& config, const BatchShape& shape) {
  int64_t bytes = 0;
  for (const std::vector<std::string>& weights : list_weights(config, shape)) {
    bytes += align_up(history_shape(weights, shape.products.delayed).num_elements() *
                      dtype_size(DType::kF32));
  }
  return bytes;
}

bool RoundingHistory::names(std::string_view tensor) {
  return tensor.ends_with(fmt::format(".{}", kName));
}

std::vector<NamedSlice> RoundingHistory::slices() const {
  std::vector<NamedSlice> all;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Tensor amax = layers_[i].amax;
    all.push_back({names_[i], amax, Slice::whole(amax.shape)});
  }
  return all;
}

void RoundingHistory::copy_newest(const Tensor& from, const Tensor& to) {
  ensure(from.shape[0] == to.shape[0], "a history of {} operands for {}", from.shape[0],
         to.shape[0]);
  const int64_t steps = std::min(from.shape[1], to.shape[1]);
  std::ranges::fill(to.span<float>(), 0.0F);
  for (int64_t row = 0; row < to.shape[0]; ++row) {
    std::copy_n(from.as<float>() + row * from.shape[1], steps, to.as<float>() + row * to.shape[1]);
  }
}

void RoundingHistory::clear() {
  for (const Layer& layer : layers_) std::ranges::fill(layer.amax.get().span<float>(), 0.0F);
}

std::vector<float> RoundingHistory::scales(const Layer& layer) const {
  std::vector<float> scales;
  const auto all = layer.amax.get().span<float>();
  const auto steps = static_cast<size_t>(scaling_.history);
  for (int64_t row = 0; row < layer.num_rows(); ++row) {
    const float amax = choose_amax(all.subspan(row * steps, steps), scaling_.choice);
    scales.push_back(scale_for(amax, largest_of_row(row), static_cast<int>(scaling_.margin)));
  }
  return scales;
}

void RoundingHistory::add(std::span<const LayerTally> tallies, bool skipped) {
  ensure(tallies.size() == layers_.size(), "tallies of {} layers for {}", tallies.size(),
         layers_.size());
  const int64_t steps = scaling_.history;
  for (size_t i = 0; i < layers_.size(); ++i) {
    for (int64_t row = 0; row < layers_[i].num_rows(); ++row) {
      if (skipped && tallies[i].saturated[row] == 0) continue;
      float* const newest = layers_[i].amax.get().as<float>() + row * steps;
      std::copy_backward(newest, newest + steps - 1, newest + steps);
      *newest = std::bit_cast<float>(static_cast<uint32_t>(tallies[i].amax[row]));
    }
  }
}

double RoundingCounts::most_nonfinite() const {
  return std::ranges::max(nonfinite);
}

RoundingCounts count_roundings(int64_t layer, const LayerTally& tally) {
  RoundingCounts counts{.layer = layer};
  for (size_t row = 0; row < tally.values.size(); ++row) {
    const size_t kind = row % kOperandKinds;
    counts.saturated[kind] =
        std::max(counts.saturated[kind], share(tally.saturated[row], tally.values[row]));
    counts.nonfinite[kind] =
        std::max(counts.nonfinite[kind], share(tally.nonfinite[row], tally.values[row]));
  }
  return counts;
}

}  // namespace tessera
