#include "train/bench/layer_tiles.h"

#include <algorithm>

#include "model/build/layer_builder.h"
#include "model/layers/block_program.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/grouped_matmul/grouped_tile_rule.h"
#include "ops/route_map/route_map.h"
#include "train/bench/bench_layer.h"
#include "train/setup/run_layout.h"
#include "train/setup/size_check.h"

namespace tessera {
namespace {

using cuda::TiledExpert;

void check_tiles(const Settings& settings) {
  require(settings.run.device != DeviceChoice::kCpu,
          "run.device = \"cpu\": tiles are those of a GPU's kernels; leave run.device out to "
          "predict them, which takes no GPU");
  require(settings.model.moe.experts == ExpertPath::kGrouped,
          "moe.experts is not \"grouped\", and the products of other experts have no tiles to "
          "choose; set moe.experts = \"grouped\"");
  require(settings.train.dtype() == DType::kBF16,
          "train.precision is not \"bf16\", and products of F32 do not run in tiles of the tensor "
          "cores; set train.precision = \"bf16\"");
}

template <typename Op>
std::vector<const Node*> find_nodes(const Program& program) {
  std::vector<const Node*> found;
  for (const Node& node : program.nodes()) {
    if (dynamic_cast<const Op*>(node.op.get()) != nullptr) found.push_back(&node);
  }
  return found;
}

/// `total` in parts that differ by one at most.
std::vector<int64_t> split_evenly(int64_t total, int64_t parts) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < parts; ++i) sizes.push_back(total / parts + (i < total % parts ? 1 : 0));
  return sizes;
}

/// Rows of each expert where every expert is chosen as often as any other.
std::vector<int64_t> balanced_rows(const RouteMap& map, int64_t num_tokens) {
  const RouteMapSpec& spec = map.spec();
  const int64_t capacity = map.capacity(num_tokens);
  if (spec.pad_to_capacity) return std::vector<int64_t>(spec.num_experts, capacity);
  const int64_t num_groups = spec.num_experts / spec.capacity_group_size;
  std::vector<int64_t> rows;
  for (const int64_t group : split_evenly(num_tokens * spec.top_k, num_groups)) {
    const auto of_group = split_evenly(std::min(group, capacity), spec.capacity_group_size);
    rows.insert(rows.end(), of_group.begin(), of_group.end());
  }
  return rows;
}

/// A weight of experts with the rows that meet it.
struct Experts {
  const ExpertSizes& sizes;
  int64_t width;
  const std::vector<int64_t>& rows_of;
};

ProductTiles predict(std::string name, const Experts& experts, bool by_rows, DType dtype) {
  ProductTiles product = {.name = std::move(name),
                          .expert_sizes = experts.sizes.to_string(),
                          .width = experts.width,
                          .by_rows = by_rows};
  std::vector<TiledExpert> tiled;
  for (size_t e = 0; e < experts.rows_of.size(); ++e) {
    const int64_t size = experts.sizes.values()[e];
    tiled.push_back({.rows = experts.rows_of[e],
                     .features = by_rows ? size : experts.width,
                     .reduction = by_rows ? experts.width : size});
    product.flops +=
        2.0 * static_cast<double>(tiled.back().rows) * static_cast<double>(size * experts.width);
  }
  const bool in_tiles = cuda::runs_in_tiles({.dtype = dtype,
                                             .num_experts = experts.sizes.num_experts(),
                                             .wide = experts.width,
                                             .largest = experts.sizes.largest()});
  if (!in_tiles || !(by_rows || cuda::parts_in_tiles(experts.sizes))) return product;
  const auto choice = [&](int height, bool gathered) {
    const auto tiles = cuda::predict_tiles(tiled, height, cuda::kModelClusters, gathered);
    return ProductTiles::Choice{height, tiles, tiles.cycles / cuda::kModelClockHz};
  };
  for (const int height : cuda::kTileHeights) product.choices.push_back(choice(height, false));
  if (by_rows) product.gathered = choice(cuda::kTileHeights[0], true);
  return product;
}

}  // namespace

LayerTiles predict_layer_tiles(const Settings& settings) {
  check_tiles(settings);
  validate(settings.model);
  check_batch(settings.model, settings.train.micro_batch, settings.data.sequence_length);
  const BatchShape shape = batch_shape(settings);
  check_shares(settings.model, shape, single_rank_groups());
  const LayerKind kind = settings.model.layer_kind(find_layer(settings.model, LayerBlock::kMoe));
  const ModelProgram layer =
      build_block(settings.model, LayerBlock::kMoe, kind, shape, single_rank_groups());
  const Program& program = layer.forward;
  const auto maps = find_nodes<RouteMap>(program);
  const auto products = find_nodes<GroupedMatmul>(program);
  ensure(maps.size() == 1 && products.size() == 2, "{} route maps and {} grouped products",
         maps.size(), products.size());
  LayerTiles result = {
      .tokens = shape.num_tokens,
      .rows_of = balanced_rows(static_cast<const RouteMap&>(*maps[0]->op), shape.num_tokens),
      .products = {}};
  const auto add = [&](const std::string& name, const Node& node, bool gradient) {
    const auto& op = static_cast<const GroupedMatmul&>(*node.op);
    const int64_t width = program.type(node.inputs[1]).shape[1];
    const bool by_rows = (op.side() == GroupedSide::kOut) != gradient;
    result.products.push_back(
        predict(name, {op.sizes(), width, result.rows_of}, by_rows, shape.dtype));
  };
  add("FC1", *products[0], false);
  add("FC2", *products[1], false);
  add("FC2 data gradient", *products[1], true);
  add("FC1 data gradient", *products[0], true);
  return result;
}

}  // namespace tessera
