#include "hf/family/tensor_map.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "model/weights/parameters.h"

namespace tessera {
namespace {

/// Adds tensors of Hugging Face with their links, layer by layer.
class MapBuilder {
 public:
  MapBuilder(const Family& family, const ModelConfig& model, DType dtype, const HfLayout& layout)
      : family_(family), model_(model), layout_(layout) {
    for (const ParameterSpec& spec : list_parameters(model, dtype)) {
      add_own({spec.name, spec.shape, spec.dtype});
    }
    for (int64_t layer = 0; layer < model.num_layers; ++layer) {
      if (!model.is_moe_layer(layer)) continue;
      add_own({layer_parameter_name(layer, "moe.expert_bias"), {model.moe.num_experts}});
    }
  }

  TensorMap build() {
    add_tables();
    for (int64_t layer = 0; layer < model_.num_layers; ++layer) add_layer(layer);
    return std::move(map_);
  }

 private:
  void add_own(MappedTensor tensor) {
    own_index_[tensor.name] = map_.own.size();
    map_.own.push_back(std::move(tensor));
  }
  size_t own(const std::string& name) const {
    const auto found = own_index_.find(name);
    ensure(found != own_index_.end(), "the model has no tensor '{}'", name);
    return found->second;
  }
  size_t add_hf(std::string name, const Shape& shape) {
    map_.hf.push_back({std::move(name), shape});
    return map_.hf.size() - 1;
  }

  /// The whole of a tensor of Hugging Face is the rows from `first_row` of one of Tessera's.
  void link(const std::string& hf_name, const Shape& shape, const std::string& own_name,
            int64_t first_row = 0) {
    const int64_t cols = shape.last();
    map_.links.push_back({.hf = add_hf(hf_name, shape),
                          .own = own(own_name),
                          .own_begin = first_row * cols,
                          .rows = shape.num_rows(),
                          .cols = cols});
  }
  void link_vector(const std::string& hf_name, int64_t size, const std::string& own_name,
                   int64_t begin = 0) {
    map_.links.push_back({.hf = add_hf(hf_name, {size}),
                          .own = own(own_name),
                          .own_begin = begin,
                          .rows = 1,
                          .cols = size});
  }

  /// Of a layer's or a head's RMSNorm: Qwen3-Next's multiplies by 1 + weight.
  void link_norm(const std::string& hf_name, int64_t size, const std::string& own_name) {
    link_vector(hf_name, size, own_name);
    map_.links.back().offset = family_.gated_delta ? 1.0F : 0.0F;
  }

  void add_tables() {
    const Shape table{layout_.vocab_size, model_.hidden_size};
    const bool nemotron = family_.mamba == MambaRule::kNemotron;
    link(nemotron ? "backbone.embeddings.weight" : "model.embed_tokens.weight", table,
         "embedding.weight");
    link_norm(nemotron ? "backbone.norm_f.weight" : "model.norm.weight", model_.hidden_size,
              "final_norm.weight");
    if (!model_.tie_embeddings) {
      link("lm_head.weight", table, "head.weight");
    } else if (layout_.stored_tied_head) {
      map_.copies.emplace_back(add_hf("lm_head.weight", table), 0);
    }
  }

  /// Nemotron-H's: a norm and what is called a mixer, whatever it is.
  void add_single_layer(int64_t layer) {
    hf_ = fmt::format("backbone.layers.{}.", layer);
    own_ = layer_parameter_name(layer, "");
    const char* norm = model_.has_mixer(layer) ? "attn_norm.weight" : "mlp_norm.weight";
    link_norm(hf_ + "norm.weight", model_.hidden_size, own_ + norm);
    if (model_.is_mamba_layer(layer)) {
      add_mamba(hf_ + "mixer.");
    } else if (model_.has_mixer(layer)) {
      add_attention();
    } else if (model_.is_moe_layer(layer)) {
      add_moe();
    } else {
      add_mlp(hf_ + "mixer.", own_ + "mlp.", model_.dense_inner_size());
    }
  }

