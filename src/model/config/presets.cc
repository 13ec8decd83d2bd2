#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <span>

#include "core/text/names.h"
#include "model/config/config.h"

namespace tessera {
namespace {

/// Shapes that the papers give by (layers, hidden, heads, KV heads, inner size of an expert or, of
/// dense models, of an MLP, experts, top-k).
struct PublishedShape {
  const char* name;
  const char* source;
  int64_t layers, hidden, heads, kv_heads, inner, experts, top_k;
  bool tied;
  const char* extra;
};

/// What both models of gpt-oss share, but for the layers with a window: every other one, from the
/// first on, which make_published adds.
constexpr const char* kGptOss =
    "[model]\nvocab_size = 201088\nhead_size = 64\nqkv_bias = true\noutput_bias = true\n"
    "attention_sinks = true\nwindow = 128\nactivation = \"swiglu_oai\"\n"
    "[rope]\nbase = 150000.0\nscaling = \"yarn\"\nfactor = 32.0\noriginal_length = 4096\n"
    "truncate = false\n[moe]\nscore_order = \"after_top_k\"\nmlp_bias = true\n"
    "router_bias = true\n";

/// Qwen3-Next but for the layers with Gated DeltaNet: all but every fourth, which make_published
/// adds.
constexpr const char* kQwen3Next =
    "[model]\nvocab_size = 151936\ninner_size = 5120\nhead_size = 256\nqk_norm = \"head\"\n"
    "attention_gate = true\nnorm_eps = 1e-6\n"
    "[delta]\nnum_key_heads = 16\nnum_value_heads = 32\nkey_size = 128\nvalue_size = 128\n"
    "[rope]\nbase = 10000000.0\nfraction = 0.25\n"
    "[moe]\nshared_inner_size = 512\nshared_gate = true\nbalance_coefficient = 0.001\n";

constexpr const char* kQwen35 =
    "[model]\nvocab_size = 248320\nhead_size = 256\nqk_norm = \"head\"\n"
    "attention_gate = true\nnorm_eps = 1e-6\n"
    "[delta]\nnum_key_heads = 16\nnum_value_heads = 32\nkey_size = 128\nvalue_size = 128\n"
    "[rope]\nbase = 10000000.0\nfraction = 0.25\n"
    "[moe]\nshared_inner_size = 512\nshared_gate = true\nbalance_coefficient = 0.001\n";

/// Granite 4.0 H but for its mixers: attention in layer 5 and every tenth from there on, Mamba-2 in
/// the others, which make_published adds.
constexpr const char* kGraniteHybrid =
    "[model]\nvocab_size = 100352\nnorm_eps = 1e-5\nembedding_multiplier = 12.0\n"
    "residual_multiplier = 0.22\nattention_multiplier = 0.0078125\nlogits_divisor = 16.0\n"
    "[mamba]\nnum_heads = 128\nhead_size = 64\nnum_groups = 1\nstate_size = 128\n"
    "[rope]\nfraction = 0.0\n[moe]\nscore_order = \"after_top_k\"\nshared_inner_size = 1536\n";

/// Nemotron 3 Nano but for its layers, each of which is Mamba-2 (M), attention (*) or experts (E).
constexpr const char* kNemotronNano =
    "[model]\nvocab_size = 131072\nhead_size = 128\nactivation = \"relu2\"\n"
    "[mamba]\nnum_heads = 64\nhead_size = 64\nnum_groups = 8\nstate_size = 128\n"
    "min_step = 0.001\n[rope]\nfraction = 0.0\n"
    "[moe]\nscore = \"sigmoid\"\nexpert_bias = true\nscore_scale = 2.5\n"
    "shared_inner_size = 3712\nbalance_coefficient = 0.0\n";
constexpr std::string_view kNemotronNanoLayers =
    "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME";

/// DeepSeek-V4-Flash but for the layers that see compressed tokens, which make_published adds: all
/// behind the first two, sparse and heavy in turn.
constexpr const char* kDeepSeekV4Flash =
    "[model]\nvocab_size = 129280\nhead_size = 512\nattention = \"compressed\"\n"
    "attention_sinks = true\nwindow = 128\nnorm_eps = 1e-6\nresidual_streams = 4\n"
    "activation = \"swiglu_clamped\"\n"
    "[compressed]\nquery_rank = 1024\nrope_size = 64\noutput_groups = 8\noutput_rank = 1024\n"
    "[index]\ntop_k = 512\n[rope]\ninterleaved = true\n"
    "[compressed_rope]\ninterleaved = true\nbase = 160000.0\nscaling = \"yarn\"\n"
    "factor = 16.0\noriginal_length = 65536\nattention_factor = 1.0\n"
    "[moe]\nhash_layers = [0, 1, 2]\nshared_inner_size = 2048\nscore = \"sqrtsoftplus\"\n"
    "score_scale = 1.5\nbias_update_speed = 0.001\nbalance_coefficient = 0.0001\n"
    "balance_scope = \"sequence\"\n";

/// Llama 4 but for the layers with chunks and a rotation: all but every fourth, which
/// make_published adds.
constexpr const char* kLlama4 =
    "[model]\nvocab_size = 202048\nhead_size = 128\nqk_norm = \"l2\"\n"
    "norm_after_rotation = true\nwindow = 8192\nwindow_kind = \"chunked\"\n"
    "window_rope = true\ntemperature_scale = 0.1\ntemperature_length = 8192\n"
    "[rope]\nfraction = 0.0\n[window_rope]\nbase = 500000.0\ninterleaved = true\n"
    "scaling = \"llama3\"\nfactor = 16.0\noriginal_length = 8192\n"
    "low_frequency_factor = 1.0\nhigh_frequency_factor = 1.0\n"
    "[moe]\nscore = \"sigmoid\"\nnormalize_top_k = false\nprobs_on_input = true\n"
    "shared_inner_size = 8192\n";

/// K-EXAONE but for the layers with a window: all but every fourth, which make_published adds.
constexpr const char* kExaone =
    "[model]\nvocab_size = 153600\nhead_size = 128\ninner_size = 18432\nqk_norm = \"head\"\n"
    "window = 128\nwindow_rope = true\n[rope]\nfraction = 0.0\n"
    "[window_rope]\nbase = 1000000.0\n"
    "[moe]\nscore = \"sigmoid\"\nexpert_bias = true\nscore_scale = 2.5\n"
    "first_dense_layers = 1\nshared_inner_size = 2048\nbalance_coefficient = 0.0\n";

/// The text model of Gemma 4 26B-A4B but for the layers with a window: all but every sixth, which
/// make_published adds. The shared expert is what its files call MLP.
constexpr const char* kGemma4 =
    "[model]\nvocab_size = 262144\nhead_size = 512\nwindow = 1024\nwindow_head_size = 256\n"
    "window_kv_heads = 8\nwindow_rope = true\nqk_norm = \"head\"\nkeys_as_values = true\n"
    "value_norm = true\nattention_multiplier = 1.0\nactivation = \"geglu_tanh\"\nnorm_eps = 1e-6\n"
    "post_norms = true\nlayer_scalars = true\nembedding_multiplier = 53.0659966456864\n"
    "logit_softcap = 30.0\npadding_token = 0\n"
    "[rope]\nbase = 1000000.0\nfraction = 0.25\nproportional = true\n"
    "[window_rope]\nbase = 10000.0\n"
    "[moe]\nshared_inner_size = 2112\nseparate_norms = true\nrouter_norm = true\n"
    "expert_scale = true\nbalance_coefficient = 0.0\n";

/// Kimi Linear 48B-A3B but for the layers with latent attention, which make_published leaves out of
/// those with Kimi Delta Attention.
constexpr const char* kKimiLinear =
    "[model]\nvocab_size = 163840\ninner_size = 9216\nattention = \"latent\"\nnorm_eps = 1e-5\n"
    "padding_token = 163839\n"
    "[latent]\nquery_rank = 0\nkv_rank = 512\nnope_size = 128\nrope_size = 64\n"
    "value_size = 128\n[rope]\nfraction = 0.0\n"
    "[delta]\nkind = \"kimi\"\nnum_key_heads = 32\nnum_value_heads = 32\nkey_size = 128\n"
    "value_size = 128\n[moe]\nscore = \"sigmoid\"\nexpert_bias = true\nscore_scale = 2.446\n"
    "first_dense_layers = 1\nshared_inner_size = 1024\nbalance_coefficient = 0.0\n";
constexpr std::array<int64_t, 7> kKimiAttentionLayers = {3, 7, 11, 15, 19, 23, 26};

/// Trinity Mini but for the layers with a window: all but every fourth, which make_published adds.
constexpr const char* kTrinityMini =
    "[model]\nvocab_size = 200192\nhead_size = 128\ninner_size = 6144\nqk_norm = \"head\"\n"
    "attention_gate = true\npost_norms = true\nembedding_multiplier = 45.254833995939045\n"
    "norm_eps = 1e-5\nwindow = 2048\nwindow_rope = true\n[rope]\nfraction = 0.0\n"
    "[window_rope]\nbase = 10000.0\n"
    "[moe]\nscore = \"sigmoid\"\nexpert_bias = true\nscore_scale = 2.826\n"
    "first_dense_layers = 2\nshared_inner_size = 1024\nbalance_coefficient = 0.0\n";

/// LFM2-8B-A1B but for its gated convolutions: in all layers but those that attend, which
/// make_published adds.
constexpr const char* kLfm2 =
    "[model]\nvocab_size = 65536\ninner_size = 7168\nqk_norm = \"head\"\n[rope]\n"
    "base = 1000000.0\n[moe]\nscore = \"sigmoid\"\nexpert_bias = true\n"
    "first_dense_layers = 2\nbalance_coefficient = 0.0\n";
constexpr std::array<int64_t, 6> kLfm2AttentionLayers = {2, 6, 10, 14, 18, 21};

constexpr PublishedShape kPublished[] = {
    {"transformer-xs", "Transformer-XS, MegaBlocks table 1", 6, 512, 8, 8, 2048, 0, 0, true,
     "[model]\nactivation = \"gelu\"\nvocab_size = 51200\n"},
    {"transformer-small", "Transformer-Small, MegaBlocks table 1", 12, 768, 12, 12, 3072, 0, 0,
     true, "[model]\nactivation = \"gelu\"\nvocab_size = 51200\n"},
    {"transformer-medium", "Transformer-Medium, MegaBlocks table 1", 24, 1024, 16, 16, 0, 0, 1,
     true, "[model]\nactivation = \"gelu\"\nvocab_size = 51200\n"},
    {"transformer-large", "Transformer-Large, MegaBlocks table 1", 24, 1536, 16, 16, 6144, 0, 0,
     true, "[model]\nactivation = \"gelu\"\nvocab_size = 51200\n"},
    {"transformer-xl", "Transformer-XL, MegaBlocks table 1", 24, 2048, 16, 16, 8192, 0, 0, true,
     "[model]\nactivation = \"gelu\"\nvocab_size = 51200\n"},
    {"megablocks-xs", "dMoE-XS, MegaBlocks table 2", 6, 512, 8, 8, 2048, 64, 1, true,
     "[model]\nactivation = \"gelu\"\nvocab_size = 51200\n"},
    {"megablocks-small", "dMoE-Small, MegaBlocks table 2", 12, 768, 12, 12, 3072, 64, 1, true,
     "[model]\nactivation = \"gelu\"\nvocab_size = 51200\n"},
    {"megablocks-medium", "dMoE-Medium, MegaBlocks table 2", 24, 1024, 16, 16, 4096, 64, 1, true,
     "[model]\nactivation = \"gelu\"\nvocab_size = 51200\n"},
    {"mixtral-8x7b", "Mixtral 8x7B, MegaScale-MoE table 2", 32, 4096, 32, 8, 14336, 8, 2, false,
     "[model]\nvocab_size = 32000\n[rope]\nbase = 1000000.0\n[moe]\nscore_order = "
     "\"after_top_k\"\n"},
    {"mixtral-8x22b", "Mixtral 8x22B, MegaScale-MoE table 2", 56, 6144, 48, 8, 16384, 8, 2, false,
     "[model]\nvocab_size = 32768\n[rope]\nbase = 1000000.0\n[moe]\nscore_order = "
     "\"after_top_k\"\n"},
    {"mixtral-8x22b-g8t8", "Mixtral 8x22B with eight experts for one, Parallel Folding section 4.1",
     56, 6144, 48, 8, 2048, 64, 8, false,
     "[model]\nvocab_size = 32768\n[rope]\nbase = 1000000.0\n"},
    {"llama3-8x70b", "Llama 3 70B with 8 experts for each MLP, Parallel Folding section 4.1", 80,
     8192, 64, 8, 28672, 8, 2, false,
     "[model]\nvocab_size = 128256\nnorm_eps = 1e-5\n[rope]\nbase = 500000.0\n"},
    {"internal-352b", "Internal-352B, MegaScale-MoE table 2", 60, 4096, 32, 8, 14336, 32, 3, false,
     "[model]\nvocab_size = 65536\n"},
    {"hunyuan-large", "Hunyuan-Large, MegaScale-MoE table 2", 64, 6400, 80, 8, 18304, 16, 1, false,
     "[model]\nvocab_size = 129024\n[moe]\nnormalize_top_k = false\n"},
    {"phi-3.5-moe", "Phi-3.5-MoE but for LongRoPE's factors (published configuration)", 32, 4096,
     32, 8, 6400, 16, 2, false,
     "[model]\nvocab_size = 32064\nnorm = \"layer\"\nhead_bias = true\nqkv_bias = true\n"
     "output_bias = true\n[moe]\nsparse_mixer = 0.01\ndraw_experts = true\n"
     "normalize_top_k = false\nrouter_jitter = 0.01\njitter_experts = true\n"},
    {"deepseekmoe-16b", "DeepSeekMoE 16B, MegaScale-MoE table 2", 28, 2048, 16, 16, 1408, 64, 6,
     false,
     "[model]\nvocab_size = 102400\ninner_size = 10944\n[moe]\nfirst_dense_layers = "
     "1\nshared_inner_size = 2816\n"
     "normalize_top_k = false\n"},
    {"deepseek-v2-lite", "DeepSeek-V2-Lite (DeepSeek-V2, appendix B)", 27, 2048, 16, 0, 1408, 64, 6,
     false,
     "[model]\nvocab_size = 102400\ninner_size = 10944\nattention = \"latent\"\nnorm_eps = 1e-6\n"
     "[latent]\nkv_rank = 512\n[rope]\ninterleaved = true\n"
     "[moe]\nfirst_dense_layers = 1\nshared_inner_size = 2816\nnormalize_top_k = false\n"},
    {"deepseek-v3", "DeepSeek-V3 (section 4.2)", 61, 7168, 128, 0, 2048, 256, 8, false,
     "[model]\nvocab_size = 129280\ninner_size = 18432\nattention = \"latent\"\nnorm_eps = 1e-6\n"
     "[latent]\nquery_rank = 1536\nkv_rank = 512\n[rope]\ninterleaved = true\n"
     "[moe]\nfirst_dense_layers = 3\nshared_inner_size = 2048\nscore = \"sigmoid\"\n"
     "num_groups = 8\ntop_groups = 4\ngroup_score = \"top_two_sum\"\nscore_scale = 2.5\n"
     "bias_update_speed = 0.001\nbalance_coefficient = 0.0001\nbalance_scope = \"sequence\"\n"},
    {"deepseek-v3.2", "DeepSeek-V3.2 (published configuration)", 61, 7168, 128, 0, 2048, 256, 8,
     false,
     "[model]\nvocab_size = 129280\ninner_size = 18432\nattention = \"latent\"\nnorm_eps = 1e-6\n"
     "[latent]\nquery_rank = 1536\nkv_rank = 512\n[index]\ntop_k = 2048\n"
     "[rope]\ninterleaved = true\n"
     "[moe]\nfirst_dense_layers = 3\nshared_inner_size = 2048\nscore = \"sigmoid\"\n"
     "num_groups = 8\ntop_groups = 4\ngroup_score = \"top_two_sum\"\nscore_scale = 2.5\n"
     "bias_update_speed = 0.001\nbalance_coefficient = 0.0001\nbalance_scope = \"sequence\"\n"},
    {"deepseek-v4-flash", "DeepSeek-V4-Flash (published sizes)", 43, 4096, 64, 0, 2048, 256, 6,
     false, kDeepSeekV4Flash},
    {"glm-5", "GLM-5 (published configuration)", 78, 6144, 64, 0, 2048, 256, 8, false,
     "[model]\nvocab_size = 154880\ninner_size = 12288\nattention = \"latent\"\nnorm_eps = 1e-5\n"
     "[latent]\nquery_rank = 2048\nkv_rank = 512\nnope_size = 192\nvalue_size = 256\n"
     "[index]\ntop_k = 2048\nnum_heads = 32\ninterleaved = true\n"
     "[rope]\ninterleaved = true\nbase = 1000000.0\n"
     "[moe]\nfirst_dense_layers = 3\nshared_inner_size = 2048\nscore = \"sigmoid\"\n"
     "score_scale = 2.5\nbias_update_speed = 0.001\nbalance_coefficient = 0.0001\n"
     "balance_scope = \"sequence\"\n"},
    {"qwen2-57b-a14b", "Qwen2-57B-A14B shapes, Parallel Folding section 4", 28, 3584, 28, 4, 2560,
     64, 8, false,
     "[model]\nvocab_size = 151936\nqkv_bias = true\n[rope]\nbase = "
     "1000000.0\n[moe]\nshared_inner_size = 20480\nshared_gate = "
     "true\nnormalize_top_k = false\n"},
    {"gpt-oss-20b", "gpt-oss-20b (model card, table 1)", 24, 2880, 64, 8, 2880, 32, 4, false,
     kGptOss},
    {"gpt-oss-120b", "gpt-oss-120b (model card, table 1)", 36, 2880, 64, 8, 2880, 128, 4, false,
     kGptOss},
    {"kimi-k2", "Kimi K2 (published configuration)", 61, 7168, 64, 0, 2048, 384, 8, false,
     "[model]\nvocab_size = 163840\ninner_size = 18432\nattention = \"latent\"\nnorm_eps = 1e-6\n"
     "[latent]\nquery_rank = 1536\nkv_rank = 512\n[rope]\ninterleaved = true\nbase = 50000.0\n"
     "[moe]\nfirst_dense_layers = 1\nshared_inner_size = 2048\nscore = \"sigmoid\"\n"
     "score_scale = 2.827\nbias_update_speed = 0.001\nbalance_coefficient = 0.001\n"
     "balance_scope = \"sequence\"\n"},
    {"moonlight-16b-a3b", "Moonlight-16B-A3B (published configuration)", 27, 2048, 16, 0, 1408, 64,
     6, false,
     "[model]\nvocab_size = 163840\ninner_size = 11264\nattention = \"latent\"\n"
     "[latent]\nkv_rank = 512\n[rope]\ninterleaved = true\nbase = 50000.0\n"
     "[moe]\nfirst_dense_layers = 1\nshared_inner_size = 2816\nscore = \"sigmoid\"\n"
     "score_scale = 2.446\nbias_update_speed = 0.001\nbalance_coefficient = 0.001\n"
     "balance_scope = \"sequence\"\n"},
    {"glm-4.7-flash", "GLM-4.7-Flash (published configuration)", 47, 2048, 20, 0, 1536, 64, 4,
     false,
     "[model]\nvocab_size = 154880\ninner_size = 10240\nattention = \"latent\"\n"
     "[latent]\nquery_rank = 768\nkv_rank = 512\nnope_size = 192\nvalue_size = 256\n"
     "[rope]\ninterleaved = true\nbase = 1000000.0\n"
     "[moe]\nfirst_dense_layers = 1\nshared_inner_size = 1536\nscore = \"sigmoid\"\n"
     "score_scale = 1.8\nbias_update_speed = 0.001\n"},
    {"dots-llm1", "dots.llm1 (published configuration)", 62, 4096, 32, 32, 1408, 128, 6, false,
     "[model]\nvocab_size = 152064\ninner_size = 10944\nqk_norm = \"head\"\n[rope]\nbase = "
     "10000000.0\n[moe]\nfirst_dense_layers = 1\nshared_inner_size = 2816\nscore = \"sigmoid\"\n"
     "score_scale = 2.5\nbias_update_speed = 0.001\n"},
    {"minimax-m2", "MiniMax-M2 (published configuration)", 62, 3072, 48, 8, 1536, 256, 8, false,
     "[model]\nvocab_size = 200064\nhead_size = 128\nqk_norm = \"all\"\nnorm_eps = 1e-6\n"
     "[rope]\nbase = 5000000.0\nfraction = 0.5\n[moe]\nscore = \"sigmoid\"\n"
     "bias_update_speed = 0.001\n"},
    {"ernie-4.5-21b-a3b", "ERNIE-4.5-21B-A3B (published configuration)", 28, 2560, 20, 4, 1536, 64,
     6, true,
     "[model]\nvocab_size = 103424\ninner_size = 12288\nhead_size = 128\n"
     "[rope]\ninterleaved = true\nbase = 500000.0\n[moe]\nfirst_dense_layers = 1\n"
     "shared_inner_size = 3072\nbias_update_speed = 0.001\n"},
    {"hunyuan-a13b", "Hunyuan-A13B (published configuration, before its longer contexts)", 32, 4096,
     32, 8, 3072, 64, 8, true,
     "[model]\nvocab_size = 128167\nhead_size = 128\nqk_norm = \"head\"\n"
     "norm_after_rotation = true\n[moe]\nshared_inner_size = 3072\n"},
    {"granite-3.1-3b-a800m", "Granite 3.1 3B-A800M (published configuration)", 32, 1536, 24, 8, 512,
     40, 8, true,
     "[model]\nvocab_size = 49155\nnorm_eps = 1e-6\nembedding_multiplier = 12.0\n"
     "residual_multiplier = 0.22\nattention_multiplier = 0.015625\nlogits_divisor = 6.0\n"
     "[rope]\nbase = 10000000.0\n[moe]\nscore_order = \"after_top_k\"\n"},
    {"qwen3-30b-a3b", "Qwen3-30B-A3B, Parallel Folding section 4", 48, 2048, 32, 4, 768, 128, 8,
     false,
     "[model]\nvocab_size = 151936\nhead_size = 128\nqk_norm = \"head\"\n[rope]\nbase = "
     "1000000.0\n"},
    {"qwen3-next-80b-a3b", "Qwen3-Next-80B-A3B (published configuration)", 48, 2048, 16, 2, 512,
     512, 10, false, kQwen3Next},
    {"qwen3.5-35b-a3b", "Qwen3.5-35B-A3B, its text part (published configuration)", 40, 2048, 16, 2,
     512, 256, 8, false, kQwen35},
    {"granite-4.0-h-small", "Granite 4.0 H Small (published configuration)", 40, 4096, 32, 8, 768,
     72, 10, true, kGraniteHybrid},
    {"nemotron-3-nano-30b-a3b", "Nemotron 3 Nano 30B-A3B (published configuration)", 52, 2688, 32,
     2, 1856, 128, 6, false, kNemotronNano},
    {"k-exaone-236b-a23b", "K-EXAONE 236B-A23B (published configuration)", 48, 6144, 64, 8, 2048,
     128, 8, false, kExaone},
    {"llama4-scout-17b-16e", "Llama 4 Scout 17B-16E, of text (published configuration)", 48, 5120,
     40, 8, 8192, 16, 1, false, kLlama4},
    {"gemma4-26b-a4b", "the text model of Gemma 4 26B-A4B (published configuration)", 30, 2816, 16,
     2, 704, 128, 8, true, kGemma4},
    {"lfm2-8b-a1b", "LFM2-8B-A1B (published configuration)", 24, 2048, 32, 8, 1792, 32, 4, true,
     kLfm2},
    {"trinity-mini", "Trinity Mini, Arcee AI 2025", 32, 2048, 32, 4, 1024, 128, 8, false,
     kTrinityMini},
    {"kimi-linear-48b-a3b", "Kimi Linear 48B-A3B, Kimi Team 2025", 27, 2304, 32, 0, 1024, 256, 8,
     false, kKimiLinear},
};

/// The window's layers 0, 2, 4 and so on.
std::string every_other_layer(int64_t num_layers) {
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < num_layers; layer += 2) layers.push_back(layer);
  return fmt::format("model.window_layers = [{}]\n", fmt::join(layers, ", "));
}

std::string list_layers(const char* key, int64_t num_layers, auto is_listed,
                        const char* section = "model") {
  std::vector<int64_t> layers;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    if (is_listed(layer)) layers.push_back(layer);
  }
  return fmt::format("{}.{} = [{}]\n", section, key, fmt::join(layers, ", "));
}

