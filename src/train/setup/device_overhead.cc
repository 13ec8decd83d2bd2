#include "train/setup/device_overhead.h"

#include <algorithm>

#include "core/memory.h"
#include "model/experts/moe_blocks.h"
#include "train/setup/replica_groups.h"

namespace tessera {
namespace {

constexpr int64_t kMebibyte = 1 << 20;

// Measured on two and four H200s with NCCL 2.28.9 and CUDA 13.0 (bench/comm_cuda_bench prints what
// groups take, `tessera bench` with run.cuda_graphs "off" and "auto" what graphs do).
constexpr int64_t kGroupBytes = 200 * kMebibyte;  ///< a group, as soon as it is made
constexpr int64_t kRingBytes = 290 * kMebibyte;   ///< its all-gathers and reductions
constexpr int64_t kPairsBytes = 385 * kMebibyte;  ///< with each other rank, for its all-to-alls
/// The same in groups that span nodes, where NCCL gives a pair 2 of the 32 channels that it has
/// within one; by its source, not measured.
constexpr int64_t kRemotePairsBytes = kPairsBytes / 16;
constexpr int64_t kMostOfNode = 8;                  ///< ranks of a group that may be in one node
constexpr int64_t kMessageBytes = 390 * kMebibyte;  ///< a direction between two neighbours
constexpr int64_t kLibraryBytes = 250 * kMebibyte;  ///< NCCL's kernels
constexpr int64_t kSumBytes = 32 * kMebibyte;       ///< from each other rank, for sums by NCCL
constexpr int64_t kPeerBytes = 6 * kMebibyte;       ///< for each rank, which the others address
constexpr int64_t kKernelBytes = 100 * kMebibyte;   ///< this program's kernels and cuBLASLt's
constexpr int64_t kOperatorBytes = 10 * 1024;       ///< an operator in a graph
constexpr int64_t kGraphPage = 2 * kMebibyte;       ///< in which CUDA takes memory for graphs

/// What a group does on GPUs; one that does nothing is for tensors of the host, or for messages.
struct GroupUse {
  bool rings = false;      ///< all-gathers, and reductions of all types but BF16
  bool pairs = false;      ///< all-to-alls
  bool sums_bf16 = false;  ///< which between nodes are exchanged in pairs and summed by the ranks
};

struct GroupMemory {
  bool peer_memory;  ///< run.peer_memory: the GPUs of a node address one another's memory