  void add_layer(int64_t layer) {
    if (family_.mamba == MambaRule::kNemotron) return add_single_layer(layer);
    hf_ = fmt::format("model.layers.{}.", layer);
    own_ = layer_parameter_name(layer, "");
    link_norm(hf_ + "input_layernorm.weight", model_.hidden_size, own_ + "attn_norm.weight");
    link_norm(hf_ + "post_attention_layernorm.weight", model_.hidden_size,
              own_ + "mlp_norm.weight");
    if (model_.is_delta_layer(layer)) {
      add_delta();
    } else if (model_.is_mamba_layer(layer)) {
      add_mamba(hf_ + "mamba.");
    } else if (model_.is_latent()) {
      add_latent_attention();
    } else {
      add_attention();
    }
    if (model_.is_moe_layer(layer)) {
      add_moe();
    } else if (family_.mamba == MambaRule::kGranite) {
      add_linears(model_.dense_inner_size(), "mlp.");
    } else {
      add_mlp(hf_ + "mlp.", own_ + "mlp.", model_.dense_inner_size());
    }
  }

  void add_projection(const std::string& hf_name, const std::string& own_name, const Shape& shape,
                      bool bias) {
    link(hf_ + hf_name + ".weight", shape, own_ + own_name + ".weight");
    if (bias) link_vector(hf_ + hf_name + ".bias", shape[0], own_ + own_name + ".bias");
  }

  std::string attention_name() const {
    return family_.mamba == MambaRule::kNemotron ? "mixer" : "self_attn";
  }

  void add_output_projection() {
    add_projection(attention_name() + ".o_proj", "attn.o",
                   {model_.hidden_size, model_.num_heads * model_.value_dim()}, model_.output_bias);
  }

  void add_attention() {
    const int64_t queries = model_.num_heads * model_.head_dim();
    const int64_t keys = model_.kv_heads() * model_.head_dim();
    const int64_t hidden = model_.hidden_size;
    if (model_.attention_gate) {
      add_gated_queries();
    } else {
      add_projection(attention_name() + ".q_proj", "attn.q", {queries, hidden}, model_.qkv_bias);
    }
    add_projection(attention_name() + ".k_proj", "attn.k", {keys, hidden}, model_.qkv_bias);
    add_projection(attention_name() + ".v_proj", "attn.v", {keys, hidden}, model_.qkv_bias);
    add_output_projection();
    if (model_.attention_sinks)
      link_vector(hf_ + "self_attn.sinks", model_.num_heads, own_ + "attn.sinks");
    if (model_.qk_norm == QkNorm::kNone) return;
    const bool all = model_.qk_norm == QkNorm::kAll;
    const auto& [query_norm, key_norm] = family_.norm_names;
    link_norm(fmt::format("{}self_attn.{}.weight", hf_, query_norm),
              all ? queries : model_.head_dim(), own_ + "attn.q_norm.weight");
    link_norm(fmt::format("{}self_attn.{}.weight", hf_, key_norm), all ? keys : model_.head_dim(),
              own_ + "attn.k_norm.weight");
  }

  /// A part of a tensor that stands in several of Tessera's, by the names of these.
  struct GroupPart {
    std::string own_name;
    int64_t rows = 0;  ///< of a group
  };

  /// Rows of a tensor [groups · rows of all parts, cols] in groups, each with its part of every
  /// one.
  void link_groups(size_t hf, int64_t groups, const std::vector<GroupPart>& parts, int64_t cols) {
    int64_t begin = 0;
    for (int64_t group = 0; group < groups; ++group) {
      for (const GroupPart& part : parts) {
        map_.links.push_back({.hf = hf,
                              .hf_begin = begin,
                              .own = own(own_ + part.own_name),
                              .own_begin = group * part.rows * cols,
                              .rows = part.rows,
                              .cols = cols});
        begin += part.rows * cols;
      }
    }
  }

