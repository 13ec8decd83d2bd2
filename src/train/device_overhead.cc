#include "train/device_overhead.h"

#include <algorithm>

#include "core/memory.h"
#include "train/replica_groups.h"

namespace tessera {
namespace {

constexpr int64_t kMebibyte = 1 << 20;

// Measured on H200s with NCCL 2.28.9 and CUDA 13.0 (bench/comm_cuda_bench prints what groups take,
// `tessera bench` with run.cuda_graphs "off" and "auto" what graphs do).
constexpr int64_t kIdleBytes = 20 * kMebibyte;     ///< a group that exchanges nothing on GPUs
constexpr int64_t kGroupBytes = 400 * kMebibyte;   ///< a group that has used all kinds of exchanges
constexpr int64_t kMessageBytes = 32 * kMebibyte;  ///< a direction between two neighbours
constexpr int64_t kOperatorBytes = 10 * 1024;      ///< an operator in a graph
constexpr int64_t kGraphPage = 2 * kMebibyte;      ///< in which CUDA takes memory for graphs
/// What a rank receives from each other one while it sums BF16 (runtime/cuda/nccl_world.cc).
constexpr int64_t kSumBytes = 32 * kMebibyte;

/// A group of `size` ranks, of which the idle ones are for tensors of the host or for messages.
int64_t bytes_of_group(int64_t size, bool used, bool sums_bf16 = false) {
  if (size == 1) return 0;
  return (used ? kGroupBytes : kIdleBytes) + (sums_bf16 ? (size - 1) * kSumBytes : 0);
}

/// Both directions to the neighbours in a group, of which two ranks have one.
int64_t bytes_of_messages(int64_t size) {
  return 2 * std::min<int64_t>(size - 1, 2) * kMessageBytes;
}

/// The ranks that hold weights alike, in one or two levels.
int64_t bytes_of_replicas(const Settings& settings, const RunLayout& layout) {
  const bool bf16 = settings.shard.compression == GradientCompression::kBf16;
  int64_t bytes = 0;
  for (const ReplicaRanks& replicas : list_replica_ranks(settings, layout.layout, layout.rank())) {
    bytes += bytes_of_group(replicas.inner, true, bf16) +
             bytes_of_group(std::ssize(replicas.ranks) / replicas.inner, true, bf16);
  }
  return bytes;
}

int64_t communication_bytes(const Settings& settings, const RunLayout& layout) {
  const StageGroups& groups = layout.part.groups;
  const bool bf16 = settings.train.dtype() == DType::kBF16;
  const bool counts_batch = settings.model.moe.balance_scope == BalanceTokens::kGlobalBatch;
  const int64_t stages = groups.pp->size();
  const int64_t ring = groups.ring->size();
  int64_t bytes = bytes_of_replicas(settings, layout);
  for (const CommunicatorPtr& group : {groups.tp, groups.etp, groups.experts})
    bytes += bytes_of_group(group->size(), true, bf16);
  for (const CommunicatorPtr& group : {groups.heads, groups.micro_batch, groups.ep, groups.ring})
    bytes += bytes_of_group(group->size(), true);
  bytes += bytes_of_group(groups.dp->size(), counts_batch);
  // The world, and three groups along the pipeline.
  bytes += bytes_of_group(layout.num_ranks(), false) + 3 * bytes_of_group(stages, false);
  return bytes + bytes_of_messages(ring) + 2 * bytes_of_messages(stages);
}

/// Each program is recorded once for every layer and place of a micro-batch's activations; backward
/// programs twice where the first micro-batch of a step sets the gradients and others add to them.
int64_t graph_bytes(const RunLayout& layout, const TrainingModel& model) {
  const int64_t backward_runs = layout.num_micro_batches > 1 ? 2 : 1;
  int64_t operators = 0;
  for (size_t c = 0; c < layout.part.chunks.size(); ++c) {
    const PipelineChunk& chunk = layout.part.chunks[c];
    int64_t of_chunk = 0;
    for (int64_t i = 0; i < chunk.all_layers(); ++i) {
      const LayerKind kind = model.config().layer_kind(chunk.first_layer + i);
      const DerivedProgram& program = model.layer_program(kind);
      of_chunk += std::ssize(program.forward.program().nodes()) +
                  backward_runs * std::ssize(program.backward.program().nodes());
    }
    operators += of_chunk * (layout.part.in_flight.empty() ? 1 : layout.part.in_flight[c]);
  }
  return align_up(operators * kOperatorBytes, kGraphPage);
}

}  // namespace

DeviceOverhead predict_overhead(const Settings& settings, const RunLayout& layout,
                                const TrainingModel& model, const Backend& backend) {
  if (backend.is_host()) return {};
  DeviceOverhead overhead{.communication = communication_bytes(settings, layout)};
  if (settings.run.cuda_graphs != GraphMode::kOff) overhead.graphs = graph_bytes(layout, model);
  return overhead;
}

}  // namespace tessera
