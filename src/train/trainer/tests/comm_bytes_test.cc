#include <functional>

#include "train/trainer/tests/comm_bytes_testing.h"

namespace tessera::testing {
namespace {

Settings expert_settings() {
  Settings settings = small_settings();
  settings.model.moe = {.num_experts = 4, .top_k = 2, .inner_size = 8, .force_balanced = true};
  return settings;
}

int64_t count_weights(const Settings& settings) {
  return count_parameters(settings.model).total;
}

/// Equation 1 of MegaScale-MoE: 2bsh(n-1)/n leave a rank for attention, the same for the MLP, half
/// of it by all-gather and half by reduce-scatter; both again backwards; and the two ends.
TEST(StepBytes, TensorParallelism) {
  constexpr int64_t kRanks = 4;
  Settings settings = small_settings();
  settings.parallel.layout.tp = kRanks;
  const StepBytes bytes(settings, kRanks);
  const int64_t half = kTokens * kHidden * (kRanks - 1) / kRanks;  // bsh(n-1)/n
  const int64_t of_each = kRanks * (2 * 2 * kLayers + 2) * half * kF32;
  EXPECT_EQ(bytes("tp", CommKind::kAllGather), of_each);
  EXPECT_EQ(bytes("tp", CommKind::kReduceScatter), of_each);
  EXPECT_EQ(bytes("tp", CommKind::kAllToAll), 4 * kTokens * (kRanks - 1) * kF32);
}

/// Experts over ranks that have a micro-batch each.
Settings expert_layout(DispatcherRequest dispatcher, int64_t ep, int64_t etp) {
  Settings settings = expert_settings();
  settings.parallel.layout.ep = ep;
  settings.parallel.layout.etp = etp;
  settings.parallel.dispatcher = dispatcher;
  settings.train.global_batch = ep * etp * kMicroBatch;
  return settings;
}

/// Equation 3: 2k/n · bsh(n-1)/n, dispatch and combine together; backwards again, and a probability
/// with each row that is dispatched.
TEST(StepBytes, ExpertAllToAll) {
  constexpr int64_t kRanks = 4;
  const Settings settings = expert_layout(DispatcherRequest::kAllToAll, kRanks, 1);
  const StepBytes bytes(settings, kRanks);
  const int64_t top_k = settings.model.moe.top_k;
  const int64_t bs = kRanks * kTokens;
  const int64_t leaving = 2 * top_k * bs * kHidden * (kRanks - 1) / (kRanks * kRanks);
  const int64_t probs = leaving / (2 * kHidden);
  EXPECT_EQ(bytes("ep", CommKind::kAllToAll), 2 * kLayers * kRanks * (leaving + probs) * kF32);
}

/// Bounded, a token has min(K, experts there) rows for each rank, without a capacity; a capacity f
/// leaves f · bs·k/E of each rank for an expert. Counts of experts go along.
TEST(StepBytes, ExpertAllToAllOfBoundedSizes) {
  constexpr int64_t kRanks = 2;
  for (const auto& [capacity, rows_to_peer] :
       {std::pair(0.0, 2 * kTokens), std::pair(1.25, kTokens * 2 * 5 / 4 / 2)}) {
    Settings settings = expert_layout(DispatcherRequest::kAllToAll, kRanks, 1);
    settings.parallel.exchange = ExchangeSizes::kBounded;
    settings.model.moe.capacity_factor = capacity;
    const StepBytes bytes(settings, kRanks);
    const int64_t peers = kRanks * (kRanks - 1);
    const int64_t counts = settings.model.moe.num_experts / kRanks * 8;
    EXPECT_EQ(bytes("ep", CommKind::kAllToAll),
              kLayers * peers * (2 * rows_to_peer * (2 * kHidden + 1) * kF32 + counts));
    EXPECT_EQ(bytes("experts", CommKind::kAllGather), 0);
  }
}

/// Equation 4: 2bsh(n-1)/n, half by all-gather and half by reduce-scatter; backwards again, and the
/// choices of all tokens with their probabilities, whose gradients come back.
void expect_expert_all_gather(int64_t ep, int64_t etp) {
  const int64_t num_ranks = ep * etp;
  const Settings settings = expert_layout(DispatcherRequest::kAllGather, ep, etp);
  const StepBytes bytes(settings, num_ranks);
  const int64_t top_k = settings.model.moe.top_k;
  const int64_t bs = num_ranks * kTokens;
  const int64_t half = bs * kHidden * (num_ranks - 1) / num_ranks;
  const int64_t choices = bs * top_k * (num_ranks - 1) / num_ranks;
  EXPECT_EQ(bytes("experts", CommKind::kAllGather),
            kLayers * num_ranks * (2 * half + 2 * choices) * kF32);
  EXPECT_EQ(bytes("experts", CommKind::kReduceScatter),
            kLayers * num_ranks * (2 * half + choices) * kF32);
  for (const char* group : {"ep", "etp"}) {
    EXPECT_EQ(bytes(group, CommKind::kAllToAll), 0);
    EXPECT_EQ(bytes(group, CommKind::kAllGather), 0);
  }
}

TEST(StepBytes, ExpertAllGather) {
  expect_expert_all_gather(4, 1);
}

/// With ETP all ranks that hold a layer's experts are equation 4's n.
TEST(StepBytes, ExpertAllGatherWithTensorParallelExperts) {
  expect_expert_all_gather(2, 4);
}

/// Parallel Folding, figure 2: all-to-all over EP as equation 3 says, for the tokens of as many
/// ranks; then each of the rows that arrived goes to the ETP - 1 ranks that share its expert, and
/// outputs come back the same ways. The choice between dispatchers counts the same rows.
void expect_all_to_all_with_etp(int64_t ep, int64_t etp) {
  const int64_t num_ranks = ep * etp;
  const Settings settings = expert_layout(DispatcherRequest::kAllToAll, ep, etp);
  const StepBytes bytes(settings, num_ranks);
  const int64_t top_k = settings.model.moe.top_k;
  const int64_t bs = ep * kTokens;
  const int64_t leaving = 2 * top_k * bs * kHidden * (ep - 1) / (ep * ep);
  const int64_t probs = leaving / (2 * kHidden);
  EXPECT_EQ(bytes("ep", CommKind::kAllToAll), 2 * kLayers * num_ranks * (leaving + probs) * kF32);
  const int64_t gathered = top_k * kTokens * (etp - 1);  // rows of a rank to others
  for (const CommKind kind : {CommKind::kAllGather, CommKind::kReduceScatter}) {
    EXPECT_EQ(bytes("etp", kind), kLayers * num_ranks * gathered * (2 * kHidden + 1) * kF32);
  }
  const DispatchVolumes volumes = dispatch_volumes({.top_k = top_k, .ep = ep, .etp = etp});
  EXPECT_DOUBLE_EQ(volumes.all_to_all * kTokens * kHidden,
                   static_cast<double>(leaving + 2 * gathered * kHidden));
}

TEST(StepBytes, ExpertAllToAllWithTensorParallelExperts) {
  expect_all_to_all_with_etp(2, 4);
  expect_all_to_all_with_etp(4, 2);
  expect_all_to_all_with_etp(1, 4);
}

/// What LatentMoE dispatches is narrower by exactly H over the latent size; probabilities and
/// choices are not (Megatron-Core MoE, section 7.3).
TEST(StepBytes, LatentExpertsDivideWhatIsDispatchedByTheCompression) {
  constexpr int64_t kRanks = 4;
  constexpr int64_t kAlpha = 8;
  const auto moved = [](DispatcherRequest dispatcher, int64_t latent_size) {
    Settings settings = expert_layout(dispatcher, kRanks, 1);
    settings.model.moe.latent_size = latent_size;
    const StepBytes bytes(settings, kRanks);
    const int64_t top_k = settings.model.moe.top_k;
    if (dispatcher == DispatcherRequest::kAllToAll) {
      const int64_t rows = kRanks * kTokens * top_k * (kRanks - 1) / kRanks;
      return bytes("ep", CommKind::kAllToAll) - kLayers * rows * 2 * kF32;
    }
    const int64_t others = kRanks * kTokens * (kRanks - 1);
    return bytes("experts", CommKind::kAllGather) + bytes("experts", CommKind::kReduceScatter) -
           kLayers * others * 3 * top_k * kF32;
  };
  for (const auto dispatcher : {DispatcherRequest::kAllToAll, DispatcherRequest::kAllGather}) {
    const int64_t latent = moved(dispatcher, kHidden / kAlpha);
    EXPECT_GT(latent, 0);
    EXPECT_EQ(moved(dispatcher, 0), kAlpha * latent);
  }
}

/// ZeRO-1: every gradient is reduced once to its owner, every weight gathered once.
TEST(StepBytes, DataParallelism) {
  constexpr int64_t kRanks = 4;
  Settings settings = small_settings();
  settings.train.global_batch = kRanks * kMicroBatch;
  const StepBytes bytes(settings, kRanks);
  const int64_t weights = count_weights(settings) * (kRanks - 1) * kF32;
  EXPECT_EQ(bytes.of_groups("dense_replicas", CommKind::kReduceScatter), weights);
  EXPECT_EQ(bytes.of_groups("dense_replicas", CommKind::kAllGather), weights);
}

/// Every gradient and weight is summed and gathered within each node, and leaves a node as often as
/// there are other nodes; in one level all would leave ranks as often as there are other ranks.
TEST(StepBytes, DataParallelismInTwoLevels) {
  constexpr int64_t kRanks = 8;
  for (const int64_t node : {2, 4}) {
    Settings settings = small_settings();
    settings.train.global_batch = kRanks * kMicroBatch;
    settings.shard.reduce_group = node;
    const StepBytes bytes(settings, kRanks);
    const int64_t weights = count_weights(settings) * kF32;
    for (const CommKind kind : {CommKind::kReduceScatter, CommKind::kAllGather}) {
      EXPECT_EQ(bytes("dense_replicas_1.inner", kind), kRanks / node * (node - 1) * weights);
      EXPECT_EQ(bytes("dense_replicas_1", kind), (kRanks / node - 1) * weights);
    }
  }
}

/// Elements of full sharding's flat buffers: each weight begins at a multiple of 32.
int64_t count_padded(const Settings& settings,
                     const std::function<bool(const std::string&)>& takes) {
  int64_t elements = 0;
  for (const ParameterSpec& spec : list_parameters(settings.model, DType::kF32))
    elements += takes(spec.name) ? align_up(spec.shape.num_elements(), 32) : 0;
  return elements;
}

int64_t count_padded(const Settings& settings, const std::string& prefix) {
  return count_padded(settings, [&](const std::string& name) { return name.starts_with(prefix); });
}

constexpr int64_t kShards = 3;
constexpr int64_t kMicroBatches = 2;

Settings fully_sharded_settings() {
  Settings settings = small_settings();
  settings.model.tie_embeddings = false;
  settings.shard.scope = ShardScope::kFull;
  settings.train.global_batch = kShards * kMicroBatches * kMicroBatch;
  return settings;
}

/// FSDP: each module is gathered once forward, and once backward where its weights are read there,
/// which the embedding's and the head's are not; its gradient is reduced once. All that for each
/// micro-batch.
TEST(StepBytes, FullSharding) {
  const Settings settings = fully_sharded_settings();
  const StepBytes bytes(settings, kShards);
  const int64_t all = count_padded(settings, "");
  const int64_t read_backward = count_padded(settings, "layers.") + count_padded(settings, "final");
  const int64_t travel = kMicroBatches * (kShards - 1) * kF32;
  EXPECT_EQ(bytes.of_groups("dense_replicas", CommKind::kAllGather),
            travel * (all + read_backward));
  EXPECT_EQ(bytes.of_groups("dense_replicas", CommKind::kReduceScatter), travel * all);
  EXPECT_EQ(bytes.of_groups("dense_replicas", CommKind::kAllReduce), 0);
}

/// A tied embedding is gathered and reduced for either end.
TEST(StepBytes, FullShardingOfATiedEmbedding) {
  Settings settings = fully_sharded_settings();
  settings.model.tie_embeddings = true;
  const StepBytes bytes(settings, kShards);
  const int64_t ends = count_padded(settings, "embedding");
  const int64_t all = count_padded(settings, "") + ends;
  const int64_t travel = kMicroBatches * (kShards - 1) * kF32;
  EXPECT_EQ(bytes.of_groups("dense_replicas", CommKind::kAllGather), travel * (2 * all - 2 * ends));
  EXPECT_EQ(bytes.of_groups("dense_replicas", CommKind::kReduceScatter), travel * all);
}

/// Where weight gradients are split off, a layer's first backward program adds to the norms and the
/// second to the matrices. In BF16 these are reduced apart, as F32; in F32 they lie together, and
/// both programs have all of the layer reduced.
TEST(StepBytes, FullShardingWithSplitWeights) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    Settings settings = fully_sharded_settings();
    settings.train.precision = precision;
    settings.parallel.layout.pp = 2;
    settings.parallel.split_weights = true;
    const StepBytes bytes(settings, 2 * kShards);
    const int64_t again = precision == Precision::kF32 ? count_padded(settings, "layers.") : 0;
    EXPECT_EQ(bytes.of_groups("dense_replicas", CommKind::kReduceScatter),
              kMicroBatches * (kShards - 1) * kF32 * (count_padded(settings, "") + again));
  }
}

