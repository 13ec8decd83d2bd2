#include "train/setup/size_check.h"

#include <algorithm>

#include "core/error.h"
#include "core/memory.h"
#include "core/process/progress.h"
#include "core/saturating.h"
#include "model/config/limits.h"

namespace tessera {
namespace {

/// Values that a token has in a layer, about: those that are as wide as the hidden state, the
/// heads', and those of the MLP or of the experts that it goes to.
Saturating values_of_token(const ModelConfig& model) {
  const MoeConfig& moe = model.moe;
  const Saturating hidden = 4 * Saturating(model.hidden_size);
  const Saturating heads =
      Saturating(model.num_heads) * (2 * Saturating(model.head_dim()) + 2 * model.value_dim());
  const Saturating dense = 3 * Saturating(model.dense_inner_size());
  const auto sizes = moe.inner_sizes;
  const int64_t inner = sizes.empty() ? moe.inner_size : *std::ranges::max_element(sizes);
  const Saturating routed = Saturating(moe.top_k) * (3 * Saturating(inner) + model.expert_width());
  const Saturating experts = routed + moe.num_experts + 3 * Saturating(moe.shared_inner_size);
  return hidden + heads + dense + (moe.num_experts > 0 ? experts : Saturating(0));
}

}  // namespace

void check_batch(const ModelConfig& model, int64_t num_sequences, int64_t sequence_length) {
  constexpr int64_t kMostValues = int64_t{1} << 50;
  const bool routed = model.moe.num_experts > 0;
  const int64_t top_k = routed ? model.moe.top_k : 1;
  const Saturating tokens = Saturating(num_sequences) * sequence_length;
  const std::string size = fmt::format("{} of {}", format_things(num_sequences, "sequence"),
                                       format_things(sequence_length, "token"));
  require(tokens.value() <= kMaxRows,
          "a micro-batch of {} has {} tokens; at most {} are supported: make it smaller", size,
          tokens.value(), kMaxRows);
  require((tokens * top_k).value() <= kMaxRows,
          "a micro-batch of {}, each token sent to {} experts, makes {} rows; at most {} are "
          "supported: make it smaller",
          size, top_k, (tokens * top_k).value(), kMaxRows);
  const Saturating values =
      tokens * (values_of_token(model) * model.all_layers() + model.vocab_size);
  require(
      values.value() <= kMostValues,
      "a micro-batch of {} through {} of hidden size {} makes about {} values, which no machine "
      "holds; make it or the model smaller",
      size, format_things(model.all_layers(), "layer"), model.hidden_size,
      format_count(static_cast<double>(values.value())));
}

void check_schedule(const PipelineSpec& spec) {
  constexpr int64_t kMostPasses = int64_t{1} << 22;
  const Saturating passes = Saturating(spec.num_micro_batches) * spec.num_chunks * spec.num_stages;
  require(passes.value() <= kMostPasses,
          "{} micro-batches of a step through {} of {} are {} forward passes; at most {} can be "
          "scheduled: make train.global_batch smaller or train.micro_batch larger",
          spec.num_micro_batches, format_things(spec.num_stages, "stage"),
          format_things(spec.num_chunks, "chunk"), passes.value(), kMostPasses);
}

void check_bench_runs(int64_t num_timed, int64_t num_warmup) {
  require(num_timed >= 1 && num_timed <= kMaxSteps, "--steps is {}; it must be from 1 to {}",
          num_timed, kMaxSteps);
  require(num_warmup >= 0 && num_warmup <= kMaxSteps, "--warmup is {}; it must be from 0 to {}",
          num_warmup, kMaxSteps);
}

void require_host_memory(int64_t num_bytes, int64_t machine_bytes, std::string_view what) {
  require(machine_bytes <= 0 || num_bytes / 2 <= machine_bytes,
          "out of memory: {} would take {} at the peak, and this machine has {}", what,
          format_bytes(num_bytes), format_bytes(machine_bytes));
}

void require_pinnable(int64_t num_bytes, int64_t machine_bytes) {
  require(
      machine_bytes <= 0 || num_bytes <= machine_bytes,
      "train.offload and optim.offload would bring {} to the host's memory, and this machine has "
      "{}; name fewer values or layers, or keep optimizer state in fewer bits",
      format_bytes(num_bytes), format_bytes(machine_bytes));
}

}  // namespace tessera
