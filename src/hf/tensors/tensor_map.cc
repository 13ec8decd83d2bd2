#include "hf/tensors/tensor_map.h"

#include <algorithm>

#include "core/error.h"
#include "hf/tensors/map_builder.h"
#include "hf/tensors/prediction_layers.h"
#include "model/weights/parameters.h"

namespace tessera {

MapBuilder::MapBuilder(const Family& family, const ModelConfig& model, DType dtype,
                       const HfLayout& layout)
    : family_(family), model_(model), layout_(layout) {
  for (const ParameterSpec& spec : list_parameters(model, dtype)) {
    add_own({spec.name, spec.shape, spec.dtype});
  }
  for (int64_t layer = 0; layer < model.all_layers(); ++layer) {
    if (!model.is_moe_layer(layer) || model.is_hash_layer(layer)) continue;
    add_own({layer_parameter_name(model, layer, "moe.expert_bias"), {model.moe.num_experts}});
  }
}

TensorMap MapBuilder::build() {
  add_tables();
  const bool single = family_.mamba == MambaRule::kNemotron;
  for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
    if (single) {
      add_single_layer(layer);
    } else {
      add_layer(layer, fmt::format("model.layers.{}.", layer));
    }
  }
  for (int64_t layer = model_.num_layers; layer < model_.all_layers(); ++layer)
    add_prediction(layer);
  return std::move(map_);
}

void MapBuilder::link(const std::string& hf_name, const Shape& shape, const std::string& own_name,
                      int64_t first_row) {
  const int64_t cols = shape.last();
  map_.links.push_back({.hf = add_hf(hf_name, shape),
                        .own = own(own_name),
                        .own_begin = first_row * cols,
                        .rows = shape.num_rows(),
                        .cols = cols});
}

void MapBuilder::link_norm(const std::string& hf_name, int64_t size, const std::string& own_name) {
  link_vector(hf_name, size, own_name);
  map_.links.back().offset = family_.gated_delta ? 1.0F : 0.0F;
}

void MapBuilder::link_state_norm(const std::string& hf_name, const std::string& own_name) {
  link_norm(hf_name + ".weight", model_.hidden_size, own_name + ".weight");
  if (model_.norm == NormKind::kLayer)
    link_vector(hf_name + ".bias", model_.hidden_size, own_name + ".bias");
}

void MapBuilder::add_tables() {
  const Shape table{layout_.vocab_size, model_.hidden_size};
  const bool nemotron = family_.mamba == MambaRule::kNemotron;
  link(nemotron ? "backbone.embeddings.weight" : "model.embed_tokens.weight", table,
       "embedding.weight");
  link_state_norm(std::string(family_.final_norm), "final_norm");
  const std::string head = fmt::format("{}.weight", family_.head_name);
  if (!model_.tie_embeddings) {
    head_ = map_.hf.size();
    link(head, table, "head.weight");
  } else if (layout_.stored_tied_head) {
    map_.copies.emplace_back(add_hf(head, table), embedding_);
  }
  if (model_.head_bias)
    link_vector(fmt::format("{}.bias", family_.head_name), layout_.vocab_size, "head.bias");
  if (family_.deepseek_v4)
    add_streams("model.hc_head.hc_", "head_streams.", model_.residual_streams);
}