  /// Of every head its query, then the gate of what it attends to.
  void add_gated_queries() {
    const int64_t heads = model_.num_heads;
    const int64_t size = model_.head_dim();
    const int64_t hidden = model_.hidden_size;
    const auto add = [&](const std::string& end, const Shape& shape, int64_t cols) {
      link_groups(add_hf(hf_ + "self_attn.q_proj" + end, shape), heads,
                  {{"attn.q" + end, size}, {"attn.gate" + end, size}}, cols);
    };
    add(".weight", {2 * heads * size, hidden}, hidden);
    if (model_.qkv_bias) add(".bias", {2 * heads * size}, 1);
  }

  /// Qwen3-Next's: the projections of each key head and of its value heads follow one another.
  void add_joined_delta_projections(const std::string& hf) {
    const DeltaConfig& delta = model_.delta;
    const int64_t hidden = model_.hidden_size;
    const int64_t heads = delta.num_value_heads;
    const int64_t keys = delta.keys();
    const int64_t values = delta.values();
    const int64_t group = heads / delta.num_key_heads;
    link_groups(add_hf(hf + "in_proj_qkvz.weight", {2 * keys + 2 * values, hidden}),
                delta.num_key_heads,
                {{"delta.q.weight", delta.key_size},
                 {"delta.k.weight", delta.key_size},
                 {"delta.v.weight", group * delta.value_size},
                 {"delta.z.weight", group * delta.value_size}},
                hidden);
    link_groups(add_hf(hf + "in_proj_ba.weight", {2 * heads, hidden}), delta.num_key_heads,
                {{"delta.b.weight", group}, {"delta.a.weight", group}}, hidden);
  }

  void add_apart_delta_projections(const std::string& hf) {
    const DeltaConfig& delta = model_.delta;
    const int64_t hidden = model_.hidden_size;
    const int64_t keys = delta.keys();
    const int64_t values = delta.values();
    link_groups(add_hf(hf + "in_proj_qkv.weight", {2 * keys + values, hidden}), 1,
                {{"delta.q.weight", keys}, {"delta.k.weight", keys}, {"delta.v.weight", values}},
                hidden);
    link(hf + "in_proj_z.weight", {values, hidden}, own_ + "delta.z.weight");
    link(hf + "in_proj_b.weight", {delta.num_value_heads, hidden}, own_ + "delta.b.weight");
    link(hf + "in_proj_a.weight", {delta.num_value_heads, hidden}, own_ + "delta.a.weight");
  }

  void add_delta() {
    const DeltaConfig& delta = model_.delta;
    const std::string hf = hf_ + "linear_attn.";
    const int64_t hidden = model_.hidden_size;
    const int64_t heads = delta.num_value_heads;
    const int64_t keys = delta.keys();
    const int64_t values = delta.values();
    family_.apart_delta ? add_apart_delta_projections(hf) : add_joined_delta_projections(hf);
    link_groups(add_hf(hf + "conv1d.weight", {2 * keys + values, 1, delta.conv_size}), 1,
                {{"delta.q_conv.weight", keys},
                 {"delta.k_conv.weight", keys},
                 {"delta.v_conv.weight", values}},
                delta.conv_size);
    link_vector(hf + "A_log", heads, own_ + "delta.log_decay");
    link_vector(hf + "dt_bias", heads, own_ + "delta.decay_bias");
    link_vector(hf + "norm.weight", delta.value_size, own_ + "delta.norm.weight");
    link(hf + "out_proj.weight", {hidden, values}, own_ + "delta.o.weight");
  }

