#include "model/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "model/config/config_testing.h"
#include "model/run/model_testing.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(ModelConfig, CountsEveryOption) {
  ModelConfig config = testing::tiny_config();
  const auto expect_counted = [&](const char* what) {
    EXPECT_EQ(count_parameters(config).total, testing::count_listed(config)) << what;
  };
  expect_counted("plain");
  config.qkv_bias = config.output_bias = config.mlp_bias = true;
  config.moe.shared_inner_size = 12;
  config.moe.shared_gate = true;
  config.moe.first_dense_layers = 1;
  expect_counted("biases");
  config.qk_norm = QkNorm::kHead;
  expect_counted("norm of a head");
  config.attention_sinks = config.moe.mlp_bias = config.moe.router_bias = true;
  expect_counted("sinks and biases of experts");
  config.qk_norm = QkNorm::kAll;
  expect_counted("norm of all heads");
  config.attention_gate = true;
  expect_counted("gate of attention");
  config.value_size = 3;
  config.window = 5;
  config.window_layers = {1};
  config.window_heads = 2;
  config.window_kv_heads = 1;
  config.window_sinks = true;
  config.gate_function = AttentionGate::kSoftplusOfHeads;
  config.attention_sinks = false;
  expect_counted("windows of their own heads, and value heads");
  config.value_size = config.window = 0;
  config.window_layers = {};
  config.window_heads = config.window_kv_heads = 0;
  config.window_sinks = false;
  config.post_norms = config.layer_scalars = config.moe.separate_norms = true;
  expect_counted("norms behind, and factors of layers");
  config.moe.router_norm = config.moe.expert_scale = true;
  expect_counted("norm and factors of the router");
  config.layer_scalars = false;
  config.keys_as_values = true;
  config.window = 5;
  config.window_layers = {1};
  config.window_head_size = 6;
  expect_counted("keys as values, and windows of their own head size");
  config.keys_as_values = false;
  config.window = config.window_head_size = 0;
  config.window_layers = {};
  config.delta_layers = {0};
  config.delta = {.num_key_heads = 2, .num_value_heads = 6, .key_size = 3, .value_size = 5};
  expect_counted("gated delta rule");
  config.delta.kind = DeltaKind::kKimi;
  config.delta.num_key_heads = 6;
  expect_counted("Kimi Delta Attention");
  config.mtp_layers = 2;
  expect_counted("multi-token prediction");
  config.mamba_layers = {1};
  config.mamba = {.num_heads = 6, .head_size = 3, .num_groups = 2, .state_size = 5};
  expect_counted("Mamba-2");
  config.mamba.proj_bias = true;
  config.mamba.conv_bias = false;
  expect_counted("biases of Mamba-2");
  config.mtp_layers = 0;
  config.layers_without_mlp = {1};
  config.delta_layers = {};
  config.layers_without_mixer = {0};
  expect_counted("layers of one part");
  config.conv_layers = {0};
  config.layers_without_mixer = {};
  expect_counted("gated convolution");
  config.conv.bias = true;
  expect_counted("biases of a gated convolution");
  config.conv_layers = {};
  config.mamba_layers = config.layers_without_mlp = config.layers_without_mixer = {};
  config.attention_gate = false;
  config.qk_norm = QkNorm::kNone;
  config.attention = AttentionKind::kLatent;
  config.num_kv_heads = 0;
  config.latent = {.kv_rank = 6, .nope_size = 4, .rope_size = 2, .value_size = 5};
  expect_counted("latent");
  config.latent.query_rank = 5;
  expect_counted("latent queries");
  config.index = {.top_k = 3, .num_heads = 3, .head_size = 4};
  expect_counted("indexer");
  const ParameterCount indexed = count_parameters(config);
  EXPECT_EQ(indexed.total - indexed.trained,
            config.num_layers * (5 * 12 + config.hidden_size * 7 + 8));
  config.index = {};
  const ModelConfig latent = config;
  config.attention = AttentionKind::kCompressed;
  config.qkv_bias = config.output_bias = false;
  config.compressed = {.query_rank = 5, .rope_size = 2, .output_groups = 2, .output_rank = 3};
  expect_counted("compressed attention");
  config.window = 4;
  config.compressed.heavy_layers = {0};
  config.compressed.sparse_layers = {1};
  config.index = {.top_k = 3, .num_heads = 3, .head_size = 4};
  expect_counted("compressed tokens");
  const ParameterCount chosen = count_parameters(config);
  EXPECT_EQ(chosen.total - chosen.trained, 5 * 12 + config.hidden_size * (3 + 16) + 4 * 8 + 4);
  config = latent;
  config.activation = Activation::kGelu;
  expect_counted("without gates");
  config.moe.latent_size = 6;
  expect_counted("latent experts");
}

