#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "core/host_tensor.h"
#include "core/slice.h"
#include "model/run/model_testing.h"
#include "parallel/options.h"
#include "step/build/build_step.h"
#include "step/build/place_saved.h"
#include "step/run/step_runner.h"

/// A step of a whole model spread over ranks, for tests that compare it with that on one rank.
namespace tessera::testing {

struct LayoutCase {
  std::string name;
  int64_t num_ranks = 1;
  void (*spread)(ParallelSpec&) = [](ParallelSpec&) {};
  void (*change)(ModelConfig&) = [](ModelConfig&) {};
  bool recompute = false;
  GatherFusion gathers = GatherFusion::kAuto;
  bool fuse_activations = false;
  std::vector<std::string> offload = {};
};
inline void PrintTo(const LayoutCase& c, std::ostream* out) {
  *out << c.name;
}

/// Layouts that have every kind of communication between them.
inline std::vector<LayoutCase> model_layouts() {
  using P = ParallelSpec;
  using M = ModelConfig;
  const auto whole = [](M&) {};
  return {
      {"tp", 2, [](P& p) { p.layout.tp = 2; }},
      {"ulysses", 2,
       [](P& p) {
         p.layout.tp = 2;
         p.attention = AttentionParallel::kUlysses;
       }},
      {"ep_all_to_all", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       }},
      {"ep_all_gather", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllGather;
       }},
      {"ep_deduplicated", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kDeduplicated;
       }},
      {"ep_hierarchical", 4,
       [](P& p) {
         p.layout.ep = 4;
         p.dispatcher = DispatcherRequest::kHierarchical;
         p.dispatch_inner = 2;
       }},
      {"ep_etp_deduplicated_bounded", 4,
       [](P& p) {
         p.layout.ep = 2;
         p.layout.etp = 2;
         p.dispatcher = DispatcherRequest::kDeduplicated;
         p.exchange = ExchangeSizes::kBounded;
       }},
      {"ep_bounded", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
         p.exchange = ExchangeSizes::kBounded;
       }},
      {"ep_clones", 4,
       [](P& p) {
         p.layout.ep = 4;
         p.clone_experts = 2;
       },
       [](M& m) { m.moe.mlp_bias = true; }},
      {"ep_clones_deduplicated_recompute", 4,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kDeduplicated;
         p.clone_experts = 1;
       },
       [](M& m) { m.moe.memory_efficient = false; }, true},
      {"ep_clones_split_weights", 4,
       [](P& p) {
         p.layout.pp = 2;
         p.layout.ep = 2;
         p.clone_experts = 1;
         p.split_weights = true;
       }},
      {"ep_recompute", 2, [](P& p) { p.layout.ep = 2; }, whole, true},
      {"etp", 2,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.etp = 2;
       }},
      {"ep_etp", 4,
       [](P& p) {
         p.layout.ep = 2;
         p.layout.etp = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       }},
      {"ep_etp_bounded", 4,
       [](P& p) {
         p.layout.ep = 2;
         p.layout.etp = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
         p.exchange = ExchangeSizes::kBounded;
       }},
      {"ring", 2, [](P& p) { p.layout.cp = 2; }},
      {"ring_window", 2, [](P& p) { p.layout.cp = 2; },
       [](M& m) {
         m.window = 5;
         m.window_layers = {0};
       }},
      {"context_all_to_all", 2,
       [](P& p) {
         p.layout.cp = 2;
         p.context = ContextExchange::kAllToAll;
       }},
      {"hierarchical", 4,
       [](P& p) {
         p.layout.cp = 4;
         p.context = ContextExchange::kHierarchical;
         p.context_inner = 2;
       }},
      {"pp", 2, [](P& p) { p.layout.pp = 2; }},
      {"pp_predicting", 2, [](P& p) { p.layout.pp = 2; },
       [](M& m) {
         m.mtp_layers = 1;
         m.tie_embeddings = true;
       }},
      {"pp_interleaved", 2,
       [](P& p) {
         p.layout.pp = 2;
         p.chunks_per_stage = 2;
         p.schedule = PipelineKind::kInterleaved;
       },
       [](M& m) { m.num_layers = 4; }},
      {"pp_split_weights", 2,
       [](P& p) {
         p.layout.pp = 2;
         p.split_weights = true;
       }},
      {"pp_model_balance", 2, [](P& p) { p.layout.pp = 2; },
       [](M& m) { m.moe.balance_scope = BalanceTokens::kModel; }},
      {"dp_global_balance", 2, [](P&) {},
       [](M& m) { m.moe.balance_scope = BalanceTokens::kGlobalBatch; }},
      {"few_key_heads", 4, [](P& p) { p.layout.tp = 4; }},
      {"norms_of_all_heads", 2, [](P& p) { p.layout.tp = 2; },
       [](M& m) { m.qk_norm = QkNorm::kAll; }},
      {"latent_attention", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
       },
       [](M& m) {
         m.attention = AttentionKind::kLatent;
         m.num_kv_heads = 0;
         m.latent = {
             .query_rank = 12, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
       }},
      {"gated_delta", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.init_deviation = 0.7;  // small queries and keys, made unit vectors, would turn far
         m.delta_layers = {0};
         m.delta = {.num_key_heads = 2, .num_value_heads = 4, .key_size = 6, .value_size = 5};
       }},
      {"mamba", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.mamba_layers = {0};
         m.mamba = {.num_heads = 4, .head_size = 6, .num_groups = 2, .state_size = 5};
       }},
      {"gated_convolution", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.init_deviation = 0.5;
         m.conv_layers = {0};
         m.conv = {.size = 3, .bias = true};
       }},
      {"windows_of_their_own_rotation", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
       },
       [](M& m) {
         m.window = 5;
         m.window_layers = {1};
         m.own_window_rope = true;
         m.rope.fraction = 0;
         m.window_rope = {.base = 100, .fraction = 0.5};
       }},
      {"windows_of_their_own_heads", 4, [](P& p) { p.layout.tp = 4; },
       [](M& m) {
         m.window = 5;
         m.window_layers = {1};
         m.window_heads = 8;
         m.window_kv_heads = 1;
         m.attention_gate = true;
         m.gate_function = AttentionGate::kSoftplusOfHeads;
         m.window_sinks = true;
         m.value_size = 5;
         m.value_multiplier = 0.7;
       }},
      {"latent_experts", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) { m.moe.latent_size = 7; }},
      {"block_sparse", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) {
         m.moe.experts = ExpertPath::kBlockSparse;
         m.moe.block_size = 8;
         m.moe.inner_size = 16;
       }},
      {"jitter", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.ep = 2;
       },
       [](M& m) {
         m.moe.router_jitter = 0.3;
         m.moe.jitter_experts = true;
         m.mtp_layers = 1;
       }},
      {"sinkhorn", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
       },
       [](M& m) {
         m.moe.routing = Routing::kSinkhorn;
         m.moe.normalize_top_k = false;
       }},
      {"expert_choice", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.ep = 4;
       },
       [](M& m) { m.moe.routing = Routing::kExpertChoice; }},
      {"expert_choice_deduplicated", 4,
       [](P& p) {
         p.layout.cp = 2;
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kDeduplicated;
       },
       [](M& m) {
         m.moe.routing = Routing::kExpertChoice;
         m.moe.top_k = 1;
       }},
      {"top_p", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) {
         m.moe.top_p = 0.5;
         m.moe.top_k = 3;
       }},
      {"top_p_bounded", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.exchange = ExchangeSizes::kBounded;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) {
         m.moe.top_p = 0.5;
         m.moe.balance_scope = BalanceTokens::kGlobalBatch;
       }},
      {"zero_experts", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.ep = 4;
       },
       [](M& m) {
         m.moe.zero_experts = 3;
         m.moe.latent_size = 7;
         m.moe.balance_scope = BalanceTokens::kModel;
       }},
      {"zero_experts_and_top_p", 4,
       [](P& p) {
         p.layout.cp = 2;
         p.layout.ep = 4;
         p.dispatcher = DispatcherRequest::kAllGather;
       },
       [](M& m) {
         m.moe.zero_experts = 2;
         m.moe.top_k = 3;
         m.moe.top_p = 0.7;
         m.moe.memory_efficient = false;
         m.moe.balance_scope = BalanceTokens::kSequence;
       }},
      {"shared_expert", 2, [](P& p) { p.layout.tp = 2; },
       [](M& m) {
         m.moe.shared_inner_size = 6;
         m.moe.shared_gate = true;
       }},
      {"sequence_balance", 2, [](P& p) { p.layout.cp = 2; },
       [](M& m) { m.moe.balance_scope = BalanceTokens::kSequence; }},
      {"capacity", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
       },
       [](M& m) {
         m.moe.capacity_factor = 0.8;
         m.moe.drop_policy = DropPolicy::kPosition;
         m.moe.pad_to_capacity = true;
       }},
      {"capacity_bounded", 2,
       [](P& p) {
         p.layout.ep = 2;
         p.dispatcher = DispatcherRequest::kAllToAll;
         p.exchange = ExchangeSizes::kBounded;
       },
       [](M& m) {
         m.moe.capacity_factor = 0.8;
         m.moe.drop_policy = DropPolicy::kPosition;
       }},
      {"folded", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
         p.layout.ep = 4;
       }},
      {"adapters", 8,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.cp = 2;
         p.layout.pp = 2;
         p.layout.ep = 4;
       },
       [](M& m) {
         m.moe.shared_inner_size = 6;
         m.tie_embeddings = true;
         m.lora = {.rank = 3, .alpha = 5};
       }},
      {"adapters_few_key_heads", 4, [](P& p) { p.layout.tp = 4; },
       [](M& m) {
         m.output_bias = true;
         m.moe.num_experts = 0;
         m.lora = {.rank = 3, .alpha = 5};
       }},
      {"adapters_of_latent_attention", 4,
       [](P& p) {
         p.layout.tp = 2;
         p.layout.pp = 2;
         p.layout.ep = 2;
         p.split_weights = true;
       },
       [](M& m) {
         m.attention = AttentionKind::kLatent;
         m.num_kv_heads = 0;
         m.latent = {
             .query_rank = 12, .kv_rank = 10, .nope_size = 6, .rope_size = 4, .value_size = 5};
         m.moe.latent_size = 7;
         m.lora = {.rank = 2, .alpha = 3, .targets = {"attn", "moe.latent_down", "moe.experts"}};
       }},
  };
}