  /// One projection makes the gate, x, B, C and the steps, one convolution follows x, B and C.
  void add_mamba(const std::string& hf) {
    const MambaConfig& mamba = model_.mamba;
    const int64_t hidden = model_.hidden_size;
    const int64_t heads = mamba.num_heads;
    const int64_t inner = mamba.inner();
    const int64_t states = mamba.states();
    const int64_t convolved = inner + 2 * states;
    const int64_t rows = inner + convolved + heads;
    const auto project = [&](const std::string& end, const Shape& shape, int64_t cols) {
      link_groups(add_hf(hf + "in_proj" + end, shape), 1,
                  {{"mamba.z" + end, inner},
                   {"mamba.x" + end, inner},
                   {"mamba.b" + end, states},
                   {"mamba.c" + end, states},
                   {"mamba.dt" + end, heads}},
                  cols);
    };
    const auto convolve = [&](const std::string& end, const Shape& shape, int64_t cols) {
      link_groups(add_hf(hf + "conv1d" + end, shape), 1,
                  {{"mamba.x_conv" + end, inner},
                   {"mamba.b_conv" + end, states},
                   {"mamba.c_conv" + end, states}},
                  cols);
    };
    project(".weight", {rows, hidden}, hidden);
    if (mamba.proj_bias) project(".bias", {rows}, 1);
    convolve(".weight", {convolved, 1, mamba.conv_size}, mamba.conv_size);
    if (mamba.conv_bias) convolve(".bias", {convolved}, 1);
    link_vector(hf + "A_log", heads, own_ + "mamba.log_decay");
    link_vector(hf + "D", heads, own_ + "mamba.skip");
    link_vector(hf + "dt_bias", heads, own_ + "mamba.step_bias");
    link_vector(hf + "norm.weight", inner, own_ + "mamba.norm.weight");
    link(hf + "out_proj.weight", {hidden, inner}, own_ + "mamba.o.weight");
    if (mamba.proj_bias) link_vector(hf + "out_proj.bias", hidden, own_ + "mamba.o.bias");
  }

  void add_latent_attention() {
    const LatentConfig& latent = model_.latent;
    const int64_t heads = model_.num_heads;
    const int64_t queries = heads * model_.head_dim();
    if (latent.query_rank > 0) {
      add_projection("self_attn.q_a_proj", "attn.q_down", {latent.query_rank, model_.hidden_size},
                     model_.qkv_bias);
      link_vector(hf_ + "self_attn.q_a_layernorm.weight", latent.query_rank,
                  own_ + "attn.q_latent_norm.weight");
      add_projection("self_attn.q_b_proj", "attn.q_up", {queries, latent.query_rank}, false);
    } else {
      add_projection("self_attn.q_proj", "attn.q", {queries, model_.hidden_size}, false);
    }
    add_kv_down();
    link_vector(hf_ + "self_attn.kv_a_layernorm.weight", latent.kv_rank,
                own_ + "attn.kv_latent_norm.weight");
    add_projection("self_attn.kv_b_proj", "attn.kv_up",
                   {heads * (latent.nope_size + latent.value_size), latent.kv_rank}, false);
    add_output_projection();
  }

  /// One tensor of Hugging Face: the projection into the latent, then that to the rotated key.
  void add_kv_down() {
    const LatentConfig& latent = model_.latent;
    const int64_t rows = latent.kv_rank + latent.rope_size;
    const auto split = [&](const std::string& end, const Shape& shape, int64_t cols) {
      const size_t hf = add_hf(hf_ + "self_attn.kv_a_proj_with_mqa" + end, shape);
      map_.links.push_back({.hf = hf,
                            .own = own(own_ + "attn.kv_down" + end),
                            .rows = latent.kv_rank,
                            .cols = cols});
      map_.links.push_back({.hf = hf,
                            .hf_begin = latent.kv_rank * cols,
                            .own = own(own_ + "attn.k_rope" + end),
                            .rows = latent.rope_size,
                            .cols = cols});
    };
    split(".weight", {rows, model_.hidden_size}, model_.hidden_size);
    if (model_.qkv_bias) split(".bias", {rows}, 1);
  }

