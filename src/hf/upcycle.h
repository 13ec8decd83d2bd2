#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "hf/convert.h"

namespace tessera {

/// How a dense model becomes one of experts: EeGgTt of the Megatron-Core MoE report (section 7.6,
/// figure 42; He et al. 2024, "Upcycling large language models into mixture of experts"). Each MLP
/// is cut along its inner size into `granularity` shards, and `copies` copies of all shards are the
/// experts; expert copy * granularity + shard has shard `shard`. The shards of a copy have the same
/// random row of the router, so that a token always takes whole copies.
///
/// A granularity of 1 is sparse upcycling (Komatsuzaki et al. 2022).
struct UpcycleSpec {
  int64_t copies = 8;
  int64_t granularity = 1;
  int64_t top_k = 2;  ///< experts of a token, a multiple of the granularity
  /// Scale the chosen probabilities to sum 1: then the first forward pass is the dense model's
  /// whatever the router. Without it the probabilities are those of a softmax over all experts, and
  /// it is the dense model's for a router that is nearly uniform, which the default deviation
  /// makes.
  bool normalize = true;
  double router_deviation = 0;  ///< of random router rows; 0: 0.02, or 1e-6 without normalizing
  int64_t first_dense_layers = 0;
  int64_t every = 1;
  uint64_t seed = 1;

  int64_t num_experts() const { return copies * granularity; }
  /// Factor on the experts' outputs that makes the first forward pass the dense model's: the G
  /// shards of a copy have equal probabilities, which sum over all chosen experts to 1 if
  /// normalized, else to T / (E G) under a uniform router.
  double weight_scale() const;
};

/// The model that upcycling makes, without multi-token prediction. Throws UserError for a model
/// that has experts already, and for sizes that do not divide, with the arithmetic.
ModelConfig upcycled_model(const ModelConfig& dense, const UpcycleSpec& spec);

struct UpcycleRequest {
  std::filesystem::path source;  ///< a checkpoint of `dense`
  std::filesystem::path target;
  ModelConfig dense;
  UpcycleSpec spec;
  std::string state;  ///< of the new checkpoint, see checkpoint.h
  ConvertOptions options;
};
ConvertReport upcycle(const UpcycleRequest& request);

}  // namespace tessera