/// Hybrid: nothing but the shares' summed gradients leaves a shard group, once a step.
TEST(StepBytes, HybridSharding) {
  constexpr int64_t kRanks = 4;
  constexpr int64_t kGroup = 2;
  Settings settings = fully_sharded_settings();
  settings.train.global_batch = kRanks * kMicroBatches * kMicroBatch;
  settings.shard.group = kGroup;
  const StepBytes bytes(settings, kRanks);
  const int64_t all = count_padded(settings, "");
  EXPECT_EQ(bytes("dense_replicas_1.inner", CommKind::kReduceScatter),
            kMicroBatches * kRanks / kGroup * (kGroup - 1) * all * kF32);
  EXPECT_EQ(bytes("dense_replicas_1", CommKind::kAllGather), 0);
  EXPECT_EQ(bytes("dense_replicas_1", CommKind::kReduceScatter), 0);
  // An all-reduce over n ranks moves 2(n - 1)/n of its bytes on each; shares are rounded up to 64.
  const int64_t summed = bytes("dense_replicas_1", CommKind::kAllReduce);
  EXPECT_GE(summed, kRanks / kGroup * all * kF32);
  EXPECT_LE(summed, kRanks / kGroup * (all * kF32 + kGroup * 64 * (kLayers + 3)));
}