  void add_mlp(const std::string& hf, const std::string& own, int64_t inner_size) {
    const Shape up{inner_size, model_.hidden_size};
    if (family_.plain_mlps) {
      link(hf + "up_proj.weight", up, own + "up.weight");
      link(hf + "down_proj.weight", {model_.hidden_size, inner_size}, own + "down.weight");
      if (!model_.mlp_bias) return;
      link_vector(hf + "up_proj.bias", inner_size, own + "up.bias");
      link_vector(hf + "down_proj.bias", model_.hidden_size, own + "down.bias");
      return;
    }
    link(hf + "gate_proj.weight", up, own + "gate_up.weight");
    link(hf + "up_proj.weight", up, own + "gate_up.weight", inner_size);
    link(hf + "down_proj.weight", {model_.hidden_size, inner_size}, own + "down.weight");
    if (!model_.mlp_bias) return;
    link_vector(hf + "gate_proj.bias", inner_size, own + "gate_up.bias");
    link_vector(hf + "up_proj.bias", inner_size, own + "gate_up.bias", inner_size);
    link_vector(hf + "down_proj.bias", model_.hidden_size, own + "down.bias");
  }

  void add_moe() {
    const MoeConfig& moe = model_.moe;
    const std::string_view name = layout_.plain_moe_name ? "mlp" : family_.moe_name;
    const std::string hf = fmt::format("{}{}.", hf_, name);
    const std::string router = fmt::format("{}{}.", hf, family_.router_name);
    link(router + "weight", {moe.num_experts, model_.hidden_size}, own_ + "moe.router.weight");
    if (moe.router_bias) link_vector(router + "bias", moe.num_experts, own_ + "moe.router.bias");
    if (family_.has_correction_bias()) add_correction_bias(hf);
    if (family_.expert_tensors == ExpertTensors::kAlternating) {
      add_alternating_experts(hf + "experts.");
    } else if (family_.expert_tensors == ExpertTensors::kLinears) {
      add_fused_experts(hf + "input_linear.weight", hf + "output_linear.weight");
      add_linears(moe.shared_inner_size, "moe.shared.");
      return;
    } else if (layout_.fused_experts) {
      add_fused_experts(hf + "experts.gate_up_proj", hf + "experts.down_proj");
    } else {
      for (int64_t e = 0; e < moe.num_experts; ++e) add_expert(hf, e);
    }
    if (moe.latent_size > 0) {
      const int64_t hidden = model_.hidden_size;
      link(hf + "fc1_latent_proj.weight", {moe.latent_size, hidden},
           own_ + "moe.latent_down.weight");
      link(hf + "fc2_latent_proj.weight", {hidden, moe.latent_size}, own_ + "moe.latent_up.weight");
    }
    if (moe.shared_inner_size == 0) return;
    add_mlp(fmt::format("{}{}.", hf, family_.shared_name), own_ + "moe.shared.",
            moe.shared_inner_size);
    if (moe.shared_gate) {
      link(fmt::format("{}{}_gate.weight", hf, family_.shared_name), {1, model_.hidden_size},
           own_ + "moe.shared_gate.weight");
    }
  }

  /// ERNIE's is a row for each kind of input, of which text is the only one.
  void add_correction_bias(const std::string& hf) {
    const int64_t count = model_.moe.num_experts;
    const std::string name = fmt::format("{}{}", hf, family_.correction_name);
    const bool is_row = family_.router == RouterRule::kBiasedSoftmax;
    link(name, is_row ? Shape{1, count} : Shape{count}, own_ + "moe.expert_bias");
  }

  /// Granite's shared expert, or dense MLP.
  void add_linears(int64_t inner_size, const std::string& own_name) {
    if (inner_size == 0) return;
    const std::string hf = fmt::format("{}{}.", hf_, family_.shared_name);
    link(hf + "input_linear.weight", {2 * inner_size, model_.hidden_size},
         own_ + own_name + "gate_up.weight");
    link(hf + "output_linear.weight", {model_.hidden_size, inner_size},
         own_ + own_name + "down.weight");
  }

  /// FC2 is stored input x output, unlike Hugging Face's.
  void link_down(size_t hf, int64_t hf_begin, int64_t expert) {
    const int64_t inner_size = model_.moe.inner_size;
    const int64_t width = model_.expert_width();
    map_.links.push_back({.hf = hf,
                          .hf_begin = hf_begin,
                          .own = own(own_ + "moe.experts.down.weight"),
                          .own_begin = expert * inner_size * width,
                          .rows = inner_size,
                          .cols = width,
                          .transposed = true});
  }

