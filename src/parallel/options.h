#pragma once

#include <string>

#include "core/config/config.h"
#include "parallel/dispatch_choice.h"
#include "parallel/layout.h"
#include "parallel/pipeline_layout.h"
#include "parallel/pipeline_schedule.h"

namespace tessera {

/// What the ranks of a tensor-parallel group share of attention.
enum class AttentionParallel : uint8_t {
  kTensor,   ///< its heads' weights (Megatron-LM), with sequence parallelism
  kUlysses,  ///< its tokens: weights are whole on each rank, heads are exchanged by all-to-all
             ///< (DeepSpeed Ulysses; MegaScale-MoE, section 3.1)
};

/// How ranks of context parallelism see one another's keys and values.
enum class ContextExchange : uint8_t {
  kRing,         ///< keys and values pass around, tokens dealt in zigzag
  kAllToAll,     ///< heads for tokens
  kHierarchical  ///< all-to-all within `context_inner` neighbouring ranks, a ring over the rest
};

/// The most that ParallelSpec::clone_experts can be.
inline constexpr int64_t kMaxClones = 64;

/// How a model is spread over ranks, as configured. What says how an axis is used may stand where
/// the axis has degree 1, so that one configuration serves several sizes; what contradicts another
/// setting is refused.
struct ParallelSpec {
  LayoutSpec layout;
  AttentionParallel attention = AttentionParallel::kTensor;
  ContextExchange context = ContextExchange::kRing;
  int64_t context_inner = 1;
  bool dynamic_cp = false;  ///< micro-batches have degrees of their own, see ContextPlan
  DispatcherRequest dispatcher = DispatcherRequest::kAuto;
  int64_t dispatch_inner = 1;          ///< hierarchical: ranks of EP in a node
  double all_to_all_efficiency = 1.0;  ///< see DispatchSizes
  ExchangeSizes exchange = ExchangeSizes::kExact;
  int64_t clone_experts = 0;  ///< spare slots of a rank for clones of hot experts of other ranks
  PipelineKind schedule = PipelineKind::kOneFOneB;
  int64_t chunks_per_stage = 1;
  std::string pipeline_layout;  ///< see parse_pipeline_layout; empty: even
  bool split_weights = false;
};

/// Binds every key of [parallel].
void add_parallel_options(ConfigSchema& schema, ParallelSpec& parallel);

/// Ranks of context parallelism `cp` that exchange heads by all-to-all; a ring goes over the rest.
/// Throws UserError where parallel.context_inner does not divide them, and where it and
/// parallel.context contradict each other.
int64_t heads_degree(const ParallelSpec& parallel, int64_t cp);

/// Nodes that tokens cross on their way to the experts of EP `ep`; 1 where they do not go node by
/// node. Throws UserError where parallel.dispatch_inner does not divide the ranks, and where it and
/// parallel.dispatcher contradict each other.
int64_t dispatch_nodes(const ParallelSpec& parallel, int64_t ep);

/// What each chunk of the pipeline holds of a model of this many layers. Throws UserError for
/// chunks that the schedule or the number of stages does not allow.
PipelineLayout make_pipeline_layout(const ParallelSpec& parallel, const LayerCounts& layers);

/// The schedule of `num_micro_batches` through that pipeline.
PipelineSpec pipeline_spec(const ParallelSpec& parallel, const PipelineLayout& layout,
                           int64_t num_micro_batches);

}  // namespace tessera