/// Equal experts: a token meets top_k of them, and both projections.
TEST(ModelConfig, CountsWhatOneTokenMeets) {
  ModelConfig config = testing::tiny_config();
  config.moe.latent_size = 6;
  const ParameterCount count = count_parameters(config);
  EXPECT_EQ(count.total - count.active, config.num_layers *
                                            (config.moe.num_experts - config.moe.top_k) * 3 *
                                            config.moe.inner_size * 6);
}

TEST(Parameters, ProjectionsIntoTheResidualStreamStartSmaller) {
  ModelConfig config = testing::tiny_config();
  config.moe.first_dense_layers = 1;
  config.moe.shared_inner_size = 12;
  const auto small_ones = [&] {
    std::vector<std::string> names;
    for (const ParameterSpec& spec : list_parameters(config, DType::kF32)) {
      if (spec.init_deviation > 0 && spec.init_deviation < config.init_deviation)
        names.push_back(spec.name);
    }
    return names;
  };
  EXPECT_THAT(
      small_ones(),
      ElementsAre("layers.0.attn.o.weight", "layers.0.mlp.down.weight", "layers.1.attn.o.weight",
                  "layers.1.moe.experts.down.weight", "layers.1.moe.shared.down.weight"));
  config.moe.latent_size = 6;
  config.attention = AttentionKind::kLatent;
  config.latent.query_rank = 5;
  EXPECT_THAT(small_ones(), ElementsAre("layers.0.attn.o.weight", "layers.0.mlp.down.weight",
                                        "layers.1.attn.o.weight", "layers.1.moe.latent_up.weight",
                                        "layers.1.moe.shared.down.weight"));
}

/// Latent attention's heads have sizes of their own.
TEST(ModelConfig, LatentHeadsNeedNotDivideTheHiddenSize) {
  ModelConfig config = testing::tiny_config();
  config.attention = AttentionKind::kLatent;
  config.num_kv_heads = 0;
  config.head_size = 0;
  config.num_heads = config.hidden_size + 1;
  validate(config);
}

/// What validate says after a change of the tiny model.
void expect_refused(void (*change)(ModelConfig&), const char* message) {
  ModelConfig config = testing::tiny_config();
  change(config);
  EXPECT_THAT([&] { validate(config); }, ThrowsMessage<UserError>(HasSubstr(message)));
}

TEST(ModelConfig, RoutersChooseAmongAllOutputs) {
  ModelConfig config = testing::tiny_config();
  const int64_t before = count_parameters(config).total;
  config.moe.zero_experts = 3;
  config.moe.router_bias = true;
  validate(config);
  EXPECT_EQ(count_parameters(config).total, testing::count_listed(config));
  EXPECT_EQ(count_parameters(config).total - before,
            config.num_layers * (3 * config.hidden_size + 7));
  EXPECT_LT(count_parameters(config).active, count_parameters(testing::tiny_config()).active);
}

TEST(ModelConfig, RefusesRoutingThatDoesNotGoTogether) {
  expect_refused([](ModelConfig& c) { c.moe.jitter_experts = true; }, "moe.router_jitter");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.top_p = 0.5;
        c.moe.score = ScoreFunction::kSigmoid;
      },
      "moe.top_p 0.5 is a share");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.top_p = 0.5;
        c.moe.score_order = ScoreOrder::kAfterTopK;
      },
      "before_top_k");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.zero_experts = 2;
        c.moe.num_groups = 2;
      },
      "in no group of experts");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.num_experts = 0;
        c.moe.zero_experts = 2;
      },
      "moe.num_experts is 0");
  expect_refused([](ModelConfig& c) { c.moe.zero_experts = 1 << 20; }, "together");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.routing = Routing::kSinkhorn;
        c.moe.bias_update_speed = 0.1;
      },
      "evens loads out by itself");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.routing = Routing::kSinkhorn;
        c.moe.num_groups = 2;
      },
      "moe.top_groups is 1 of moe.num_groups 2");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.routing = Routing::kExpertChoice;
        c.moe.capacity_factor = 1;
      },
      "with moe.capacity_factor: every expert takes");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.routing = Routing::kExpertChoice;
        c.moe.zero_experts = 1;
      },
      "with moe.zero_experts");
}

