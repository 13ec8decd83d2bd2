#include "train/setup/context_batches.h"

#include <algorithm>
#include <bit>

#include "core/error.h"
#include "train/setup/step_schedule.h"

namespace tessera {
namespace {

/// Multiply-adds that a rank does while an element of keys or values comes from another one.
constexpr double kWorkOfElement = 50;

/// Multiply-adds of a token, and of a query with a key that it sees, in all layers.
ContextCosts find_costs(const ModelConfig& model) {
  ContextCosts costs{.token = static_cast<double>(count_parameters(model).active)};
  for (int64_t i = 0; i < model.all_layers(); ++i) {
    const LayerKind kind = model.layer_kind(i);
    if (!kind.attends()) continue;
    const ModelConfig layer = model.of_layer(kind);
    const auto widths = static_cast<double>(layer.head_dim() + layer.value_dim());
    const double pair = widths * static_cast<double>(layer.num_heads);
    if (kind.window) {
      costs.token += pair * static_cast<double>(layer.window);
    } else {
      costs.pair += pair;
    }
    costs.exchange += kWorkOfElement * widths * static_cast<double>(layer.kv_heads());
  }
  return costs;
}

int64_t rank_tokens(const Settings& settings, int64_t cp) {
  return settings.train.micro_batch * settings.data.sequence_length / cp;
}

void refuse(bool wrong, std::string_view what, std::string_view why) {
  require(!wrong, "parallel.dynamic_cp does not go with {}: {}", what, why);
}

void validate_layout(const ParallelSpec& parallel) {
  refuse(parallel.context != ContextExchange::kRing, "parallel.context other than \"ring\"",
         "documents are shared by rings of several sizes; set parallel.context = \"ring\"");
  refuse(parallel.attention != AttentionParallel::kTensor, "parallel.attention = \"ulysses\"",
         "heads would be exchanged in groups of one size; set parallel.attention = \"tensor\"");
  refuse(parallel.layout.pp > 1, fmt::format("parallel.pp {}", parallel.layout.pp),
         "a step's number of micro-batches depends on its documents, and stages are planned for "
         "one; set parallel.pp = 1");
  refuse(parallel.schedule != PipelineKind::kOneFOneB, "parallel.pipeline_schedule = \"gpipe\"",
         "memory is planned for one micro-batch at a time; leave it out");
  refuse(parallel.split_weights, "parallel.split_weights",
         "memory is planned for one micro-batch at a time; leave it out");
}

void validate_training(const Settings& settings) {
  refuse(settings.train.objective != Objective::kNextToken, "dpo and rl",
         "their answers are packed as they come; leave it out");
  refuse(!settings.data.split_documents, "data.split_documents = false",
         "documents that see one another cannot go to different ranks; set it to true");
  refuse(step_schedule(settings.train) != StepSchedule::kAsBuilt,
         fmt::format("train.schedule = \"{}\"", settings.train.schedule),
         "the order of passes depends on their number; leave it out");
  refuse(!settings.train.offload.empty(), "train.offload",
         "copies are planned for a number of micro-batches; leave it out");
  refuse(settings.train.stashes(), "train.stash",
         "pages are planned for a number of micro-batches; set train.stash = \"none\"");
  refuse(settings.shard.release_gradients, "optim.release_gradients",
         "all micro-batches of a step would be held at once; leave it out");
  refuse(settings.train.precision == Precision::kFp8, "train.precision = \"fp8\"",
         "scales would be of tokens that only fill micro-batches, too; set it to \"bf16\"");
  refuse(settings.qk_clip > 0, "optim.qk_clip",
         "logits are measured for keys that rings of one size gather; leave it out");
}

void validate_layers(const ModelConfig& model) {
  for (int64_t i = 0; i < model.all_layers(); ++i)
    refuse(model.layer_kind(i).keeps_state(), fmt::format("layer {}, which hands on states", i),
           "only attention shares documents among several ranks; leave it out");
  refuse(model.has_chunks(), "model.window_kind = \"chunked\"",
         "chunks would be dealt out to ranks as documents are; leave it out");
  refuse(model.compressed.has_entries(), "[compressed] with layers of compressed tokens",
         "tokens are compressed where all of their sequence are; leave it out");
  refuse(model.index.is_on(), "index.top_k", "chosen keys are those of one rank; leave it out");
}

void validate_experts(const MoeConfig& moe) {
  if (moe.num_experts == 0) return;
  refuse(moe.balance_scope != BalanceTokens::kSequence, "moe.balance_scope other than \"sequence\"",
         "which documents share a micro-batch depends on the layout; set it to \"sequence\"");
  refuse(moe.capacity_factor > 0, "moe.capacity_factor",
         "what is dropped would depend on which documents share a micro-batch; leave it out");
  refuse(!moe.hash_layers.empty(), "moe.hash_layers",
         "tokens that only fill micro-batches would have the experts of their ids; leave it out");
  refuse(moe.routing != Routing::kTopK, "moe.routing other than \"top_k\"",
         "the choice would depend on which documents share a micro-batch; leave it out");
  refuse(moe.top_p < 1, "moe.top_p",
         "shares of tokens without experts are not defined; set it to 1");
  refuse(moe.router_jitter > 0, "moe.router_jitter",
         "noise would depend on which documents share a micro-batch; leave it out");
  refuse(moe.draw_experts, "moe.draw_experts",
         "draws would depend on which documents share a micro-batch; leave it out");
}

}  // namespace

ContextPlanSpec context_spec(const Settings& settings, const Layout& layout,
                             int64_t max_sequences) {
  const int64_t ranks = layout.degree(Axis::kCp) * layout.degree(Axis::kDp);
  const bool meets =
      layout.degree(Axis::kEp) * layout.degree(Axis::kEtp) > layout.degree(Axis::kTp);
  return {.num_ranks = ranks,
          .rank_tokens = rank_tokens(settings, layout.degree(Axis::kCp)),
          .max_degree = largest_context(ranks),
          .max_documents = std::max<int64_t>(max_sequences - kFillingSequences, 1),
          .costs = find_costs(settings.model),
          .meets = meets || settings.shard.scope == ShardScope::kFull};
}

void validate_contexts(const Settings& settings) {
  if (!settings.parallel.dynamic_cp) return;
  validate_layout(settings.parallel);
  validate_training(settings);
  validate_layers(settings.model);
  validate_experts(settings.model.moe);
}

void check_contexts(const Settings& settings, const Layout& layout) {
  if (!settings.parallel.dynamic_cp) return;
  const int64_t cp = layout.degree(Axis::kCp);
  const int64_t tp = layout.degree(Axis::kTp);
  const int64_t ranks = cp * layout.degree(Axis::kDp);
  const int64_t degree = largest_context(ranks);
  const int64_t tokens = settings.train.micro_batch * settings.data.sequence_length;
  const int64_t unit = degree > 1 && tp % 2 != 0 ? 2 * tp : tp;
  require(tokens % (cp * unit) == 0,
          "parallel.dynamic_cp: train.micro_batch {} x data.sequence_length {} over parallel.cp {} "
          "are not a multiple of {} tokens for each rank; take a data.sequence_length that is a "
          "multiple of {}",
          settings.train.micro_batch, settings.data.sequence_length, cp, unit, cp * unit);
  const int64_t room = degree * rank_tokens(settings, cp);
  require(padded_length(settings.data.sequence_length, degree) <= room,
          "parallel.dynamic_cp: a document may have data.sequence_length {} tokens, but the most "
          "ranks that may share one are {} (a power of two that divides cp {} x dp {}), which hold "
          "{} with train.micro_batch {}; take a smaller cp, more data-parallel ranks, or a larger "
          "micro-batch",
          settings.data.sequence_length, degree, cp, layout.degree(Axis::kDp), room,
          settings.train.micro_batch);
}

ContextPlan ContextBatches::plan(int64_t step) const {
  return plan_contexts(StepDocuments(source_, step).lengths(), spec_);
}

ContextBatch ContextBatches::make_batch(const StepDocuments& documents,
                                        const ContextGroup& group) const {
  const int64_t degree = group.degree;
  DocumentBatch packed = documents.pack(group.documents, {.num_tokens = degree * spec_.rank_tokens,
                                                          .unit = degree == 1 ? 1 : 2 * degree,
                                                          .max_sequences = max_sequences_});
  const auto log_degree = static_cast<size_t>(std::countr_zero(static_cast<uint64_t>(degree)));
  ContextShare share =
      share_documents(packed.batch.cu_seqlens, packed.segments, groups_.with_degree(log_degree));
  return {std::move(packed.batch), std::move(share)};
}

std::vector<ContextBatch> ContextBatches::read(int64_t step) const {
  const StepDocuments documents(source_, step);
  const ContextPlan plan = plan_contexts(documents.lengths(), spec_);
  std::vector<ContextBatch> batches;
  for (int64_t i = 0; i < plan.num_micro_batches(); ++i)
    batches.push_back(make_batch(documents, plan.group_of(i, groups_.contexts->rank())));
  return batches;
}

}  // namespace tessera