  int64_t of(int64_t size, const GroupUse& use) const;
};

int64_t GroupMemory::of(int64_t size, const GroupUse& use) const {
  if (size == 1) return 0;
  int64_t bytes = kGroupBytes;
  if (use.rings) bytes += kRingBytes;
  const bool is_within_node = size <= kMostOfNode;
  if (is_within_node && peer_memory) bytes += size * kPeerBytes;
  const bool sums_in_pairs = use.sums_bf16 && !(is_within_node && peer_memory);
  if (use.pairs || sums_in_pairs)
    bytes += (size - 1) * (is_within_node ? kPairsBytes : kRemotePairsBytes);
  if (sums_in_pairs) bytes += (size - 1) * kSumBytes;
  return bytes;
}

/// Both directions to the neighbours in a group, of which two ranks have one.
int64_t bytes_of_messages(int64_t size) {
  return 2 * std::min<int64_t>(size - 1, 2) * kMessageBytes;
}

/// The ranks that hold weights alike, in one or two levels.
int64_t bytes_of_replicas(const Settings& settings, const RunLayout& layout) {
  const GroupUse use{.rings = true,
                     .sums_bf16 = settings.shard.compression == GradientCompression::kBf16};
  const GroupMemory group{settings.run.peer_memory};
  int64_t bytes = 0;
  for (const ReplicaRanks& replicas : list_replica_ranks(settings, layout.layout, layout.rank())) {
    bytes +=
        group.of(replicas.inner, use) + group.of(std::ssize(replicas.ranks) / replicas.inner, use);
  }
  return bytes;
}

/// The groups that carry tokens to experts.
int64_t bytes_of_dispatch(const Settings& settings, const StageGroups& groups) {
  if (settings.model.num_moe_layers() == 0) return 0;
  const GroupMemory group{settings.run.peer_memory};
  const bool bf16 = settings.train.dtype() == DType::kBF16;
  if (choose_dispatcher(settings.model, groups).kind == DispatcherKind::kAllGather) {
    return group.of(groups.experts->size(), {.rings = true, .sums_bf16 = bf16}) +
           group.of(groups.ep->size(), {}) + group.of(groups.etp->size(), {});
  }
  const bool counts = groups.policy.exchange != ExchangeSizes::kBounded;
  const bool by_library = groups.policy.exchange != ExchangeSizes::kDirect ||
                          !settings.run.peer_memory || groups.etp->size() > 1;
  if (groups.by_node) {
    const NodeGroups& node = *groups.by_node;
    return group.of(groups.experts->size(), {}) + group.of(groups.ep->size(), {}) +
           group.of(node.nodes->size(), {.rings = counts, .pairs = by_library}) +
           group.of(node.ep->size(), {.pairs = by_library}) +
           group.of(node.experts->size(), {.rings = counts}) +
           group.of(groups.etp->size(), {.rings = true, .sums_bf16 = bf16});
  }
  return group.of(groups.experts->size(), {.rings = counts}) +
         group.of(groups.ep->size(), {.pairs = by_library}) +
         group.of(groups.etp->size(), {.rings = true, .sums_bf16 = bf16});
}

int64_t communication_bytes(const Settings& settings, const RunLayout& layout) {
  if (layout.num_ranks() == 1) return 0;
  const GroupMemory group{settings.run.peer_memory};
  const StageGroups& groups = layout.part.groups;
  const bool bf16 = settings.train.dtype() == DType::kBF16;
  const bool counts_batch = settings.model.moe.balance_scope == BalanceTokens::kGlobalBatch;
  const int64_t stages = groups.pp->size();
  const int64_t ring = groups.ring->size();
  return kLibraryBytes + group.of(layout.num_ranks(), {}) + bytes_of_replicas(settings, layout) +
         bytes_of_dispatch(settings, groups) +
         group.of(groups.tp->size(), {.rings = true, .pairs = true, .sums_bf16 = bf16}) +
         group.of(groups.heads->size(), {.pairs = true}) +
         group.of(groups.micro_batch->size(), {.rings = true}) +
         group.of(groups.dp->size(), {.rings = counts_batch}) +
         // Mixers that hand on states exchange heads in the ring, too.
         group.of(ring, {.rings = true, .pairs = settings.model.has_states()}) +
         bytes_of_messages(ring) +
         // Along the pipeline there are three, of which two have messages.
         3 * group.of(stages, {}) + 2 * bytes_of_messages(stages);
}

/// What the layout's own groups take as soon as they are made, with their first messages.
int64_t bytes_of_made_groups(const Settings& settings, const RunLayout& layout) {
  const GroupMemory memory{settings.run.peer_memory};
  const StageGroups& groups = layout.part.groups;
  int64_t bytes = bytes_of_messages(groups.ring->size()) + 2 * bytes_of_messages(groups.pp->size());
  for (const CommunicatorPtr& group :
       {layout.world, groups.tp, groups.ring, groups.heads, groups.micro_batch, groups.dp,
        groups.pp, groups.etp, groups.ep, groups.experts, layout.pipeline.activations,
        layout.pipeline.gradients})
    bytes += memory.of(group->size(), {});
  if (groups.by_node) {
    for (const CommunicatorPtr& group :
         {groups.by_node->nodes, groups.by_node->ep, groups.by_node->experts})
      bytes += memory.of(group->size(), {});
  }
  return bytes;
}

constexpr int64_t kMostInStep = 16384;  ///< operators of a step that is recorded as a whole

/// Operators in graphs. Of a whole step those of all micro-batches; otherwise each program is
/// recorded once for every layer and place of a micro-batch's activations, backward programs twice
/// where the first micro-batch of a step sets the gradients and others add to them.
int64_t count_operators(const RunLayout& layout, const TrainingModel& model, bool whole_steps) {
  const int64_t backward_runs = layout.num_micro_batches > 1 ? 2 : 1;
  int64_t operators = 0;
  for (size_t c = 0; c < layout.part.chunks.size(); ++c) {
    const PipelineChunk& chunk = layout.part.chunks[c];
    int64_t of_chunk = 0;
    for (int64_t i = 0; i < chunk.all_layers(); ++i) {
      const DerivedProgram& program = model.programs().kind_of(chunk.first_layer + i).derived;
      const int64_t backward = std::ssize(program.backward.program().nodes());
      of_chunk += std::ssize(program.forward.program().nodes()) +
                  (whole_steps ? backward : backward_runs * backward);
    }
    const int64_t places = layout.part.in_flight.empty() ? 1 : layout.part.in_flight[c];
    operators += of_chunk * (whole_steps ? layout.num_micro_batches : places);
  }
  return operators;
}

int64_t graph_bytes(const Settings& settings, const RunLayout& layout, const TrainingModel& model) {
  const int64_t operators =
      count_operators(layout, model, records_whole_steps(settings, layout, model));
  return align_up(operators * kOperatorBytes, kGraphPage);
}

}  // namespace

bool records_whole_steps(const Settings& settings, const RunLayout& layout,
                         const TrainingModel& model) {
  return layout.num_ranks() == 1 && !settings.shard.updates_on_host &&
         count_operators(layout, model, /*whole_steps=*/true) <= kMostInStep;
}

DeviceOverhead predict_overhead(const Settings& settings, const RunLayout& layout,
                                const TrainingModel& model, const Backend& backend,
                                bool groups_are_made) {
  if (backend.is_host()) return {};
  DeviceOverhead overhead{.kernels = kKernelBytes,
                          .communication = communication_bytes(settings, layout)};
  if (groups_are_made) overhead.communication -= bytes_of_made_groups(settings, layout);
  if (settings.run.cuda_graphs != GraphMode::kOff)
    overhead.graphs = graph_bytes(settings, layout, model);
  return overhead;
}

}  // namespace tessera
