#include "parallel/options.h"

#include "core/error.h"
#include "core/text/nearest.h"

namespace tessera {
namespace {

void check_context(const ParallelSpec& parallel, int64_t cp) {
  const int64_t inner = parallel.context_inner;
  if (parallel.context != ContextExchange::kHierarchical) {
    require(inner == 1,
            "parallel.context_inner {} is for parallel.context \"hierarchical\", and that is "
            "\"{}\"; set it so, or leave parallel.context_inner 1",
            inner, parallel.context == ContextExchange::kRing ? "ring" : "all_to_all");
    return;
  }
  require(cp % inner == 0,
          "parallel.context_inner {} does not divide parallel.cp {}; the nearest that does is {}",
          inner, cp, nearest_divisors(cp, inner));
  require(inner > 1 || cp == 1,
          "parallel.context \"hierarchical\" with parallel.context_inner 1 is the ring alone; set "
          "parallel.context_inner to a divisor of parallel.cp {} above 1, or parallel.context = "
          "\"ring\"",
          cp);
}

void check_dispatch(const ParallelSpec& parallel, int64_t ep) {
  const int64_t inner = parallel.dispatch_inner;
  if (parallel.dispatcher != DispatcherRequest::kHierarchical) {
    require(inner == 1,
            "parallel.dispatch_inner {} is for parallel.dispatcher \"hierarchical\"; set it so, or "
            "leave parallel.dispatch_inner 1",
            inner);
    return;
  }
  require(ep % inner == 0,
          "parallel.dispatch_inner {} does not divide parallel.ep {}; the nearest that does is {}",
          inner, ep, nearest_divisors(ep, inner));
  require(inner > 1 || ep == 1,
          "parallel.dispatcher \"hierarchical\" with parallel.dispatch_inner 1 passes nothing on; "
          "set parallel.dispatch_inner to the ranks of ep {} in a node, or parallel.dispatcher = "
          "\"deduplicated\"",
          ep);
}

void check_chunks(const ParallelSpec& parallel, const PipelineLayout& layout) {
  const int64_t chunks = layout.chunks_per_stage();
  require(chunks == 1 || layout.num_stages > 1,
          "{} chunks in a pipeline of one stage, which would hand over to itself; set parallel.pp "
          "to 2 or more, or {}",
          chunks,
          parallel.pipeline_layout.empty() ? "parallel.pipeline_chunks = 1"
                                           : "leave out \"|\" in parallel.pipeline_layout");
  require(chunks > 1 || layout.num_stages == 1 || parallel.schedule != PipelineKind::kInterleaved,
          "parallel.pipeline_schedule \"interleaved\" with one chunk a stage is 1f1b; set "
          "parallel.pipeline_chunks to 2 or more, or parallel.pipeline_schedule = \"1f1b\"");
}

PipelineLayout read_layout(const ParallelSpec& parallel, const LayerCounts& layers) {
  const int64_t stages = parallel.layout.pp;
  PipelineLayout layout = parse_pipeline_layout(parallel.pipeline_layout, stages, layers);
  require(parallel.chunks_per_stage == 1 || parallel.chunks_per_stage == layout.chunks_per_stage(),
          "parallel.pipeline_chunks is {}, and parallel.pipeline_layout has {} chunks a stage; "
          "leave the former 1",
          parallel.chunks_per_stage, layout.chunks_per_stage());
  return layout;
}

}  // namespace

void add_parallel_options(ConfigSchema& schema, ParallelSpec& parallel) {
  LayoutSpec& layout = parallel.layout;
  const Range degree = between(1, kMaxRanks);
  schema.add("parallel.tp", &layout.tp, "Tensor parallelism of the dense parts", degree);
  schema.add("parallel.cp", &layout.cp, "Context parallelism: ranks that share a sequence", degree);
  schema.add("parallel.dp", &layout.dp, "Data parallelism; 0: what the ranks leave",
             between(0, kMaxRanks));
  schema.add("parallel.pp", &layout.pp, "Pipeline stages", degree);
  schema.add("parallel.ep", &layout.ep, "Expert parallelism, folded over tp, cp and dp", degree);
  schema.add("parallel.etp", &layout.etp, "Tensor parallelism of the experts", degree);
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
             "Ranks of cp that exchange heads by all-to-all (hierarchical)", degree);
  schema.add("parallel.dynamic_cp", &parallel.dynamic_cp,
             "Documents of very different lengths: each micro-batch is shared by as many ranks of "
             "cp and dp as its documents need, 1, 2, 4, ..., and work is balanced over them; cp "
             "says how many tokens a rank holds: train.micro_batch sequences' over cp");
  schema.add_enum("parallel.dispatcher", &parallel.dispatcher,
                  {{"auto", DispatcherRequest::kAuto},
                   {"all_to_all", DispatcherRequest::kAllToAll},
                   {"all_gather", DispatcherRequest::kAllGather},
                   {"deduplicated", DispatcherRequest::kDeduplicated},
                   {"hierarchical", DispatcherRequest::kHierarchical}},
                  "How tokens reach experts on other ranks; deduplicated: once to each rank that "
                  "has some of theirs; hierarchical: once to each node, and from there to these "
                  "ranks; auto: all_to_all or all_gather, what moves fewer bytes");
  schema.add("parallel.dispatch_inner", &parallel.dispatch_inner,
             "Ranks of ep that tokens are passed on among, those of a node (hierarchical)", degree);
  schema.add("parallel.all_to_all_efficiency", &parallel.all_to_all_efficiency,
             "For dispatcher = auto: an all-to-all's bandwidth as a share of an all-gather's, as "
             "measured on the machine; 1: bytes alone decide",
             above(0));
  schema.add_enum("parallel.exchange", &parallel.exchange,
                  {{"exact", ExchangeSizes::kExact},
                   {"direct", ExchangeSizes::kDirect},
                   {"bounded", ExchangeSizes::kBounded}},
                  "Rows that an all-to-all of tokens moves: those that are routed, which the host "
                  "waits to know (exact), or GPUs of one machine alone, which write them into one "
                  "another's memory (direct); or always as many as may be (bounded)");
  schema.add("parallel.clone_experts", &parallel.clone_experts,
             "Hot experts of other ranks that each rank of ep may clone to take a part of their "
             "tokens (ECHO); 0: none",
             between(0, kMaxClones));
  schema.add_enum("parallel.pipeline_schedule", &parallel.schedule,
                  {{"gpipe", PipelineKind::kGpipe},
                   {"1f1b", PipelineKind::kOneFOneB},
                   {"interleaved", PipelineKind::kInterleaved}},
                  "Order of the stages' passes");
  schema.add("parallel.pipeline_chunks", &parallel.chunks_per_stage,
             "Model chunks of a stage (interleaved)", degree);
  schema.add(
      "parallel.pipeline_layout", &parallel.pipeline_layout,
      "What each chunk holds, e.g. \"Et*3|(tt|)*2mL\" (m: multi-token prediction); empty: layers "
      "spread evenly");
  schema.add("parallel.split_weights", &parallel.split_weights,
             "Delay weight gradients into what would be idle time (zero bubble)");
}

int64_t heads_degree(const ParallelSpec& parallel, int64_t cp) {
  check_context(parallel, cp);
  return parallel.context == ContextExchange::kAllToAll ? cp : parallel.context_inner;
}

int64_t dispatch_nodes(const ParallelSpec& parallel, int64_t ep) {
  check_dispatch(parallel, ep);
  return parallel.dispatcher == DispatcherRequest::kHierarchical ? ep / parallel.dispatch_inner : 1;
}

PipelineLayout make_pipeline_layout(const ParallelSpec& parallel, const LayerCounts& layers) {
  PipelineLayout layout =
      parallel.pipeline_layout.empty()
          ? even_pipeline_layout(parallel.layout.pp, parallel.chunks_per_stage, layers)
          : read_layout(parallel, layers);
  check_chunks(parallel, layout);
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
