#include "model/config/product_precision.h"

#include <algorithm>

#include "core/error.h"
#include "core/text/names.h"

namespace tessera {
namespace {

constexpr LayerEntryKind kPlain{"precision.plain", "weight",
                                R"("attn", "moe.experts.down@3", "all@0-5")"};

/// What may be said for a weight: "moe", "moe.experts", "moe.experts.down".
void add_names(std::string weight, std::set<std::string>& names) {
  for (size_t dot = weight.rfind('.'); dot != std::string::npos; dot = weight.rfind('.')) {
    weight.resize(dot);
    names.insert(weight);
  }
}

}  // namespace

std::optional<OperandRounding> ProductPrecision::rounding(std::vector<std::string> names) const {
  if (recipe == nullptr) return std::nullopt;
  // The indexer's weights are kept as they were loaded, and read so.
  names.emplace_back("index");
  // What is compressed stands for many tokens: its two matrices are small, and DeepSeek-V4's BF16.
  names.emplace_back("compress");
  return OperandRounding{.recipe = recipe,
                         .plain = std::move(names),
                         .plain_weight_gradients = plain_weight_gradients,
                         .fp8_products = fp8_products,
                         .keeps_copies = keeps_copies,
                         .keeps_rounded = keeps_rounded,
                         .keeps_all_rounded = keeps_all_rounded,
                         .fp8_weights = fp8_weights,
                         .overflows = recipe->is_delayed() && delayed.overflows};
}

std::vector<LayerEntry> parse_plain(const std::vector<std::string>& texts) {
  return parse_layer_entries(kPlain, texts);
}

void check_plain(const ProductPrecision& precision,
                 const std::vector<std::set<std::string>>& weights) {
  for (const LayerEntry& entry : precision.plain) {
    check_layers(kPlain.key, entry, std::ssize(weights));
    std::set<std::string> names = {"all"};
    for (int64_t layer = 0; layer < std::ssize(weights); ++layer) {
      if (!entry.covers(layer)) continue;
      for (const std::string& weight : weights[layer]) add_names(weight, names);
    }
    if (names.contains(entry.name)) continue;
    throw UserError(fmt::format(
        "precision.plain names '{}', but no product of {} has such a weight{}", entry.to_string(),
        entry.layers ? "these layers" : "a layer",
        did_you_mean(entry.name, std::vector<std::string>(names.begin(), names.end()))));
  }
}

}  // namespace tessera