/// All layers but every sixth.
std::string five_of_six_layers(const char* key, int64_t num_layers) {
  return list_layers(key, num_layers, [](int64_t layer) { return layer % 6 != 5; });
}

/// Layers 0, 1, 2, 4, 5, 6 and so on.
std::string three_of_four_layers(const char* key, int64_t num_layers) {
  return list_layers(key, num_layers, [](int64_t layer) { return layer % 4 != 3; });
}

/// All layers but those that attend.
std::string layers_but(std::span<const int64_t> attending, const char* key, int64_t num_layers) {
  return list_layers(key, num_layers, [&](int64_t layer) {
    return std::ranges::find(attending, layer) == attending.end();
  });
}

/// Even layers sparse, odd ones heavy, but for the first two.
std::string compressed_layers(int64_t num_layers) {
  const auto list = [&](const char* key, int64_t rest) {
    return list_layers(
        key, num_layers, [&](int64_t layer) { return layer >= 2 && layer % 2 == rest; },
        "compressed");
  };
  return list("sparse_layers", 0) + list("heavy_layers", 1);
}

std::string granite_layers(int64_t num_layers) {
  return list_layers("mamba_layers", num_layers, [](int64_t layer) { return layer % 10 != 5; });
}

std::string nemotron_layers(std::string_view pattern) {
  const auto list = [&](const char* key, std::string_view letters) {
    return list_layers(key, std::ssize(pattern), [&](int64_t layer) {
      return letters.find(pattern[layer]) != std::string_view::npos;
    });
  };
  return list("mamba_layers", "M") + list("layers_without_mlp", "M*") +
         list("layers_without_mixer", "E");
}

