#include "hf/adapter_parts.h"

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

constexpr std::string_view kWeight = ".weight";

/// The matrix that a weight's name has, without its layer: "attn.q" of "layers.3.attn.q.weight".
std::string_view matrix_name(std::string_view weight) {
  if (!weight.starts_with("layers.") || !weight.ends_with(kWeight)) return {};
  weight.remove_suffix(kWeight.size());
  weight.remove_prefix(weight.find('.') + 1);
  return weight.substr(weight.find('.') + 1);
}

/// The first rows of experts' blocks of `parts` · F_e rows each, and the number of all.
std::vector<int64_t> expert_blocks(const ModelConfig& model, int64_t parts) {
  std::vector<int64_t> begin = {0};
  for (const int64_t size : model.moe.expert_sizes()) begin.push_back(begin.back() + parts * size);
  return begin;
}

}  // namespace

int64_t AdapterParts::block_of(int64_t row) const {
  return std::ranges::upper_bound(block_begin, row) - block_begin.begin() - 1;
}

std::optional<AdapterParts> find_adapter(const ModelConfig& model, const MappedTensor& tensor) {
  const std::string_view matrix = matrix_name(tensor.name);
  if (matrix.empty() || !is_adapted(model, matrix)) return std::nullopt;
  const std::string stem = tensor.name.substr(0, tensor.name.size() - kWeight.size());
  AdapterParts adapter{.rows = stem + ".lora_b.weight",
                       .columns = stem + ".lora_a.weight",
                       .block_begin = {0, tensor.shape[0]}};
  if (!matrix.starts_with("moe.experts.")) return adapter;
  adapter.transposed = matrix == "moe.experts.down";
  if (adapter.transposed) std::swap(adapter.rows, adapter.columns);
  adapter.block_begin = expert_blocks(model, model.is_gated() && !adapter.transposed ? 2 : 1);
  return adapter;
}

}  // namespace tessera