/// What a step gives: losses of all ranks together, and gradients of whole weights, summed over the
/// ranks that hold them.
struct StepResult {
  MicroBatchResult losses;
  std::map<std::string, OwnedTensor> gradients;
};

inline void add_to(const Tensor& sum, const Tensor& part) {
  const auto to = sum.span<float>();
  std::ranges::transform(to, part.span<float>(), to.begin(), std::plus<>());
}

/// One rank's step.
class LayoutStep {
 public:
  static constexpr int64_t kMicroBatches = 4;  ///< of all ranks together
  static constexpr int64_t kSequences = 2;
  static constexpr int64_t kLength = 16;

  LayoutStep(const LayoutCase& c, DType dtype, World& world, const Backend& backend)
      : backend_(backend), config_(tiny_config()) {
    c.change(config_);
    config_.moe.fuse_gather = c.gathers;
    config_.moe.fuse_activation = c.fuse_activations;
    ParallelSpec parallel;
    c.spread(parallel);
    const Layout layout(parallel.layout, world.size());
    const PipelineLayout pipeline = make_pipeline_layout(parallel, config_.layer_counts());
    const int64_t stage = layout.coordinate(world.rank(), Axis::kPp);
    ModelPart part{.groups = join_stage_groups(world, layout, parallel),
                   .split_weights = parallel.split_weights};
    for (int64_t i = stage; i < std::ssize(pipeline.chunks); i += pipeline.num_stages)
      part.chunks.push_back(pipeline.chunks[i]);
    const auto along = layout.group(world.rank(), Axis::kPp);
    const PipelinePlace place{.activations = world.make_group("pp", along),
                              .gradients = world.make_group("pp_gradients", along),
                              .num_chunks = pipeline.chunks_per_stage()};
    const int64_t data_ranks = part.groups.dp->size();
    const auto steps = make_pipeline_schedule(
        pipeline_spec(parallel, pipeline, kMicroBatches / data_ranks))[stage];
    part.in_flight = count_in_flight(steps, place.num_chunks);
    for (int64_t g = part.groups.dp->rank(); g < kMicroBatches; g += data_ranks) {
      batches_.emplace_back(config_, kSequences, kLength, static_cast<uint64_t>(g));
      noise_.push_back({.training = true, .key = 9, .first_token = g * kSequences * kLength});
    }

    parameters_ = std::make_unique<ParameterSet>(
        list_parameters(config_, dtype, part.groups, part.chunks), true, backend.device());
    parameters_->initialize(3);
    fill_adapters(*parameters_);
    experts_ = make_expert_states(config_, backend.device());
    SavedPolicy policy{.offload = {.entries = parse_offload(c.offload)}};
    if (c.recompute) policy.recompute = parse_recompute({"all"});
    BatchShape shape = tiny_shape(kSequences, kLength, dtype);
    shape.trains = true;
    model_ = std::make_unique<TrainingModel>(config_, shape, policy, backend, std::move(part));
    model_->place(place_saved(model_->programs(), steps));
    model_->bind(*parameters_, experts_);
    plan_ = build_step({.programs = model_->programs(),
                        .parameters = *parameters_,
                        .pipeline = place,
                        .steps = steps,
                        .world = world.make_world_group(),
                        .placement = &model_->placement()});
    local_ = std::make_unique<LocalParameters>(*parameters_);
    runner_ = std::make_unique<StepRunner>(*model_, place, *local_);
  }

