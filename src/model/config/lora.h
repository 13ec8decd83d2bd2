#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/config.h"

namespace tessera {

struct ModelConfig;

/// Low-rank adapters (LoRA: Hu et al., 2021, section 4.1). Beside a matrix W [out, in] stand A
/// [r, in] and B [out, r]: y = W x + scale · B (A x). With adapters nothing else is trained.
struct LoraConfig {
  int64_t rank = 0;  ///< r; 0: no adapters, everything is trained
  double alpha = 16;
  /// scale = alpha / sqrt(r) instead of alpha / r (rsLoRA: Kalajdzievski, 2023).
  bool rank_stabilized = false;
  /// "all", or matrices by name ("attn.q"), or what they belong to ("attn", "moe.experts").
  std::vector<std::string> targets = {"all"};

  bool is_on() const { return rank > 0; }
  double scale() const;
};

/// The matrices of the model's layers that may have adapters, by name without ".weight": all that
/// hidden states are multiplied by, but routers, gates of one number a token or head, Mamba-2's,
/// and attn.kv_up, which generation applies to latents in another order.
std::vector<std::string> adaptable_matrices(const ModelConfig& config);

/// Whether a matrix has adapters: it is one of those and a target.
bool is_adapted(const ModelConfig& config, std::string_view matrix);

/// Weights in adapters of the whole model, and those that one token meets. Counts that 64 bits do
/// not hold are the largest that they do.
struct AdapterCount {
  int64_t total = 0;
  int64_t active = 0;
};
AdapterCount count_adapters(const ModelConfig& config);

/// Binds every key of [lora].
void add_lora_options(ConfigSchema& schema, LoraConfig& lora);

/// Refuses targets that the model lacks and what does not go with adapters; part of validate().
void validate_lora(const ModelConfig& config);

}  // namespace tessera
