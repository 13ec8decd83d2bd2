#include "model/layers/residual_blocks.h"

#include "ops/add/add.h"
#include "ops/block_linear/block_linear.h"
#include "ops/collapse_streams/collapse_streams.h"
#include "ops/mix_streams/mix_streams.h"
#include "ops/repeat_heads/repeat_heads.h"
#include "ops/scale/scale.h"
#include "ops/stream_logits/stream_logits.h"
#include "ops/stream_weights/stream_weights.h"

namespace tessera {
namespace {

StreamWeightsSpec stream_spec(const ModelConfig& config, bool collapses) {
  return {.streams = config.residual_streams,
          .iterations = config.residual_sinkhorn_iterations,
          .eps = config.residual_eps,
          .collapses = collapses};
}

/// The weights of a part's streams: a matrix, which AdamW updates in any case, as it does vectors,
/// and what its products are scaled by and added to.
struct StreamParameters {
  ValueId weight;
  ValueId scale;
  ValueId base;
};

/// Weights of streams in a program: pre, or of a part of a layer pre, post and comb.
std::vector<ValueId> weigh_streams(Program& program, const StreamWeightsSpec& spec, double eps,
                                   ValueId state, const StreamParameters& weights,
                                   const std::string& part) {
  const ValueId logits =
      program.add(make_stream_logits(eps), {state, weights.weight},
                  {part + "_stream_logits", part + "_streams.rstd"})[StreamLogits::kLogits];
  std::vector<std::string> names = {part + "_pre"};
  if (!spec.collapses) names.insert(names.end(), {part + "_post", part + "_comb"});
  return program.add(make_stream_weights(spec), {logits, weights.scale, weights.base}, names);
}

}  // namespace

ResidualRead read_residual(LayerBuilder& builder, ValueId state, const std::string& part) {
  const ModelConfig& config = builder.config;
  if (!config.has_streams()) return {.x = state};
  const StreamWeightsSpec spec = stream_spec(config, false);
  const std::string name = part + "_streams";
  const StreamParameters weights{
      builder.f32_weight(name + ".weight", builder.whole({spec.logits(), config.state_width()})),
      builder.f32_weight(name + ".scale", builder.whole({spec.scales()})),
      builder.f32_weight(name + ".base", builder.whole({spec.logits()}))};
  Program& program = builder.program();
  const auto of = weigh_streams(program, spec, config.norm_eps, state, weights, part);
  const ValueId x =
      program.add1(make_collapse_streams(), {state, of[StreamWeights::kPre]}, part + "_read");
  return {.x = x, .post = of[StreamWeights::kPost], .comb = of[StreamWeights::kComb]};
}

ValueId join_residual(LayerBuilder& builder, ValueId state, const ResidualRead& read, ValueId given,
                      const std::string& name) {
  Program& program = builder.program();
  if (!builder.config.has_streams()) return program.add1(make_add(), {state, given}, name);
  return program.add1(make_mix_streams(), {state, given, read.post, read.comb}, name);
}

ValueId spread_embedding(const ModelConfig& config, Program& program, ValueId rows) {
  if (!config.has_streams()) return rows;
  return program.add1(make_repeat_heads(1, config.residual_streams), {rows}, "hidden_streams");
}

std::string head_streams_name(int64_t depth) {
  return depth == 0 ? "head_streams." : fmt::format("mtp_heads.{}.head_streams.", depth - 1);
}

ValueId collapse_for_head(const ModelConfig& config, const StageGroups& groups, ModelProgram& head,
                          ValueId state, int64_t depth) {
  if (!config.has_streams()) return state;
  Program& program = head.forward;
  const std::string prefix = head_streams_name(depth);
  const StreamWeightsSpec spec = stream_spec(config, true);
  const auto weight = [&](const std::string& name, const Shape& shape) {
    head.placements.emplace(name, WeightPlacement{.slice = Slice::whole(shape),
                                                  .tp_copies = groups.tp->size(),
                                                  .frozen = config.lora.is_on()});
    return program.add_weight(name, {DType::kF32, shape});
  };
  const StreamParameters weights{weight(prefix + "weight", {spec.logits(), config.state_width()}),
                                 weight(prefix + "scale", {spec.scales()}),
                                 weight(prefix + "base", {spec.logits()})};
  const auto of = weigh_streams(program, spec, config.norm_eps, state, weights, "head");
  return program.add1(make_collapse_streams(), {state, of[StreamWeights::kPre]}, "head_read");
}

ValueId join_embedding_to_streams(LayerBuilder& builder, ValueId state, ValueId embedding) {
  Program& program = builder.program();
  const ModelConfig& config = builder.config;
  const int64_t size = config.hidden_size;
  const int64_t streams = config.residual_streams;
  // The streams of an embedding are copies, whose mean is it again: so it is projected once.
  const ValueId copies = program.add1(make_sum_heads(1, streams), {embedding}, "embedded_copies");
  const ValueId rows =
      program.add1(make_scale(1.0 / static_cast<double>(streams)), {copies}, "embedded_rows");
  const ValueId embedded =
      builder.linear("embed_proj", builder.norm("embed_norm", rows, size, config.norm_eps), size,
                     false, "embed_projected");
  const ValueId spread = program.add1(make_repeat_heads(1, streams), {embedded}, "embed_streams");
  const ValueId normed = builder.norm("hidden_norm", state, size, config.norm_eps);
  const ValueId weight = builder.matrix("hidden_proj.weight", builder.whole({size, size}));
  const ValueId hidden = program.add1(make_block_linear(streams, /*shared=*/true), {normed, weight},
                                      "hidden_projected");
  return program.add1(make_add(), {hidden, spread}, "joined");
}

}  // namespace tessera
