#include "ops/round_values/recipes.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/text/names.h"

namespace tessera {
namespace {

constexpr CastSpec kTensor{.width = 0};
constexpr CastSpec kTensorE5m2{.number = NarrowNumber::kE5M2, .width = 0};
constexpr CastSpec kDelayed{.width = 0, .delayed = true};
constexpr CastSpec kDelayedE5m2{.number = NarrowNumber::kE5M2, .width = 0, .delayed = true};
constexpr CastSpec kRow{};
constexpr CastSpec kTile{.length = 128};
constexpr CastSpec kBlock{.length = 128, .width = 128};
constexpr CastSpec kMx{.length = 32};
constexpr CastSpec kNv{.number = NarrowNumber::kE2M1, .length = 16, .nested = true};
constexpr CastSpec kNvBlock{
    .number = NarrowNumber::kE2M1, .length = 16, .width = 16, .nested = true};
constexpr CastSpec kNvGradient{
    .number = NarrowNumber::kE2M1, .length = 16, .nested = true, .stochastic = true};
constexpr CastSpec kNvTurned{
    .number = NarrowNumber::kE2M1, .length = 16, .nested = true, .rotated = true};
constexpr CastSpec kNvTurnedGradient{.number = NarrowNumber::kE2M1,
                                     .length = 16,
                                     .nested = true,
                                     .stochastic = true,
                                     .rotated = true};

/// In the order of Recipe's members.
constexpr Recipe kRecipes[] = {
    {"tensorwise", "a scale for each matrix, or expert's part; gradients in E5M2", kTensor, kTensor,
     kTensorE5m2, kTensor, kTensorE5m2},
    // NVIDIA's Transformer Engine, DelayedScaling with Format.HYBRID.
    {"tensorwise_delayed",
     "a scale for each operand of a layer, of its largest values in earlier steps; gradients in "
     "E5M2",
     kDelayed, kDelayed, kDelayedE5m2, kDelayed, kDelayedE5m2},
    {"rowwise", "a scale for each row or column that a product adds up", kRow, kRow, kRow, kRow,
     kRow},
    // DeepSeek-V3, section 3.3.2.
    {"blockwise", "a scale for 128 neighbours, for 128 x 128 of a weight", kTile, kBlock, kTile,
     kTile, kTile},
    // OCP Microscaling Formats 1.0; NVIDIA, "Recipes for Pre-training LLMs with MXFP8".
    {"mxfp8", "a scale for 32 neighbours", kMx, kMx, kMx, kMx, kMx},
    // NVIDIA, "Pretraining Large Language Models with NVFP4", section 4.
    {"nvfp4",
     "numbers of four bits, a scale for 16 neighbours, for 16 x 16 of a weight; gradients rounded "
     "stochastically, products over tokens rotated",
     kNv, kNvBlock, kNvGradient, kNvTurned, kNvTurnedGradient},
};

constexpr Recipe kF16Recipe{.name = "fp16",
                            .what = "IEEE half precision, without scales",
                            .activation = {},
                            .weight = {},
                            .gradient = {},
                            .token_activation = {},
                            .token_gradient = {},
                            .is_f16 = true};

}  // namespace

std::span<const Recipe> recipes() {
  return kRecipes;
}

const Recipe& f16_recipe() {
  return kF16Recipe;
}

const Recipe& find_recipe(std::string_view name) {
  const auto* const found = std::ranges::find(kRecipes, name, &Recipe::name);
  if (found != std::end(kRecipes)) return *found;
  std::vector<std::string> names;
  for (const Recipe& recipe : kRecipes) names.emplace_back(recipe.name);
  throw UserError(fmt::format("there is no recipe '{}'{}; recipes are {}", name,
                              did_you_mean(std::string(name), names), fmt::join(names, ", ")));
}

const Recipe& at_hand(const Recipe& recipe) {
  return recipe.is_delayed() ? find_recipe("tensorwise") : recipe;
}

}  // namespace tessera