/// Experts are sharded over their own replicas, dense weights over all ranks.
TEST(StepBytes, FullShardingOfExperts) {
  constexpr int64_t kRanks = 4;
  Settings settings = expert_settings();
  settings.model.tie_embeddings = false;
  settings.parallel.layout.ep = 2;
  settings.train.global_batch = kRanks * kMicroBatch;
  settings.shard.scope = ShardScope::kFull;
  const StepBytes bytes(settings, kRanks);
  const int64_t experts = count_padded(
      settings, [](const std::string& name) { return name.find("experts") != std::string::npos; });
  ASSERT_EQ(experts,
            kLayers * settings.model.moe.num_experts * settings.model.moe.inner_size * kHidden * 3);
  EXPECT_EQ(bytes("expert_replicas.inner", CommKind::kAllGather), 2 * experts * kF32);
  EXPECT_EQ(bytes("expert_replicas.inner", CommKind::kReduceScatter), experts * kF32);
  EXPECT_EQ(bytes.of_groups("dense_replicas", CommKind::kReduceScatter),
            (kRanks - 1) * (count_padded(settings, "") - experts) * kF32);
}

TEST(StepBytes, ExpertsAreReducedOverTheirOwnReplicasAlone) {
  constexpr int64_t kRanks = 8;
  constexpr int64_t kReplicas = 4;
  Settings settings = expert_settings();
  settings.parallel.layout.ep = kRanks / kReplicas;
  settings.train.global_batch = kRanks * kMicroBatch;
  const StepBytes bytes(settings, kRanks);
  const int64_t experts =
      kLayers * settings.model.moe.num_experts * settings.model.moe.inner_size * kHidden * 3;
  EXPECT_EQ(bytes("expert_replicas", CommKind::kReduceScatter), (kReplicas - 1) * experts * kF32);
}

/// Hidden states one way and their gradients the other, for each micro-batch and border of stages.
TEST(StepBytes, Pipeline) {
  constexpr int64_t kStages = 4;
  constexpr int64_t kMicroBatches = 3;
  Settings settings = small_settings();
  settings.model.num_layers = kStages;
  settings.parallel.layout.pp = kStages;
  settings.train.global_batch = kMicroBatches * kMicroBatch;
  const StepBytes bytes(settings, kStages);
  const int64_t one_way = kMicroBatches * (kStages - 1) * kTokens * kHidden * kF32;
  EXPECT_EQ(bytes("pp", CommKind::kSend), one_way);
  EXPECT_EQ(bytes("pp_gradients", CommKind::kSend), one_way);
}

}  // namespace
}  // namespace tessera::testing
