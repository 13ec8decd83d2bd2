#pragma once

#include "ops/operator.h"

namespace tessera {

/// Heads of multi-latent attention over cached latents.
struct LatentCacheSpec {
  int64_t num_heads = 1;   ///< N
  int64_t nope_size = 0;   ///< elements of a key head that come from the latent
  int64_t rope_size = 0;   ///< rotated elements of a key head, which all heads share
  int64_t value_size = 0;  ///< elements of a value head
  int64_t rank = 0;        ///< R, of the latent

  /// Rows of the weight that makes keys and values from latents.
  int64_t up_rows() const { return num_heads * (nope_size + value_size); }
};

/// For generation, keys and values of multi-latent attention need not be made: with
/// kv_up A [N·(nope + value), R], by head W_k and then W_v, a head's scores are
/// q · (W_k c) = (W_kᵀ q) · c and its output Σ p (W_v c) = W_v (Σ p c), so that latents c serve all
/// heads as keys and values (DeepSeek-V2, section 2.1.2, "absorbed"). These three operators stand
/// around an attention with one key-value head. Sums are F32, results are rounded to A.

/// (latent A [T, R], rotated shared key A [T, rope]) -> A [T, R + rope], what is cached.
class LatentKeys final : public Operator {
 public:
  static constexpr std::string_view kName = "latent_keys";
  enum Input : int { kLatent, kShared };
  enum Output : int { kKeys };

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
};

/// (rotated queries A [T, N·(nope + rope)], kv_up) -> A [T, N·(R + rope)].
class LatentQueries final : public Operator {
 public:
  static constexpr std::string_view kName = "latent_queries";
  enum Input : int { kQ, kUp };
  enum Output : int { kQueries };

  explicit LatentQueries(const LatentCacheSpec& spec) : spec_(spec) {}
  const LatentCacheSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  LatentCacheSpec spec_;
};

/// (attended latents A [T, N·R], kv_up) -> A [T, N·value].
class LatentOutputs final : public Operator {
 public:
  static constexpr std::string_view kName = "latent_outputs";
  enum Input : int { kAttended, kUp };
  enum Output : int { kO };

  explicit LatentOutputs(const LatentCacheSpec& spec) : spec_(spec) {}
  const LatentCacheSpec& spec() const { return spec_; }

  std::string_view name() const override { return kName; }
  std::vector<ValueType> infer(std::span<const ValueType> inputs) const override;
  Cost cost(std::span<const ValueType> inputs, std::span<const ValueType> outputs) const override;

 private:
  LatentCacheSpec spec_;
};

OperatorPtr make_latent_keys();
/// Throw UserError unless all sizes are positive.
OperatorPtr make_latent_queries(const LatentCacheSpec& spec);
OperatorPtr make_latent_outputs(const LatentCacheSpec& spec);
/// Rows do not depend on one another (gemm_of_rows).
void add_latent_cache_cpu(KernelTable& table);
void add_latent_cache_cuda(KernelTable& table);

}  // namespace tessera
