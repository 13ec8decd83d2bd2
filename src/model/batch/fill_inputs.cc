#include <algorithm>
#include <bit>

#include "core/random.h"
#include "model/batch/batch_inputs.h"
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

/// Of what positions count in: each token that only fills has its own.
std::vector<int32_t> bounds_of(const Tensor& positions) {
  std::vector<int32_t> bounds;
  const auto counted = positions.span<int32_t>();
  for (size_t t = 0; t < counted.size(); ++t) {
    if (counted[t] == 0) bounds.push_back(static_cast<int32_t>(t));
  }
  bounds.push_back(static_cast<int32_t>(counted.size()));
  return bounds;
}

}  // namespace

/// Writes a rank's part of a micro-batch to a block.
class BatchInputs::Filler {
 public:
  Filler(const BatchInputs& inputs, std::byte* block, const Given& given)
      : inputs_(inputs),
        block_(block),
        batch_(given.batch),
        share_(given.share),
        scales_(given.scales),
        token_ranks_(given.token_ranks) {}

  void fill() const;

 private:
  /// At the same place in the block as in that of the programs.
  Tensor at(const Tensor& tensor) const {
    const std::ptrdiff_t offset = static_cast<std::byte*>(tensor.data) - inputs_.block_.data();
    return {block_ + offset, tensor.dtype, tensor.shape};
  }
  void check() const;
  void fill_positions() const;
  void fill_weights() const;
  void fill_experts() const;
  void fill_noise() const;
  void fill_segments() const;
  void fill_predictions() const;
  void fill_scales() const;

  const BatchInputs& inputs_;
  std::byte* block_;
  const MicroBatch& batch_;
  const TokenShare& share_;
  const LossScales& scales_;
  int64_t token_ranks_;
};

void BatchInputs::fill(std::byte* block, const Given& given) const {
  Filler(*this, block, given).fill();
}

void BatchInputs::Filler::check() const {
  const int64_t total = batch_.tokens.num_elements();
  for (const auto& [array, what] :
       {std::pair{batch_.tokens, "tokens"}, std::pair{batch_.labels, "labels"},
        std::pair{batch_.positions, "positions"}})
    check_array(array, total, what);
  check_array(batch_.cu_seqlens, inputs_.cu_seqlens.num_elements(), "cu_seqlens");
}

void BatchInputs::Filler::fill() const {
  check();
  take(batch_.tokens, share_.group, share_.is_whole, at(inputs_.tokens));
  if (inputs_.own_ids) take(batch_.tokens, share_.own, share_.is_whole, at(inputs_.own_ids));
  take(batch_.labels, share_.own, share_.is_whole, at(inputs_.labels));
  if (!share_.is_whole) take(batch_.labels, share_.group, false, at(inputs_.gathered_labels));
  fill_positions();
  if (inputs_.token_weights) fill_weights();
  if (inputs_.experts) fill_experts();
  if (inputs_.noise) fill_noise();
  fill_predictions();
  if (inputs_.segments_are_sequences_) fill_segments();
  fill_scales();
}

void BatchInputs::Filler::fill_scales() const {
  *at(inputs_.loss_scale).as<float>() = scales_.loss;
  *at(inputs_.mtp_scale).as<float>() = scales_.mtp;
  *at(inputs_.grad_balance).as<float>() = scales_.balance;
  // Of the mean over all tokens, each rank has its share.
  *at(inputs_.grad_z_loss).as<float>() = scales_.z_loss / static_cast<float>(token_ranks_);
}

void BatchInputs::Filler::fill_positions() const {
  const bool of_own = inputs_.positions.num_elements() == std::ssize(share_.own);
  const auto bounds = batch_.cu_seqlens.span<int32_t>();
  const Tensor positions = at(inputs_.positions);
  take(batch_.positions, of_own ? share_.own : share_.group, share_.is_whole, positions);
  std::ranges::copy(bounds, at(inputs_.cu_seqlens).as<int32_t>());
  if (inputs_.chunk_bounds)
    fill_chunk_bounds(bounds, inputs_.chunk_, at(inputs_.chunk_bounds).span<int32_t>());
  if (!inputs_.temperatures) return;
  std::ranges::transform(positions.span<int32_t>(), at(inputs_.temperatures).as<float>(),
                         [&](int32_t position) { return inputs_.temperature_rule_.at(position); });
}

