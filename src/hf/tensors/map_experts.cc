#include "hf/tensors/map_builder.h"

namespace tessera {

void MapBuilder::add_mlp(const std::string& hf, const std::string& own, int64_t inner_size) {
  const auto& [gate, up, down] =
      family_.mlp_names[0].empty() ? family_.expert_names : family_.mlp_names;
  const bool gated = !family_.plain_mlps;
  const std::string first = own + (gated ? "gate_up" : "up");
  const std::string gate_name = fmt::format("{}{}", hf, gate);
  const std::string up_name = fmt::format("{}{}", hf, up);
  const std::string down_name = fmt::format("{}{}", hf, down);
  const Shape up_shape{inner_size, model_.hidden_size};
  const int64_t behind = gated ? inner_size : 0;  // the gates
  if (gated) link(gate_name + ".weight", up_shape, first + ".weight");
  link(up_name + ".weight", up_shape, first + ".weight", behind);
  link(down_name + ".weight", {model_.hidden_size, inner_size}, own + "down.weight");
  if (!model_.mlp_bias) return;
  if (gated) link_vector(gate_name + ".bias", inner_size, first + ".bias");
  link_vector(up_name + ".bias", inner_size, first + ".bias", behind);
  link_vector(down_name + ".bias", model_.hidden_size, own + "down.bias");
}

void MapBuilder::add_gemma_moe() {
  const MoeConfig& moe = model_.moe;
  const int64_t hidden = model_.hidden_size;
  link(hf_ + "router.proj.weight", {moe.num_experts, hidden}, own_ + "moe.router.weight");
  link_vector(hf_ + "router.scale", hidden, own_ + "moe.router_norm.weight");
  link_vector(hf_ + "router.per_expert_scale", moe.num_experts, own_ + "moe.expert_scale");
  add_fused_experts(hf_ + "experts.gate_up_proj", hf_ + "experts.down_proj");
  add_mlp(hf_ + "mlp.", own_ + "moe.shared.", moe.shared_inner_size);
  const auto norm = [&](const char* name, const char* own_name) {
    link_norm(hf_ + name, hidden, own_ + own_name);
  };
  norm("post_feedforward_layernorm_1.weight", "moe.shared_out_norm.weight");
  norm("pre_feedforward_layernorm_2.weight", "moe.routed_norm.weight");
  norm("post_feedforward_layernorm_2.weight", "moe.routed_out_norm.weight");
}

void MapBuilder::add_moe() {
  if (family_.expert_tensors == ExpertTensors::kBesideMlp) return add_gemma_moe();
  const MoeConfig& moe = model_.moe;
  const std::string_view name = layout_.plain_moe_name ? "mlp" : family_.moe_name;
  const std::string hf = fmt::format("{}{}.", hf_, name);
  const std::string router = fmt::format("{}{}.", hf, family_.router_name);
  link(router + "weight", {moe.num_experts, model_.hidden_size}, own_ + "moe.router.weight");
  if (moe.router_bias) link_vector(router + "bias", moe.num_experts, own_ + "moe.router.bias");
  const bool optional = family_.has_key("use_expert_bias");
  if (hashed_) {
    add_hash_table(hf);
  } else if (family_.has_correction_bias() && (!optional || moe.has_expert_bias()))
    add_correction_bias(hf);
  if (family_.expert_tensors == ExpertTensors::kAlternating ||
      family_.expert_tensors == ExpertTensors::kInputsFirst) {
    add_turned_experts(hf + "experts.");
  } else if (family_.expert_tensors == ExpertTensors::kLinears ||
             family_.expert_tensors == ExpertTensors::kFused) {
    const bool named_alike = family_.expert_tensors == ExpertTensors::kLinears;
    add_fused_experts(hf + (named_alike ? "input_linear.weight" : "experts.gate_up_proj"),
                      hf + (named_alike ? "output_linear.weight" : "experts.down_proj"));
    add_linears(moe.shared_inner_size, "moe.shared.");
    return;
  } else if (layout_.fused_experts) {
    add_fused_experts(hf + "experts.gate_up_proj", hf + "experts.down_proj");
  } else {
    for (int64_t e = 0; e < moe.num_experts; ++e) add_expert(hf, e);
  }
  if (moe.latent_size > 0) {
    const int64_t hidden = model_.hidden_size;
    link(hf + "fc1_latent_proj.weight", {moe.latent_size, hidden}, own_ + "moe.latent_down.weight");
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

void MapBuilder::add_correction_bias(const std::string& hf) {
  const int64_t count = model_.moe.num_experts;
  const std::string name = fmt::format("{}{}", hf, family_.correction_name);
  const bool is_row = family_.router == RouterRule::kBiasedSoftmax;
  link(name, is_row ? Shape{1, count} : Shape{count}, own_ + "moe.expert_bias");
}

void MapBuilder::add_linears(int64_t inner_size, const std::string& own_name) {
  if (inner_size == 0) return;
  const std::string hf = fmt::format("{}{}.", hf_, family_.shared_name);
  link(hf + "input_linear.weight", {2 * inner_size, model_.hidden_size},
       own_ + own_name + "gate_up.weight");
  link(hf + "output_linear.weight", {model_.hidden_size, inner_size},
       own_ + own_name + "down.weight");
}

void MapBuilder::link_down(size_t hf, int64_t hf_begin, int64_t expert) {
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

void MapBuilder::add_expert(const std::string& hf, int64_t expert) {
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

void MapBuilder::add_fused_experts(const std::string& gate_up, const std::string& down_name) {
  const int64_t count = model_.moe.num_experts;
  const int64_t inner_size = model_.moe.inner_size;
  const int64_t hidden = model_.hidden_size;
  link(gate_up, {count, 2 * inner_size, hidden}, own_ + "moe.experts.gate_up.weight");
  const size_t down = add_hf(down_name, {count, hidden, inner_size});
  for (int64_t e = 0; e < count; ++e) link_down(down, e * hidden * inner_size, e);
}

void MapBuilder::add_turned_experts(const std::string& hf) {
  const bool alternating = family_.expert_tensors == ExpertTensors::kAlternating;
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
                          .alternating = alternating});
  }
  link(hf + "down_proj", {count, inner_size, hidden}, own_name + "down.weight");
  if (!model_.moe.mlp_bias) return;
  map_.links.push_back({.hf = add_hf(hf + "gate_up_proj_bias", {count, 2 * inner_size}),
                        .own = own(own_name + "gate_up.bias"),
                        .rows = count,
                        .cols = 2 * inner_size,
                        .alternating = alternating});
  link(hf + "down_proj_bias", {count, hidden}, own_name + "down.bias");
}

}  // namespace tessera
