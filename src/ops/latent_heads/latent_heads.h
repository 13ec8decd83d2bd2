#pragma once

#include "ops/operator.h"

namespace tessera {

/// How the heads of multi-latent attention are put together.
struct LatentHeadsSpec {
  int64_t num_heads = 1;
  int64_t nope_size = 0;   ///< elements of a key head that each head has for itself
  int64_t rope_size = 0;   ///< elements of a key head that all heads share
  int64_t value_size = 0;  ///< elements of a value head

  int64_t key_size() const { return nope_size + rope_size; }
};

/// Splits what the key-value latent was projected to, and gives every key head the shared rotated
/// part (DeepSeek-V2, section 2.1.2): (kv A [T, N·(nope + value)], by head its nope elements and
/// then its value, shared A [T, rope]) -> (keys A [T, N·(nope + rope)], values A [T, N·value]).
/// Dim T may be ragged.
class LatentHeads final : public Operator {
 public:
  static constexpr std::string_view kName = "latent_heads";
  enum Input : int { kKv, kShared };
  enum Output : int { kKeys, kValues };

  /// Throws UserError unless all sizes are positive.
  explicit LatentHeads(const LatentHeadsSpec& spec);

  std::string_view name() const override { return kName; }
  std::string attributes() const override;
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  void differentiate(GradientBuilder& builder) const override;
  const LatentHeadsSpec& spec() const { return spec_; }

 private:
  LatentHeadsSpec spec_;
};

/// (grad of keys A [T, N·(nope + rope)], grad of values A [T, N·value]) -> (grad of kv A
/// [T, N·(nope + value)], grad of shared A [T, rope], the sum over heads).
class LatentHeadsBackward final : public Operator {
 public:
  static constexpr std::string_view kName = "latent_heads_backward";
  enum Input : int { kGradKeys, kGradValues };
  enum Output : int { kGradKv, kGradShared };

  explicit LatentHeadsBackward(const LatentHeadsSpec& spec) : spec_(spec) {}

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  const LatentHeadsSpec& spec() const { return spec_; }

 private:
  LatentHeadsSpec spec_;
};

OperatorPtr make_latent_heads(const LatentHeadsSpec& spec);
void add_latent_heads_cpu(KernelTable& table);
void add_latent_heads_cuda(KernelTable& table);

}  // namespace tessera
