#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "model/run/key_value_cache.h"
#include "model/run/training_model.h"
#include "ops/choose_token/token_rule.h"

namespace tessera {

/// What a forward-only model computes at its end.
enum class ForwardGoal {
  kLoss,    ///< cross-entropy per token
  kLogits,  ///< scores of the next token
  kTokens,  ///< the next tokens of several sequences
};

/// New tokens of S sequences over a paged cache, those of one sequence behind one another; ports of
/// the same names (model/build/ports.h) say more.
struct SequenceRows {
  std::vector<int32_t> tokens;
  std::vector<int32_t> positions;   ///< of the tokens in their sequences
  std::vector<int32_t> cache_rows;  ///< where their keys and values go
  std::vector<int32_t> cu_seqlens = {0};
  std::vector<int32_t> lengths;     ///< of the sequences, with these tokens
  std::vector<int32_t> page_table;  ///< [S, pages_of(capacity)]
  std::vector<int32_t> slots;       ///< where the sequences' states are
  /// The tokens whose next ones are chosen, in their order, and how.
  std::vector<int32_t> chosen_rows;
  std::vector<TokenRule> rules;
};

/// A token and its log-probability for each of SequenceRows::chosen_rows.
struct ChosenTokens {
  std::vector<int32_t> tokens;
  std::vector<double> log_probabilities;
};

/// Runs a model forward only, for T tokens at a time, keeping nothing: memory for two residual
/// streams and the largest working set. With a cache the T tokens continue the ones that the cache
/// holds. Experts are dropless here, whatever the training's capacity. The parameters and the cache
/// are in the memory of the back end's device and must outlive it, as must the experts, whose
/// biases a GPU knows as they are when it is made. On a GPU a pass is recorded, and repeated.
class ForwardModel {
 public:
  ForwardModel(const ModelConfig& config, const BatchShape& shape, ForwardGoal goal,
               const Backend& backend, ParameterSet& parameters, std::vector<ExpertState>& experts,
               KeyValueCache* cache = nullptr, int64_t chosen_rows = 0);
  ForwardModel(ForwardModel&&) noexcept;
  ~ForwardModel();

  /// −log p of each label of packed sequences, F32 [T] (0 where there is none), on the host.
  /// REQUIRES goal kLoss, no cache.
  Tensor run_loss(const MicroBatch& batch);
  /// The experts that the routers chose in the last run, I32 [MoE layers, T, K], on the host.
  /// REQUIRES a shape that tells routing.
  Tensor chosen_experts() const;
  /// Logits [T,V], on the host, of tokens that follow the cache's, which grows by T. REQUIRES goal
  /// kLogits and a cache with room.
  Tensor run_logits(std::span<const int32_t> tokens);
  /// Reads at most T tokens of at most max_sequences sequences, and chooses the next ones of at
  /// most chosen_rows of them. What is given is there until the next pass. REQUIRES goal kTokens
  /// and a paged cache.
  ChosenTokens run_sequences(const SequenceRows& rows);
  /// Logits [1,V] of one of the last pass's chosen rows, on the host, until the next pass. REQUIRES
  /// goal kTokens.
  Tensor logits_of(int64_t chosen_row);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Builds the programs of a ForwardModel, of which nothing is allocated, and so throws where the
/// back end does not take them. Bytes of the working memory of its layers.
int64_t plan_forward(const ModelConfig& config, const BatchShape& shape, ForwardGoal goal,
                     const Backend& backend, const std::optional<CacheShape>& cache);
/// What the compiler's passes did to each of them.
std::vector<CompileReport> report_forward(const ModelConfig& config, const BatchShape& shape,
                                          ForwardGoal goal, const Backend& backend,
                                          const std::optional<CacheShape>& cache);

}  // namespace tessera