void BatchInputs::Filler::fill_weights() const {
  float* const to = at(inputs_.token_weights).as<float>();
  if (!batch_.weights) {
    std::fill_n(to, share_.own.size(), 1.0F);
    return;
  }
  const auto given = batch_.weights.span<float>();
  ensure(given.size() == batch_.tokens.span<int32_t>().size(), "batch weights of {} tokens",
         given.size());
  std::ranges::transform(share_.own, to, [&](int64_t token) { return given[token]; });
}

void BatchInputs::Filler::fill_experts() const {
  const Tensor experts = at(inputs_.experts);
  const auto to = experts.span<int32_t>();
  if (!batch_.experts) {
    std::ranges::fill(to, -1);
    return;
  }
  const int64_t top_k = experts.shape[2];
  const int64_t num_tokens = batch_.tokens.num_elements();
  require(batch_.experts.num_elements() == experts.shape[0] * num_tokens * top_k,
          "a micro-batch names {} experts; it must name {} for each of {} tokens in each of {} MoE "
          "layers",
          batch_.experts.num_elements(), top_k, num_tokens, experts.shape[0]);
  const int32_t* const from = batch_.experts.as<int32_t>();
  int32_t* next = to.data();
  for (int64_t layer = 0; layer < experts.shape[0]; ++layer) {
    for (const int64_t token : share_.own)
      next = std::copy_n(from + (layer * num_tokens + token) * top_k, top_k, next);
  }
}

void BatchInputs::Filler::fill_noise() const {
  const RouterNoise& given = batch_.noise;
  if (inputs_.token_numbers) {
    std::ranges::transform(share_.own, at(inputs_.token_numbers).as<int64_t>(),
                           [&](int64_t token) { return given.first_token + token; });
  }
  const auto eps = given.training ? static_cast<float>(inputs_.router_jitter_) : 0.0F;
  int32_t* words = at(inputs_.noise).as<int32_t>();
  for (int64_t layer = 0; layer < inputs_.noise.shape[0]; ++layer, words += kNumNoiseWords) {
    const uint64_t key = mix(given.key, static_cast<uint64_t>(layer));
    words[kNoiseKeyLow] = static_cast<int32_t>(static_cast<uint32_t>(key));
    words[kNoiseKeyHigh] = static_cast<int32_t>(static_cast<uint32_t>(key >> 32U));
    words[kNoiseSize] = std::bit_cast<int32_t>(eps);
    words[kNoiseTraining] = given.training ? 1 : 0;
  }
}

void BatchInputs::Filler::fill_segments() const {
  if (batch_.context != nullptr) {
    std::ranges::copy(batch_.context->segments, at(inputs_.segments).as<int32_t>());
    return;
  }
  const auto ends = batch_.cu_seqlens.span<int32_t>();
  int32_t* const to = at(inputs_.segments).as<int32_t>();
  for (size_t i = 0; i < share_.own.size(); ++i) {
    const auto after = std::ranges::upper_bound(ends, static_cast<int32_t>(share_.own[i]));
    to[i] = static_cast<int32_t>(after - ends.begin() - 1);
  }
}

/// Where a sequence ends before the shifted token there is nothing to predict; the layer is shown
/// the sequence's last token then, which no prediction depends on. Tokens that fill a sequence's
/// chunks are behind its end.
void BatchInputs::Filler::fill_predictions() const {
  const int64_t total = batch_.tokens.num_elements();
  const std::vector<int32_t> documents =
      batch_.context == nullptr ? std::vector<int32_t>() : bounds_of(batch_.positions);
  const std::span<const int32_t> ends =
      batch_.context == nullptr ? batch_.cu_seqlens.span<int32_t>() : std::span(documents);
  for (size_t i = 0; i < inputs_.predictions.size(); ++i) {
    const Prediction& prediction = inputs_.predictions[i];
    auto shifted = shift_in_sequences(ends, total, static_cast<int64_t>(i) + 1);
    take_shifted(batch_.labels, shifted, share_.own, at(prediction.labels));
    if (!share_.is_whole)
      take_shifted(batch_.labels, shifted, share_.group, at(prediction.gathered_labels));
    for (int64_t token = 0; token < total; ++token) {
      int64_t& place = shifted[token];
      if (place < 0) place = *std::ranges::upper_bound(ends, static_cast<int32_t>(token)) - 1;
    }
    take_shifted(batch_.tokens, shifted, share_.group, at(prediction.tokens));
  }
}

}  // namespace tessera