  MicroBatchResult run() {
    std::vector<MicroBatch> views;
    for (size_t i = 0; i < batches_.size(); ++i) {
      views.push_back(batches_[i].view());
      views.back().noise = noise_[i];
    }
    constexpr float kShare = 1.0F / kMicroBatches;
    GivenBatches given(std::move(views), {.loss = kShare / 30,
                                          .balance = 0.05F * kShare,
                                          .z_loss = 0.01F * kShare,
                                          .mtp = 0.3F * kShare / 30});
    runner_->run(plan_, given);
    parameters_->settle_gradients();
    backend_.device().synchronize();
    return given.result();
  }

  const TrainingModel& model() const { return *model_; }
  ParameterSet& parameters() const { return *parameters_; }

  /// Adds this rank's parts to the whole gradients.
  void add_gradients(std::map<std::string, OwnedTensor>& whole) const {
    for (const ModelParameter& parameter : parameters_->all()) {
      if (parameter.is_frozen()) continue;
      const Slice& slice = parameter.spec.placement.slice;
      const HostTensor part(parameter.grad, HostTensor::Access::kRead);
      OwnedTensor expanded(DType::kF32, slice.global);
      copy_slice_into(slice, part.get(), expanded);
      add_to(whole.try_emplace(parameter.spec.name, DType::kF32, slice.global).first->second,
             expanded);
    }
  }