void MapBuilder::add_single_layer(int64_t layer) {
  hf_ = fmt::format("backbone.layers.{}.", layer);
  own_ = layer_parameter_name(layer, "");
  layer_ = model_.of_layer(model_.layer_kind(layer));
  link_state_norm(hf_ + "norm", own_ + (model_.has_mixer(layer) ? "attn_norm" : "mlp_norm"));
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

void MapBuilder::add_layer(int64_t layer, const std::string& hf) {
  hf_ = hf;
  own_ = layer_parameter_name(model_, layer, "");
  layer_ = model_.of_layer(model_.layer_kind(layer));
  hashed_ = model_.is_hash_layer(layer);
  const auto& [first_norm, second_norm] = family_.layer_norms;
  link_state_norm(fmt::format("{}{}", hf_, first_norm), own_ + "attn_norm");
  link_state_norm(fmt::format("{}{}", hf_, second_norm), own_ + "mlp_norm");
  add_out_norms();
  if (family_.deepseek_v4) {
    const int64_t count = (2 + model_.residual_streams) * model_.residual_streams;
    add_streams(hf_ + "hc_attn_", own_ + "attn_streams.", count);
    add_streams(hf_ + "hc_ffn_", own_ + "mlp_streams.", count);
  }
  if (family_.gemma) link_vector(hf_ + "layer_scalar", 1, own_ + "layer_scalar");
  if (model_.is_delta_layer(layer)) {
    family_.kimi_delta ? add_kimi_delta() : add_delta();
  } else if (model_.is_mamba_layer(layer)) {
    add_mamba(hf_ + "mamba.");
  } else if (model_.is_conv_layer(layer)) {
    add_conv(hf_ + "conv.");
  } else if (model_.is_latent()) {
    add_latent_attention();
  } else if (model_.is_compressed()) {
    add_compressed_attention(layer);
  } else {
    add_attention();
  }
  if (model_.is_moe_layer(layer)) {
    add_moe();
  } else if (family_.mamba == MambaRule::kGranite) {
    add_linears(model_.dense_inner_size(), "mlp.");
  } else {
    const std::string_view name = layout_.dense_as_moe ? family_.moe_name : family_.dense_name;
    add_mlp(fmt::format("{}{}.", hf_, name), own_ + "mlp.", model_.dense_inner_size());
  }
}

void MapBuilder::add_out_norms() {
  const auto& [of_attention, of_mlp] = family_.out_norms;
  if (of_attention.empty()) return;
  link_state_norm(fmt::format("{}{}", hf_, of_attention), own_ + "attn_out_norm");
  link_state_norm(fmt::format("{}{}", hf_, of_mlp), own_ + "mlp_out_norm");
}

void MapBuilder::add_projection(const std::string& hf_name, const std::string& own_name,
                                const Shape& shape, bool bias) {
  link(hf_ + hf_name + ".weight", shape, own_ + own_name + ".weight");
  if (bias) link_vector(hf_ + hf_name + ".bias", shape[0], own_ + own_name + ".bias");
}

void MapBuilder::add_output_projection() {
  add_projection(fmt::format("{}.{}", attention_name(), family_.output_name), "attn.o",
                 {layer_.hidden_size, layer_.num_heads * layer_.value_dim()}, layer_.output_bias);
}

void MapBuilder::add_attention() {
  const int64_t queries = layer_.num_heads * layer_.head_dim();
  const int64_t keys = layer_.kv_heads() * layer_.head_dim();
  const int64_t values = layer_.kv_heads() * layer_.value_dim();
  const int64_t hidden = layer_.hidden_size;
  if (layer_.attention_gate && family_.gate_name.empty()) {
    add_gated_queries();
  } else {
    add_projection(attention_name() + ".q_proj", "attn.q", {queries, hidden}, layer_.qkv_bias);
  }
  if (!family_.gate_name.empty())
    link(fmt::format("{}{}.{}.weight", hf_, attention_name(), family_.gate_name),
         {layer_.gate_width(), hidden}, own_ + "attn.gate.weight");
  add_projection(attention_name() + ".k_proj", "attn.k", {keys, hidden}, layer_.qkv_bias);
  if (!layer_.keys_as_values)
    add_projection(attention_name() + ".v_proj", "attn.v", {values, hidden}, layer_.qkv_bias);
  add_output_projection();
  if (layer_.attention_sinks)
    link_vector(fmt::format("{}self_attn.{}", hf_, family_.sinks_name), layer_.num_heads,
                own_ + "attn.sinks");
  if (layer_.qk_norm == QkNorm::kNone || layer_.qk_norm == QkNorm::kL2) return;
  const bool all = layer_.qk_norm == QkNorm::kAll;
  const auto& [query_norm, key_norm] = family_.norm_names;
  link_norm(fmt::format("{}self_attn.{}.weight", hf_, query_norm),
            all ? queries : layer_.head_dim(), own_ + "attn.q_norm.weight");
  link_norm(fmt::format("{}self_attn.{}.weight", hf_, key_norm), all ? keys : layer_.head_dim(),
            own_ + "attn.k_norm.weight");
}

void MapBuilder::add_gated_queries() {
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
  ensure(why_without_predictions(family, model).empty(), "predictions that a family cannot hold");
  TensorMap map = MapBuilder(family, model, dtype, layout).build();
  check_coverage(map);
  return map;
}

}  // namespace tessera
