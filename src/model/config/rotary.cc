#include "model/config/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace tessera {
namespace {

std::vector<float> dynamic_frequencies(const RopeConfig& rope, int64_t rotary_dim,
                                       int64_t sequence_length) {
  const auto dim = static_cast<double>(rotary_dim);
  const double stretch = static_cast<double>(std::max(sequence_length, rope.max_length)) /
                         static_cast<double>(rope.max_length);
  const double growth = rope.factor * stretch - (rope.factor - 1);
  return default_inverse_frequencies(rotary_dim, rope.base * std::pow(growth, dim / (dim - 2)));
}

/// The index (not whole) of the pair that makes `turns` turns within the original context.
double pair_of_turns(const RopeConfig& rope, int64_t rotary_dim, double turns) {
  const double length = static_cast<double>(rope.original_length);
  return static_cast<double>(rotary_dim) * std::log(length / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(rope.base));
}

std::vector<float> yarn_frequencies(const RopeConfig& rope, int64_t rotary_dim) {
  double low = pair_of_turns(rope, rotary_dim, rope.beta_fast);
  double high = pair_of_turns(rope, rotary_dim, rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rotary_dim - 1));
  if (low == high) high += 0.001;  // as Hugging Face does, against a division by 0
  std::vector<float> frequencies = default_inverse_frequencies(rotary_dim, rope.base);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    const auto kept = static_cast<double>(frequencies[i]);
    frequencies[i] = static_cast<float>(kept / rope.factor * ramp + kept * (1 - ramp));
  }
  return frequencies;
}

/// Pairs behind the rotated share stand still.
void stop_rest(const RopeConfig& rope, int64_t head_size, std::vector<float>& frequencies) {
  const double turning = std::floor(rope.fraction * static_cast<double>(head_size) / 2);
  std::fill(frequencies.begin() + static_cast<int64_t>(turning), frequencies.end(), 0.0F);
}

bool is_long(const RopeConfig& rope, int64_t sequence_length) {
  return sequence_length > rope.original_length;
}

std::vector<float> long_rope_frequencies(const RopeConfig& rope, int64_t rotary_dim,
                                         int64_t sequence_length) {
  const std::vector<double>& factors =
      is_long(rope, sequence_length) ? rope.long_factors : rope.short_factors;
  std::vector<float> frequencies = default_inverse_frequencies(rotary_dim, rope.base);
  for (size_t i = 0; i < frequencies.size(); ++i) frequencies[i] /= static_cast<float>(factors[i]);
  return frequencies;
}

double long_rope_amplitude(const RopeConfig& rope, int64_t sequence_length) {
  const double given = is_long(rope, sequence_length) ? rope.long_mscale : rope.short_mscale;
  if (given > 0 || rope.factor <= 1) return given > 0 ? given : 1.0;
  return std::sqrt(1 + std::log(rope.factor) / std::log(static_cast<double>(rope.original_length)));
}

float llama3_frequency(const RopeConfig& rope, double frequency) {
  const auto length = static_cast<double>(rope.original_length);
  const double turns = length * frequency / (2 * std::numbers::pi);
  if (turns >= rope.high_frequency_factor) return static_cast<float>(frequency);
  if (turns < rope.low_frequency_factor) return static_cast<float>(frequency / rope.factor);
  const double smooth = (turns - rope.low_frequency_factor) /
                        (rope.high_frequency_factor - rope.low_frequency_factor);
  return static_cast<float>((1 - smooth) * frequency / rope.factor + smooth * frequency);
}

}  // namespace

std::vector<float> inverse_frequencies(const RopeConfig& rope, int64_t rotary_dim,
                                       int64_t sequence_length) {
  if (rope.scaling == RopeScaling::kDynamic)
    return dynamic_frequencies(rope, rotary_dim, sequence_length);
  if (rope.scaling == RopeScaling::kYarn) return yarn_frequencies(rope, rotary_dim);
  if (rope.scaling == RopeScaling::kLongRope)
    return long_rope_frequencies(rope, rotary_dim, sequence_length);
  std::vector<float> frequencies = default_inverse_frequencies(rotary_dim, rope.base);
  for (float& frequency : frequencies) {
    if (rope.scaling == RopeScaling::kLinear) frequency /= static_cast<float>(rope.factor);
    if (rope.scaling == RopeScaling::kLlama3) frequency = llama3_frequency(rope, frequency);
  }
  if (rope.proportional) stop_rest(rope, rotary_dim, frequencies);
  return frequencies;
}

double yarn_scale(double factor, double weight) {
  return factor <= 1 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
}

double rotary_amplitude(const RopeConfig& rope, int64_t sequence_length) {
  if (rope.scaling == RopeScaling::kLongRope) return long_rope_amplitude(rope, sequence_length);
  if (rope.scaling != RopeScaling::kYarn) return 1.0;
  if (rope.attention_factor > 0) return rope.attention_factor;
  if (rope.mscale > 0 && rope.mscale_all_dims > 0)
    return yarn_scale(rope.factor, rope.mscale) / yarn_scale(rope.factor, rope.mscale_all_dims);
  return yarn_scale(rope.factor, 1.0);
}

}  // namespace tessera