 private:
  Backend backend_;
  ModelConfig config_;
  std::vector<TestBatch> batches_;
  std::vector<RouterNoise> noise_;
  std::unique_ptr<ParameterSet> parameters_;
  std::vector<ExpertState> experts_;
  std::unique_ptr<TrainingModel> model_;
  StepPlan plan_;
  std::unique_ptr<LocalParameters> local_;
  std::unique_ptr<StepRunner> runner_;
};

/// Calls a function with each rank's world and where its programs run.
using RunLayoutRanks =
    std::function<void(int64_t num_ranks, const std::function<void(World&, const Backend&)>& body)>;

/// A step over c.num_ranks ranks; twice, to the same bits.
inline StepResult run_layout(const LayoutCase& c, DType dtype, const RunLayoutRanks& run_ranks) {
  std::vector<StepResult> of_ranks(c.num_ranks);
  run_ranks(c.num_ranks, [&](World& world, const Backend& backend) {
    LayoutStep step(c, dtype, world, backend);
    std::map<std::string, OwnedTensor> first;
    step.run();
    step.add_gradients(first);
    StepResult& own = of_ranks[world.rank()];
    own.losses = step.run();
    step.add_gradients(own.gradients);
    for (const auto& [name, gradient] : first) {
      EXPECT_TRUE(std::ranges::equal(gradient.get().span<float>(),
                                     own.gradients.at(name).get().span<float>()))
          << name << " differs from run to run on rank " << world.rank();
    }
  });
  StepResult result;
  for (const StepResult& own : of_ranks) {
    result.losses += own.losses;
    for (const auto& [name, gradient] : own.gradients)
      add_to(result.gradients.try_emplace(name, DType::kF32, gradient.get().shape).first->second,
             gradient);
  }
  return result;
}

inline float largest(const Tensor& tensor) {
  float most = 0;
  for (const float value : tensor.span<float>()) most = std::max(most, std::abs(value));
  return most;
}

inline void expect_losses_near(const MicroBatchResult& found, const MicroBatchResult& expected,
                               double tolerance) {
  EXPECT_NEAR(found.loss, expected.loss, tolerance * expected.loss);
  EXPECT_NEAR(found.mtp_loss, expected.mtp_loss, tolerance * expected.mtp_loss);
  EXPECT_NEAR(found.balance_loss, expected.balance_loss, tolerance * expected.balance_loss);
  EXPECT_NEAR(found.z_loss, expected.z_loss, tolerance * expected.z_loss);
}

/// Losses, and every gradient by its largest element (or a thousandth of the largest of all).
inline void expect_same_step(const StepResult& found, const StepResult& expected,
                             double tolerance) {
  expect_losses_near(found.losses, expected.losses, tolerance);
  EXPECT_EQ(found.losses.dropped, expected.losses.dropped);
  float most = 0;
  for (const auto& [name, gradient] : expected.gradients) most = std::max(most, largest(gradient));
  ASSERT_EQ(found.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    const auto other = found.gradients.at(name).get().span<float>();
    const auto whole = gradient.get().span<float>();
    double error = 0;
    for (size_t i = 0; i < whole.size(); ++i) {
      const double off = std::abs(other[i] - whole[i]);
      error = std::isnan(off) ? INFINITY : std::max(error, off);
    }
    EXPECT_LE(error, tolerance * std::max(largest(gradient), 1e-3F * most)) << name;
  }
}

/// The model of `c` on one rank.
inline LayoutCase on_one_rank(LayoutCase c) {
  c.num_ranks = 1;
  c.spread = [](ParallelSpec&) {};
  return c;
}

}  // namespace tessera::testing
