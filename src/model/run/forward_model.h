#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "model/run/training_model.h"

namespace tessera {

/// What a forward-only model computes at its end.
enum class ForwardGoal {
  kLoss,    ///< cross-entropy per token
  kLogits,  ///< scores of the next token
};

/// Keys and values, or states, of all layers, for generation, in the memory of the device that
/// generates: of one sequence, or pages for several, whose owner keeps account of them.
class KeyValueCache {
 public:
  KeyValueCache(const ModelConfig& config, DType dtype, int64_t capacity,
                Device& device = host_device());
  KeyValueCache(const ModelConfig& config, DType dtype, const CacheShape& shape,
                Device& device = host_device());
  const CacheShape& shape() const { return shape_; }
  int64_t capacity() const { return shape_.capacity; }
  int64_t length() const { return length_; }
  void set_length(int64_t length) { length_ = length; }
  Tensor keys(int64_t layer) const { return keys_[layer]; }
  Tensor values(int64_t layer) const { return values_[layer]; }
  /// Sets the ports of what the cache holds for a layer.
  void set_ports(int64_t layer, PortTensors& ports) const;

 private:
  CacheShape shape_;
  int64_t length_ = 0;
  std::vector<OwnedTensor> keys_;
  std::vector<OwnedTensor> values_;
  /// Of layers with Gated DeltaNet; keys and values of these are empty.
  std::vector<std::vector<std::pair<Port, OwnedTensor>>> states_;
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
};

/// Runs a model forward only, for T tokens at a time, keeping nothing: memory for two residual
/// streams and the largest working set. With a cache the T tokens continue the ones that the cache
/// holds. Experts are dropless here, whatever the training's capacity. The parameters and the cache
/// are in the memory of the back end's device and must outlive it, as must the experts, whose
/// biases a GPU knows as they are when it is made.
class ForwardModel {
 public:
  ForwardModel(const ModelConfig& config, const BatchShape& shape, ForwardGoal goal,
               const Backend& backend, ParameterSet& parameters, std::vector<ExpertState>& experts,
               KeyValueCache* cache = nullptr);
  ForwardModel(ForwardModel&&) noexcept;
  ~ForwardModel();

  /// −log p of each label of packed sequences, F32 [T] (0 where there is none), on the host.
  /// REQUIRES goal kLoss, no cache.
  Tensor run_loss(const MicroBatch& batch);
  /// Logits [T,V], on the host, of tokens that follow the cache's, which grows by T. REQUIRES goal
  /// kLogits and a cache with room.
  Tensor run_logits(std::span<const int32_t> tokens);
  /// Logits of at most T tokens of at most max_sequences sequences, on the host: the first rows of
  /// [T,V]. REQUIRES goal kLogits and a paged cache.
  Tensor run_sequences(const SequenceRows& rows);

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
