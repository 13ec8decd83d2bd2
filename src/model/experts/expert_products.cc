#include "model/experts/expert_products.h"

#include "ops/add/add.h"

namespace tessera {

ExpertShare expert_share(const LayerBuilder& builder) {
  const MoeConfig& moe = builder.config.moe;
  const int64_t count = moe.num_experts / builder.groups.ep->size();
  ExpertShare share{
      .experts = {builder.groups.ep->rank() * count, count}, .sizes = {}, .first_sizes = {}};
  const auto sizes = moe.expert_sizes();
  for (int64_t e = share.experts.begin; e < share.experts.end(); ++e) {
    const int64_t size = sizes[e] / builder.groups.etp->size();
    share.sizes.push_back(size);
    share.first_sizes.push_back(builder.config.is_gated() ? 2 * size : size);
  }
  return share;
}

Slice expert_rows(const LayerBuilder& builder, const ExpertShare& share, int64_t parts) {
  const int64_t etp_rank = builder.groups.etp->rank();
  std::vector<IndexRange> rows;
  int64_t at = 0;
  const auto sizes = builder.config.moe.expert_sizes();
  for (int64_t e = 0; e < std::ssize(sizes); ++e) {
    const int64_t size = sizes[e];
    const bool local = e >= share.experts.begin && e < share.experts.end();
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t count = size / builder.groups.etp->size();
      if (local) rows.push_back({at + etp_rank * count, count});
      at += size;
    }
  }
  return Slice::of_rows({at, builder.config.expert_width()}, std::move(rows));
}

namespace {

struct ExpertAdapter {
  ValueId down, up;
};

/// One of its matrices has blocks as the product's matrix, but r columns; the other one r rows of
/// the experts' width an expert.
ExpertAdapter add_adapter(LayerBuilder& builder, const ExpertShare& share,
                          const ExpertProduct& product) {
  const int64_t rank = builder.config.lora.rank;
  const IndexRange& experts = share.experts;
  const Slice blocks = expert_rows(builder, share, product.parts);
  const WeightPlacement narrow = {.slice = Slice::of_rows({blocks.global[0], rank}, blocks.rows),
                                  .expert = true};
  const WeightPlacement wide = {
      .slice = Slice::of_rows({builder.config.moe.num_experts * rank, blocks.global[1]},
                              {{experts.begin * rank, experts.count * rank}}),
      .expert = true};
  const bool is_out = product.side == GroupedSide::kOut;
  return {builder.adapter(product.matrix + ".lora_a.weight", is_out ? wide : narrow),
          builder.adapter(product.matrix + ".lora_b.weight", is_out ? narrow : wide)};
}

}  // namespace

ValueId multiply_by_experts(LayerBuilder& builder, const ExpertShare& share,
                            const ExpertProduct& product, ValueId x, ValueId offsets,
                            const std::string& result) {
  const bool is_out = product.side == GroupedSide::kOut;
  const std::vector<int64_t>& sizes = is_out ? share.first_sizes : share.sizes;
  const auto multiply = [&](const std::vector<int64_t>& groups, ValueId a, ValueId weight,
                            const std::string& name) {
    return builder.program().add1(
        make_grouped_matmul({.group_sizes = groups, .side = product.side}), {a, weight, offsets},
        name);
  };
  if (!is_adapted(builder.config, product.matrix))
    return multiply(sizes, x, product.weight, result);
  const int64_t rank = builder.config.lora.rank;
  const std::vector<int64_t> ranks(share.experts.count, rank);
  const ExpertAdapter adapter = add_adapter(builder, share, product);
  const ValueId y = multiply(sizes, x, product.weight, result + "_base");
  const ValueId low = builder.scaled_low(
      multiply(is_out ? ranks : sizes, x, adapter.down, result + "_low"), result);
  const ValueId added = multiply(is_out ? sizes : ranks, low, adapter.up, result + "_added");
  return builder.program().add1(make_add(), {y, added}, result);
}

}  // namespace tessera
