#include "parallel/options.h"

#include <algorithm>

#include "core/error.h"

namespace tessera {

void add_parallel_options(ConfigSchema& schema, ParallelSpec& parallel) {
  LayoutSpec& layout = parallel.layout;
  schema.add("parallel.tp", &layout.tp, "Tensor parallelism of the dense parts", at_least(1));
  schema.add("parallel.cp", &layout.cp, "Context parallelism: ranks that share a sequence",
             at_least(1));
  schema.add("parallel.dp", &layout.dp, "Data parallelism; 0: what the ranks leave", at_least(0));
  schema.add("parallel.pp", &layout.pp, "Pipeline stages", at_least(1));
  schema.add("parallel.ep", &layout.ep, "Expert parallelism, folded over tp, cp and dp",
             at_least(1));
  schema.add("parallel.etp", &layout.etp, "Tensor parallelism of the experts", at_least(1));
  schema.add("parallel.dense_order", &layout.dense_order,
             "Axes of the dense parts from neighbouring ranks outwards");
  schema.add("parallel.expert_order", &layout.expert_order,
             "Axes of the experts from neighbouring ranks outwards");
  schema.add_enum(
      "parallel.attention", &parallel.attention,
      {{"tensor", AttentionParallel::kTensor}, {"ulysses", AttentionParallel::kUlysses}},
      "What ranks of tp share of attention: the heads' weights, or, with whole weights, "
      "the tokens (heads by all-to-all)");
  schema.add_enum("parallel.context", &parallel.context,
                  {{"ring", ContextExchange::kRing},
                   {"all_to_all", ContextExchange::kAllToAll},
                   {"hierarchical", ContextExchange::kHierarchical}},
                  "How ranks of cp see one another's keys and values");
  schema.add("parallel.context_inner", &parallel.context_inner,
             "Ranks of cp that exchange heads by all-to-all (hierarchical)", at_least(1));
  schema.add_enum("parallel.dispatcher", &parallel.dispatcher,
                  {{"auto", DispatcherRequest::kAuto},
                   {"all_to_all", DispatcherRequest::kAllToAll},
                   {"all_gather", DispatcherRequest::kAllGather}},
                  "How tokens reach experts on other ranks; auto: what moves fewer bytes");
  schema.add_enum("parallel.pipeline_schedule", &parallel.schedule,
                  {{"gpipe", PipelineKind::kGpipe},
                   {"1f1b", PipelineKind::kOneFOneB},
                   {"interleaved", PipelineKind::kInterleaved}},
                  "Order of the stages' passes");
  schema.add("parallel.pipeline_chunks", &parallel.chunks_per_stage,
             "Model chunks of a stage (interleaved)", at_least(1));
  schema.add(
      "parallel.pipeline_layout", &parallel.pipeline_layout,
      "What each chunk holds, e.g. \"Et*3|(tt|)*2mL\" (m: multi-token prediction); empty: layers "
      "spread evenly");
  schema.add("parallel.split_weights", &parallel.split_weights,
             "Delay weight gradients into what would be idle time (zero bubble)");
}

int64_t heads_degree(const ParallelSpec& parallel, int64_t cp) {
  switch (parallel.context) {
    case ContextExchange::kRing:
      return 1;
    case ContextExchange::kAllToAll:
      return cp;
    case ContextExchange::kHierarchical:
      break;
  }
  require(cp % parallel.context_inner == 0,
          "parallel.context_inner {} does not divide parallel.cp {}", parallel.context_inner, cp);
  return parallel.context_inner;
}

int64_t least_ranks(const ParallelSpec& parallel) {
  const LayoutSpec& layout = parallel.layout;
  return layout.tp * layout.cp * layout.pp * std::max<int64_t>(layout.dp, 1);
}

namespace {

/// Chunks hand micro-batches to the next stage, which must be another rank.
void check_chunks(int64_t stages, int64_t chunks, const char* key) {
  require(stages > 1 || chunks == 1,
          "{} has {} chunks a stage, but parallel.pp is 1, where nothing waits that several chunks "
          "would keep busy; take one chunk, or parallel.pp of 2 or more",
          key, chunks);
}

}  // namespace

PipelineLayout make_pipeline_layout(const ParallelSpec& parallel, const LayerCounts& layers) {
  const int64_t stages = parallel.layout.pp;
  if (parallel.pipeline_layout.empty()) {
    check_chunks(stages, parallel.chunks_per_stage, "parallel.pipeline_chunks");
    return even_pipeline_layout(stages, parallel.chunks_per_stage, layers);
  }
  PipelineLayout layout = parse_pipeline_layout(parallel.pipeline_layout, stages, layers);
  require(parallel.chunks_per_stage == 1 || parallel.chunks_per_stage == layout.chunks_per_stage(),
          "parallel.pipeline_chunks is {}, and parallel.pipeline_layout has {} chunks a stage; "
          "leave the former 1",
          parallel.chunks_per_stage, layout.chunks_per_stage());
  check_chunks(stages, layout.chunks_per_stage(), "parallel.pipeline_layout");
  return layout;
}

PipelineSpec pipeline_spec(const ParallelSpec& parallel, const PipelineLayout& layout,
                           int64_t num_micro_batches) {
  return {.kind = parallel.schedule,
          .num_stages = layout.num_stages,
          .num_chunks = layout.chunks_per_stage(),
          .num_micro_batches = num_micro_batches,
          .split_weights = parallel.split_weights};
}

}  // namespace tessera
