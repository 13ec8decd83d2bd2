#include "model/weights/qk_clip.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace tessera {
namespace {

ClippedRows whole_heads(int64_t head_rows, double power) {
  return {
      .head_rows = head_rows, .num_first = head_rows, .first_power = power, .other_power = power};
}

std::optional<ClippedRows> find_latent(const ModelConfig& config, std::string_view weight) {
  const LatentConfig& latent = config.latent;
  const std::string_view queries = latent.query_rank > 0 ? "attn.q_up.weight" : "attn.q.weight";
  if (weight == queries) {
    return ClippedRows{.head_rows = config.head_dim(),
                       .num_first = latent.nope_size,
                       .first_power = 0.5,
                       .other_power = 1};
  }
  if (weight == "attn.kv_up.weight") {
    return ClippedRows{.head_rows = latent.nope_size + latent.value_size,
                       .num_first = latent.nope_size,
                       .first_power = 0.5,
                       .other_power = 0};
  }
  return std::nullopt;
}

/// "q" or "k" of the weights that logits are linear in.
std::string_view projection_of(const ModelConfig& config, std::string_view weight) {
  const bool normed = config.qk_norm == QkNorm::kAll;
  for (const std::string_view name : {"q", "k"}) {
    const std::string begin = fmt::format("attn.{}{}.", name, normed ? "_norm" : "");
    if (weight.starts_with(begin)) return name;
  }
  return "";
}

}  // namespace

std::optional<ClippedRows> find_clipped_rows(const ModelConfig& config, std::string_view weight) {
  ensure(config.qk_norm != QkNorm::kHead && config.qk_norm != QkNorm::kL2,
         "QK clip of heads that are normed one by one");
  if (config.is_latent()) return find_latent(config, weight);
  const std::string_view projection = projection_of(config, weight);
  if (projection.empty()) return std::nullopt;
  const bool shares_keys = config.kv_heads() < config.num_heads;
  if (!shares_keys) return whole_heads(config.head_dim(), 0.5);
  if (projection == "k") return std::nullopt;
  return whole_heads(config.head_dim(), 1);
}

QkClip::QkClip(const ModelConfig& config, double limit, std::span<const float> max_logits)
    : config_(config), factors_(max_logits.size(), 1.0) {
  ensure(std::ssize(max_logits) == config.all_layers() * config.num_heads && !max_logits.empty(),
         "largest logits of {} heads in a model of {} layers with {}", max_logits.size(),
         config.all_layers(), config.num_heads);
  max_logit_ = std::ranges::max(max_logits);
  const auto most = static_cast<float>(limit);  // as MaxLogits has it
  for (size_t i = 0; i < max_logits.size(); ++i) {
    if (!(max_logits[i] > most) || !std::isfinite(max_logits[i])) continue;
    factors_[i] = limit / static_cast<double>(max_logits[i]);
    ++num_clipped_;
  }
}

void QkClip::fill_factors(int64_t layer, std::string_view weight, int64_t first_row,
                          std::span<float> factors) const {
  std::ranges::fill(factors, 1.0F);
  const std::optional<ClippedRows> rows = find_clipped_rows(config_, weight);
  const auto of_heads = std::span(factors_).subspan(layer * config_.num_heads, config_.num_heads);
  const bool clips = std::ranges::any_of(of_heads, [](double factor) { return factor != 1.0; });
  if (!rows || !clips) return;
  for (int64_t i = 0; i < std::ssize(factors); ++i) {
    const int64_t row = first_row + i;
    const bool is_first = row % rows->head_rows < rows->num_first;
    const double factor = of_heads[row / rows->head_rows];
    factors[i] =
        static_cast<float>(std::pow(factor, is_first ? rows->first_power : rows->other_power));
  }
}

}  // namespace tessera
