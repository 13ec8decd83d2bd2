#include <algorithm>
#include <set>

#include "core/error.h"
#include "hf/tensors/name_list.h"
#include "hf/tensors/packed_tensors.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {
namespace {

int64_t first_moe_layer(const ModelConfig& model) {
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.is_moe_layer(layer)) return layer;
  }
  return -1;
}

/// [first, end) of a tensor's elements.
using Spans = std::vector<std::pair<int64_t, int64_t>>;

/// The end of the elements covered without gap or overlap from the first one on.
int64_t covered_end(Spans spans, const std::string& name) {
  std::ranges::sort(spans);
  int64_t end = 0;
  for (const auto& [first, last] : spans) {
    ensure(first == end, "the elements of '{}' are not mapped exactly once, near {}", name, end);
    end = last;
  }
  return end;
}

bool may_be_unlinked(const std::string& name) {
  return name.ends_with("moe.expert_bias") || name.ends_with("moe.hash_table") ||
         name == "embedding.weight" || name == "head.weight" || name == "head.bias";
}

}  // namespace

void check_coverage(const TensorMap& map) {
  std::vector<Spans> hf(map.hf.size());
  std::vector<Spans> own(map.own.size());
  for (const TensorLink& link : map.links) {
    hf[link.hf].emplace_back(link.hf_begin, link.hf_begin + link.num_elements());
    own[link.own].emplace_back(link.own_begin, link.own_begin + link.num_elements());
  }
  for (const auto& [copy, original] : map.copies) hf[copy] = hf[original];
  for (size_t i = 0; i < map.hf.size(); ++i) {
    ensure(covered_end(hf[i], map.hf[i].name) == map.hf[i].shape.num_elements(),
           "'{}' is not mapped to its end", map.hf[i].name);
  }
  for (size_t i = 0; i < map.own.size(); ++i) {
    const int64_t end = covered_end(own[i], map.own[i].name);
    ensure(end == map.own[i].shape.num_elements() || may_be_unlinked(map.own[i].name),
           "'{}' is not mapped to its end", map.own[i].name);
  }
}

/// Whether the first dense MLP bears the name that the family has for MoE layers.
bool names_dense_as_moe(const Family& family, const ModelConfig& model, const HfTensors& tensors) {
  if (!family.kimi_delta) return false;
  for (int64_t layer = 0; layer < model.num_layers; ++layer) {
    if (model.is_moe_layer(layer)) continue;
    return tensors.find(fmt::format("model.layers.{}.{}.{}.weight", layer, family.moe_name,
                                    family.mlp_names[0])) != nullptr;
  }
  return false;
}

HfLayout detect_layout(const Family& family, const ModelConfig& model, const HfTensors& tensors) {
  HfLayout layout{.vocab_size = model.vocab_size};
  layout.stored_tied_head =
      model.tie_embeddings && tensors.find(fmt::format("{}.weight", family.head_name)) != nullptr;
  if (model.mtp_layers > 0) {
    const auto repeats = [&](std::string_view table) {
      return tensors.find(fmt::format("model.layers.{}.{}.weight", model.num_layers, table)) !=
             nullptr;
    };
    layout.repeated_embedding = repeats("embed_tokens");
    layout.repeated_head = repeats("shared_head.head");
  }
  layout.dense_as_moe = names_dense_as_moe(family, model, tensors);
  const int64_t layer = first_moe_layer(model);
  if (layer < 0) return layout;
  if (family.expert_tensors != ExpertTensors::kPlain) {
    layout.fused_experts = true;
    return layout;
  }
  const std::string plain = fmt::format("model.layers.{}.mlp.", layer);
  layout.plain_moe_name =
      family.moe_name != "mlp" &&
      tensors.find(fmt::format("{}{}.weight", plain, family.router_name)) != nullptr;
  const std::string_view name = layout.plain_moe_name ? "mlp" : family.moe_name;
  layout.fused_experts =
      tensors.find(fmt::format("model.layers.{}.{}.experts.gate_up_proj", layer, name)) != nullptr;
  return layout;
}

void check_tensors(const TensorMap& map, const HfTensors& tensors,
                   const std::vector<std::string>& ignored) {
  std::vector<std::string> missing;
  std::vector<std::string> misshapen;
  std::set<std::string, std::less<>> known(ignored.begin(), ignored.end());
  for (const MappedTensor& tensor : map.hf) {
    known.insert(tensor.name);
    const HfTensor* found = tensors.find(tensor.name);
    const std::optional<PackedTensor> packed = find_packed(tensors, tensor.name);
    if (found == nullptr && packed) {
      known.insert({packed_blocks_name(tensor.name), packed_scales_name(tensor.name)});
      check_packed(*packed, tensor.name, tensor.shape);
    } else if (found == nullptr) {
      missing.push_back(tensor.name);
    } else if (!(found->entry->shape == tensor.shape) &&
               !holds_pairs(*found->entry, tensor.shape)) {
      misshapen.push_back(fmt::format("{} is {} instead of {}", tensor.name,
                                      found->entry->shape.to_string(), tensor.shape.to_string()));
    }
  }
  std::vector<std::string> left_over;
  for (const auto& [name, tensor] : tensors.all()) {
    if (!known.contains(name)) left_over.push_back(name);
  }
  const auto part = [](const char* title, const std::vector<std::string>& names) {
    return names.empty() ? ""
                         : fmt::format("; {} ({}): {}", title, names.size(), list_names(names));
  };
  require(missing.empty() && left_over.empty() && misshapen.empty(),
          "{}: its tensors are not those of its configuration{}{}{}", tensors.path().string(),
          part("missing", missing), part("left over", left_over),
          part("of another shape", misshapen));
}

}  // namespace tessera