TEST(ModelConfig, RefusesValuesAndNormsThatCannotBe) {
  expect_refused([](ModelConfig& c) { c.window_head_size = 4; },
                 "model.window_head_size is of layers with a window");
  expect_refused(
      [](ModelConfig& c) {
        c.window = 3;
        c.keys_as_values = true;
      },
      "model.keys_as_values is of layers without a window, and all have one");
  expect_refused(
      [](ModelConfig& c) {
        c.keys_as_values = true;
        c.value_size = 3;
      },
      "model.keys_as_values takes keys of 4 elements as values, and model.value_size is 3");
  expect_refused(
      [](ModelConfig& c) {
        c.attention = AttentionKind::kLatent;
        c.num_kv_heads = 0;
        c.value_norm = true;
      },
      "model.value_norm does not go with");
  expect_refused(
      [](ModelConfig& c) {
        c.window = 3;
        c.window_layers = {0};
        c.window_head_size = 5;
      },
      "5 elements of a head are rotated ([rope])");
  expect_refused(
      [](ModelConfig& c) {
        c.rope.proportional = true;
        c.rope.scaling = RopeScaling::kYarn;
        c.rope.original_length = 8;
      },
      "rope.proportional turns pairs of whole heads");
  expect_refused([](ModelConfig& c) { c.moe.separate_norms = true; },
                 "moe.separate_norms are of routed experts and a shared one");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.router_jitter = 0.1;
        c.moe.jitter_experts = c.moe.router_norm = true;
      },
      "moe.jitter_experts lets experts read what the router reads");
  expect_refused(
      [](ModelConfig& c) {
        c.keys_as_values = true;
        c.lora.rank = 2;
      },
      "with model.keys_as_values not all layers have the matrices");
}

