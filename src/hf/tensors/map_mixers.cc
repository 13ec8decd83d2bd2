#include "hf/tensors/map_builder.h"

namespace tessera {

void MapBuilder::link_groups(size_t hf, int64_t groups, const std::vector<GroupPart>& parts,
                             int64_t cols) {
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

void MapBuilder::add_joined_delta_projections(const std::string& hf) {
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

void MapBuilder::add_apart_delta_projections(const std::string& hf) {
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

void MapBuilder::add_delta() {
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

void MapBuilder::add_kimi_delta() {
  const DeltaConfig& delta = model_.delta;
  const int64_t hidden = model_.hidden_size;
  const int64_t heads = delta.num_value_heads;
  const int64_t size = delta.value_size;
  const int64_t width = delta.values();
  const std::string hf = hf_ + "self_attn.";
  for (const char* name : {"q", "k", "v"}) {
    const std::string own = fmt::format("{}delta.{}", own_, name);
    link(fmt::format("{}{}_proj.weight", hf, name), {width, hidden}, own + ".weight");
    link_groups(add_hf(fmt::format("{}{}_conv1d.weight", hf, name), {width, 1, delta.conv_size}), 1,
                {{fmt::format("delta.{}_conv.weight", name), width}}, delta.conv_size);
  }
  link(hf + "f_a_proj.weight", {size, hidden}, own_ + "delta.a_down.weight");
  link(hf + "f_b_proj.weight", {width, size}, own_ + "delta.a_up.weight");
  link(hf + "g_a_proj.weight", {size, hidden}, own_ + "delta.z_down.weight");
  link(hf + "g_b_proj.weight", {width, size}, own_ + "delta.z_up.weight");
  link(hf + "b_proj.weight", {heads, hidden}, own_ + "delta.b.weight");
  link(hf + "A_log", {1, 1, heads, 1}, own_ + "delta.log_decay");
  link_vector(hf + "dt_bias", width, own_ + "delta.decay_bias");
  link_vector(hf + "o_norm.weight", size, own_ + "delta.norm.weight");
  link(hf + "o_proj.weight", {hidden, width}, own_ + "delta.o.weight");
}

void MapBuilder::add_mamba(const std::string& hf) {
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

void MapBuilder::add_conv(const std::string& hf) {
  const ConvConfig& conv = model_.conv;
  const int64_t hidden = model_.hidden_size;
  const auto project = [&](const std::string& end, const Shape& shape, int64_t cols) {
    link_groups(add_hf(hf + "in_proj" + end, shape), 1,
                {{"conv.b" + end, hidden}, {"conv.c" + end, hidden}, {"conv.x" + end, hidden}},
                cols);
  };
  project(".weight", {3 * hidden, hidden}, hidden);
  link_groups(add_hf(hf + "conv.weight", {hidden, 1, conv.size}), 1, {{"conv.conv.weight", hidden}},
              conv.size);
  link(hf + "out_proj.weight", {hidden, hidden}, own_ + "conv.o.weight");
  if (!conv.bias) return;
  project(".bias", {3 * hidden}, 1);
  link_vector(hf + "conv.bias", hidden, own_ + "conv.conv.bias");
  link_vector(hf + "out_proj.bias", hidden, own_ + "conv.o.bias");
}

void MapBuilder::add_latent_attention() {
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
  if (model_.index.is_on()) add_index();
}

void MapBuilder::add_index() {
  const IndexConfig& index = model_.index;
  const std::string hf = hf_ + "self_attn.indexer.";
  const int64_t hidden = model_.hidden_size;
  const Shape queries = {index.num_heads * index.head_size, model_.latent.query_rank};
  link(hf + "wq_b.weight", queries, own_ + "index.q.weight");
  link(hf + "wk.weight", {index.head_size, hidden}, own_ + "index.k.weight");
  link_vector(hf + "k_norm.weight", index.head_size, own_ + "index.k_norm.weight");
  link_vector(hf + "k_norm.bias", index.head_size, own_ + "index.k_norm.bias");
  link(hf + "weights_proj.weight", {index.num_heads, hidden}, own_ + "index.weights.weight");
}

void MapBuilder::add_kv_down() {
  const LatentConfig& latent = model_.latent;
  const int64_t rows = latent.kv_rank + latent.rope_size;
  const auto split = [&](const std::string& end, const Shape& shape, int64_t cols) {
    const size_t hf = add_hf(hf_ + "self_attn.kv_a_proj_with_mqa" + end, shape);
    map_.links.push_back(
        {.hf = hf, .own = own(own_ + "attn.kv_down" + end), .rows = latent.kv_rank, .cols = cols});
    map_.links.push_back({.hf = hf,
                          .hf_begin = latent.kv_rank * cols,
                          .own = own(own_ + "attn.k_rope" + end),
                          .rows = latent.rope_size,
                          .cols = cols});
  };
  split(".weight", {rows, model_.hidden_size}, model_.hidden_size);
  if (model_.qkv_bias) split(".bias", {rows}, 1);
}

}  // namespace tessera