  void add_expert(const std::string& hf, int64_t expert) {
    const int64_t inner_size = model_.moe.inner_size;
    const Shape up{inner_size, model_.expert_width()};
    const auto& [gate_name, up_name, down_name] = family_.expert_names;
    const std::string name = fmt::format("{}experts.{}.", hf, expert);
    const std::string up_weight = fmt::format("{}{}.weight", name, up_name);
    if (family_.plain_mlps) {
      link(up_weight, up, own_ + "moe.experts.up.weight", expert * inner_size);
    } else {
      const std::string own_name = own_ + "moe.experts.gate_up.weight";
      link(fmt::format("{}{}.weight", name, gate_name), up, own_name, 2 * expert * inner_size);
      link(up_weight, up, own_name, (2 * expert + 1) * inner_size);
    }
    link_down(
        add_hf(fmt::format("{}{}.weight", name, down_name), {model_.expert_width(), inner_size}), 0,
        expert);
  }

  void add_fused_experts(const std::string& gate_up, const std::string& down_name) {
    const int64_t count = model_.moe.num_experts;
    const int64_t inner_size = model_.moe.inner_size;
    const int64_t hidden = model_.hidden_size;
    link(gate_up, {count, 2 * inner_size, hidden}, own_ + "moe.experts.gate_up.weight");
    const size_t down = add_hf(down_name, {count, hidden, inner_size});
    for (int64_t e = 0; e < count; ++e) link_down(down, e * hidden * inner_size, e);
  }

  void add_alternating_experts(const std::string& hf) {
    const int64_t count = model_.moe.num_experts;
    const int64_t inner_size = model_.moe.inner_size;
    const int64_t hidden = model_.hidden_size;
    const std::string own_name = own_ + "moe.experts.";
    const size_t gate_up = add_hf(hf + "gate_up_proj", {count, hidden, 2 * inner_size});
    for (int64_t e = 0; e < count; ++e) {
      const int64_t begin = e * 2 * inner_size * hidden;
      map_.links.push_back({.hf = gate_up,
                            .hf_begin = begin,
                            .own = own(own_name + "gate_up.weight"),
                            .own_begin = begin,
                            .rows = 2 * inner_size,
                            .cols = hidden,
                            .transposed = true,
                            .alternating = true});
    }
    map_.links.push_back({.hf = add_hf(hf + "gate_up_proj_bias", {count, 2 * inner_size}),
                          .own = own(own_name + "gate_up.bias"),
                          .rows = count,
                          .cols = 2 * inner_size,
                          .alternating = true});
    link(hf + "down_proj", {count, inner_size, hidden}, own_name + "down.weight");
    link(hf + "down_proj_bias", {count, hidden}, own_name + "down.bias");
  }

  const Family& family_;
  const ModelConfig& model_;
  HfLayout layout_;
  TensorMap map_;
  std::unordered_map<std::string, size_t> own_index_;
  std::string hf_;   // prefix of the layer's names
  std::string own_;  // the same in Tessera
};

}  // namespace

int64_t TensorLink::hf_index(int64_t idx) const {
  int64_t row = idx / cols;
  int64_t col = idx % cols;
  if (transposed) std::swap(row, col);
  const int64_t half = hf_cols() / 2;
  if (alternating) col = col % half * 2 + col / half;
  return row * hf_cols() + col;
}

TensorMap map_tensors(const Family& family, const ModelConfig& model, DType dtype,
                      const HfLayout& layout) {
  require(layout.vocab_size > 0 && layout.vocab_size <= model.vocab_size,
          "a vocabulary of {} does not fit into the model's {}", layout.vocab_size,
          model.vocab_size);
  TensorMap map = MapBuilder(family, model, dtype, layout).build();
  check_coverage(map);
  return map;
}

}  // namespace tessera