TEST(ModelConfig, RefusesWhatDoesNotGoTogether) {
  expect_refused([](ModelConfig& c) { c.rope.fraction = 0.3; },
                 "1 elements of a head are rotated ([rope])");
  expect_refused([](ModelConfig& c) { c.rope.scaling = RopeScaling::kDynamic; },
                 "needs rope.max_length above 0");
  expect_refused([](ModelConfig& c) { c.rope.scaling = RopeScaling::kYarn; },
                 "needs rope.original_length above 0");
  expect_refused(
      [](ModelConfig& c) {
        c.rope.scaling = RopeScaling::kLlama3;
        c.rope.original_length = 8;
        c.rope.low_frequency_factor = 5;
      },
      "rope.high_frequency_factor 4 must be at least rope.low_frequency_factor 5");
  expect_refused([](ModelConfig& c) { c.window_layers = {0}; }, "needs a model.window above 0");
  expect_refused(
      [](ModelConfig& c) {
        c.window = 3;
        c.window_kv_heads = 3;
      },
      "layers with a window have 4 query heads (model.window_heads), no multiple of their 3");
  expect_refused(
      [](ModelConfig& c) {
        c.attention = AttentionKind::kLatent;
        c.num_kv_heads = 0;
        c.value_size = 3;
      },
      "model.value_size does not go with");
  expect_refused([](ModelConfig& c) { c.own_window_rope = true; },
                 "model.window_rope is of layers with a window");
  expect_refused([](ModelConfig& c) { c.window_kind = WindowKind::kChunked; },
                 "model.window_kind is of layers with a window");
  expect_refused([](ModelConfig& c) { c.temperature_scale = 0.1; },
                 "model.temperature_scale is of layers without a rotation");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.experts = ExpertPath::kBlockSparse;
        c.moe.block_size = 8;
        c.moe.probs_on_input = true;
      },
      "moe.probs_on_input works with \"grouped\" only");
  expect_refused(
      [](ModelConfig& c) {
        c.own_window_rope = true;
        c.window = 4;
        c.window_rope.scaling = RopeScaling::kYarn;
      },
      "window_rope.scaling = \"yarn\" needs window_rope.original_length above 0");
  expect_refused([](ModelConfig& c) { c.moe.dense_layers = {2}; },
                 "moe.dense_layers lists layer 2; the last of the 2 layers is 1");
  expect_refused([](ModelConfig& c) { c.padding_token = 37; }, "outside the vocabulary of 37");
  expect_refused(
      [](ModelConfig& c) {
        c.attention = AttentionKind::kLatent;
        c.num_kv_heads = 0;
        c.qk_norm = QkNorm::kHead;
      },
      "model.qk_norm does not go with");
  expect_refused([](ModelConfig& c) { c.delta_layers = {2}; },
                 "model.delta_layers lists layer 2; the last of the 2 layers is 1");
  expect_refused(
      [](ModelConfig& c) {
        c.delta_layers = {0};
        c.delta = {.num_key_heads = 4, .num_value_heads = 6};
      },
      "delta.num_value_heads 6 is not a multiple of delta.num_key_heads 4");
  expect_refused(
      [](ModelConfig& c) {
        c.delta_layers = {0};
        c.delta = {.kind = DeltaKind::kKimi, .num_key_heads = 2, .num_value_heads = 4};
      },
      "delta.num_value_heads is 4 and delta.num_key_heads 2; make them equal");
  expect_refused(
      [](ModelConfig& c) {
        c.delta_layers = c.window_layers = {0};
        c.window = 4;
      },
      "model.window_layers and model.delta_layers both list layer 0");
  expect_refused([](ModelConfig& c) { c.mamba_layers = {2}; },
                 "model.mamba_layers lists layer 2; the last of the 2 layers is 1");
  expect_refused([](ModelConfig& c) { c.mamba_layers = c.delta_layers = {0}; },
                 "model.delta_layers and model.mamba_layers both list layer 0");
  expect_refused([](ModelConfig& c) { c.conv_layers = {2}; },
                 "model.conv_layers lists layer 2; the last of the 2 layers is 1");
  expect_refused([](ModelConfig& c) { c.conv_layers = c.mamba_layers = {1}; },
                 "model.mamba_layers and model.conv_layers both list layer 1");
  expect_refused([](ModelConfig& c) { c.layers_without_mixer = c.layers_without_mlp = {1}; },
                 "a layer needs a mixer or an MLP");
  expect_refused(
      [](ModelConfig& c) {
        c.mtp_layers = 1;
        c.layers_without_mlp = {1};
      },
      "layer 1 has no MLP");
  expect_refused(
      [](ModelConfig& c) {
        c.mamba_layers = {0};
        c.mamba.num_groups = 3;
      },
      "mamba.num_heads 8 is not a multiple of mamba.num_groups 3");
  expect_refused(
      [](ModelConfig& c) {
        c.mamba_layers = {0};
        c.mamba.min_step = 2;
        c.mamba.max_step = 1;
      },
      "mamba.max_step 1 is below mamba.min_step 2");
  expect_refused(
      [](ModelConfig& c) {
        c.rope.fraction = 0;
        c.rope.scaling = RopeScaling::kLinear;
      },
      "rope.scaling stretches the rotation");
  expect_refused(
      [](ModelConfig& c) {
        c.attention = AttentionKind::kLatent;
        c.num_kv_heads = 0;
        c.attention_gate = true;
      },
      "model.attention_gate does not go with");
  expect_refused([](ModelConfig& c) { c.index.num_heads = 4; }, "index.top_k is 0");
  expect_refused([](ModelConfig& c) { c.index.top_k = 4; }, "there is none; set model.attention");
  expect_refused(
      [](ModelConfig& c) {
        c.attention = AttentionKind::kLatent;
        c.num_kv_heads = 0;
        c.latent.query_rank = 6;
        c.index = {.top_k = 4, .head_size = 32};
      },
      "index.head_size 32 is below latent.rope_size 64");
  expect_refused(
      [](ModelConfig& c) {
        c.attention = AttentionKind::kLatent;
        c.num_kv_heads = 0;
        c.latent.query_rank = 6;
        c.index.top_k = 4;
        c.window = 5;
      },
      "index.top_k chooses what tokens see");
  const auto refuse_compressed = [&](void (*change)(ModelConfig&), const char* message) {
    SCOPED_TRACE(message);
    ModelConfig c = testing::tiny_config();
    c.attention = AttentionKind::kCompressed;
    c.num_kv_heads = 0;
    c.window = 4;
    c.compressed = {.query_rank = 5, .rope_size = 2, .output_groups = 2, .output_rank = 3};
    c.compressed.heavy_layers = {0};
    EXPECT_NO_THROW(validate(c));
    change(c);
    EXPECT_THAT([&] { validate(c); }, ThrowsMessage<UserError>(HasSubstr(message)));
  };
  using M = ModelConfig;
  refuse_compressed([](M& c) { c.attention = AttentionKind::kStandard; },
                    "model.attention is not \"compressed\"");
  refuse_compressed([](M& c) { c.num_kv_heads = 2; }, "model.num_kv_heads above 1 does not go");
  refuse_compressed([](M& c) { c.qk_norm = QkNorm::kHead; }, "model.qk_norm does not go");
  refuse_compressed([](M& c) { c.qkv_bias = true; }, "model.qkv_bias does not go");
  refuse_compressed([](M& c) { c.attention_gate = true; }, "model.attention_gate does not go");
  refuse_compressed([](M& c) { c.window_layers = {0}; }, "model.window_layers does not go");
  refuse_compressed([](M& c) { c.window = 0; }, "and model.window is 0");
  refuse_compressed([](M& c) { c.compressed.rope_size = 90; }, "above the size of a head");
  refuse_compressed([](M& c) { c.compressed.output_groups = 3; },
                    "compressed.output_groups 3 does not divide");
  refuse_compressed([](M& c) { c.compressed.sparse_layers = {1}; }, "but index.top_k is 0");
  refuse_compressed(
      [](M& c) {
        c.compressed.sparse_layers = {0};
        c.index.top_k = 4;
      },
      "both list layer 0");
  refuse_compressed([](M& c) { c.index.top_k = 4; }, "and there are none; list some");
  refuse_compressed([](M& c) { c.compressed.heavy_layers = {9}; },
                    "compressed.heavy_layers lists layer 9");
  refuse_compressed([](M& c) { c.conv_layers = {0}; }, "lists layer 0, which has no attention");
  refuse_compressed([](M& c) { c.rope.fraction = 0.5; }, "set compressed.rope_size");
  refuse_compressed(
      [](M& c) {
        c.compressed.heavy_layers = {};
        c.compressed_rope.base = 7;
      },
      "[compressed_rope] is of layers with compressed tokens");
  expect_refused([](ModelConfig& c) { c.norm_after_rotation = true; },
                 "model.norm_after_rotation says when queries and keys are normed");
  expect_refused([](ModelConfig& c) { c.moe.balance_group_size = 3; },
                 "moe.balance_group_size 3 does not divide moe.num_experts 4; the nearest that "
                 "does is 2 or 4");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.capacity_factor = 1;
        c.moe.capacity_group_size = 8;
      },
      "moe.capacity_group_size 8 does not divide moe.num_experts 4; the nearest that does is 4");
  expect_refused([](ModelConfig& c) { c.moe.capacity_group_size = 2; },
                 "which moe.capacity_factor 0 does not give");
  expect_refused(
      [](ModelConfig& c) {
        c.moe.capacity_factor = 1;
        c.moe.pad_to_capacity = true;
        c.moe.capacity_group_size = 2;
      },
      "moe.capacity_group_size 2 makes experts share one");
  expect_refused([](ModelConfig& c) { c.moe.latent_size = 16; },
                 "moe.latent_size 16 is not below model.hidden_size 16");
  expect_refused([](ModelConfig& c) { c.attention = AttentionKind::kLatent; },
                 "model.num_kv_heads 2 does not go with");
}

}  // namespace
}  // namespace tessera