Preset make_published(const PublishedShape& s) {
  // The extra text may open [model] or [moe] itself, so all keys are given in dotted form first.
  std::string toml = fmt::format(
      "model.num_layers = {}\nmodel.hidden_size = {}\nmodel.num_heads = {}\nmodel.num_kv_heads = "
      "{}\nmodel.tie_embeddings = {}\nmoe.num_experts = {}\n",
      s.layers, s.hidden, s.heads, s.kv_heads, s.tied, s.experts);
  toml += s.experts == 0 ? fmt::format("model.inner_size = {}\n", s.inner)
                         : fmt::format("moe.inner_size = {}\nmoe.top_k = {}\n", s.inner, s.top_k);
  std::string section;
  std::string_view rest = s.extra;
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    rest.remove_prefix(end + 1);
    if (line.front() == '[') {
      section = line.substr(1, line.size() - 2);
    } else {
      toml += fmt::format("{}.{}\n", section, line);
    }
  }
  if (s.extra == kGptOss) toml += every_other_layer(s.layers);
  if (s.extra == kQwen3Next || s.extra == kQwen35)
    toml += three_of_four_layers("delta_layers", s.layers);
  if (s.extra == kLlama4 || s.extra == kExaone || s.extra == kTrinityMini)
    toml += three_of_four_layers("window_layers", s.layers);
  if (s.extra == kGemma4) toml += five_of_six_layers("window_layers", s.layers);
  if (s.extra == kLfm2) toml += layers_but(kLfm2AttentionLayers, "conv_layers", s.layers);
  if (s.extra == kKimiLinear) toml += layers_but(kKimiAttentionLayers, "delta_layers", s.layers);
  if (s.extra == kDeepSeekV4Flash) toml += compressed_layers(s.layers);
  if (s.extra == kGraniteHybrid) toml += granite_layers(s.layers);
  if (s.extra == kNemotronNano) toml += nemotron_layers(kNemotronNanoLayers);
  return {s.name, s.source, toml};
}

std::vector<Preset> make_presets() {
  std::vector<Preset> result = {
      {"tiny", "for trying things out in seconds",
       "[model]\nhidden_size = 64\nnum_layers = 2\nnum_heads = 4\nnum_kv_heads = 2\n"
       "[moe]\nnum_experts = 4\ntop_k = 2\ninner_size = 128\n"},
      {"laptop", "minutes on a laptop's cores",
       "[model]\nhidden_size = 384\nnum_layers = 6\nnum_heads = 6\nnum_kv_heads = 2\n"
       "[moe]\nnum_experts = 8\ntop_k = 2\ninner_size = 512\n"},
      {"workstation", "the model that bench/step_bench measures",
       "[model]\nvocab_size = 32768\nhidden_size = 512\nnum_layers = 8\nnum_heads = "
       "8\ntie_embeddings = false\n"
       "[moe]\nnum_experts = 8\ntop_k = 2\ninner_size = 1024\n"},
  };
  for (const PublishedShape& shape : kPublished) result.push_back(make_published(shape));
  return result;
}

}  // namespace

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = make_presets();
  return all;
}

const Preset& find_preset(const std::string& name) {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) {
    if (preset.name == name) return preset;
    names.push_back(preset.name);
  }
  user_error("there is no preset '{}'{}; `tessera inspect --presets` lists them", name,
             did_you_mean(name, names));
}

}  // namespace tessera
