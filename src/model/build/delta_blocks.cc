#include "model/build/delta_blocks.h"

#include "model/build/attention_blocks.h"
#include "model/build/conv_blocks.h"
#include "model/build/mamba_blocks.h"
#include "ops/delta_gates/delta_gates.h"
#include "ops/gated_delta/gated_delta.h"
#include "ops/gated_norm/gated_norm.h"
#include "ops/short_conv/short_conv.h"
#include "ops/short_conv/short_conv_batch.h"

namespace tessera {
namespace {

ValueId project(LayerBuilder& builder, const std::string& name, ValueId x, int64_t width) {
  const Shape global = {width, builder.config.hidden_size};
  return builder.column_linear("delta." + name, x, builder.head_rows(global).slice, 1, false,
                               "delta_" + name);
}

/// Projected, then convolved; `state` is the port of the cached inputs.
ValueId convolve(LayerBuilder& builder, const std::string& name, ValueId x, int64_t width,
                 Port state) {
  const ValueId projected = project(builder, name, x, width);
  const ValueId weight =
      builder.f32_weight(fmt::format("delta.{}_conv.weight", name),
                         builder.head_rows({width, builder.config.delta.conv_size}));
  const std::string result = fmt::format("delta_{}_conv", name);
  Program& program = builder.program();
  if (builder.has_slots()) {
    std::vector<ValueId> inputs = {projected, weight};
    builder.add_slots(inputs);
    return program.add(make_short_conv_batch(builder.cache->num_slots), inputs, {result},
                       {builder.port(state)})[0];
  }
  if (builder.cache) {
    return program.add(make_short_conv_cached(), {projected, weight, builder.port(Port::kStart)},
                       {result}, {builder.port(state)})[0];
  }
  return program.add1(make_short_conv(), {projected, weight, builder.port(Port::kCuSeqlens)},
                      result);
}

/// Decay and writing strength of each value head.
std::vector<ValueId> build_gates(LayerBuilder& builder, ValueId x) {
  const int64_t heads = builder.config.delta.num_value_heads;
  const ValueId strength = project(builder, "b", x, heads);
  const ValueId step = project(builder, "a", x, heads);
  const ValueId log_decay = builder.f32_weight("delta.log_decay", builder.head_rows({heads}));
  const ValueId bias = builder.f32_weight("delta.decay_bias", builder.head_rows({heads}));
  return builder.program().add(make_delta_gates(), {step, strength, log_decay, bias},
                               {"delta_decay", "delta_beta"});
}

/// The rule itself, of q, k, v and both gates.
ValueId run_rule(LayerBuilder& builder, std::vector<ValueId> inputs) {
  const DeltaConfig& delta = builder.config.delta;
  const GatedDeltaSpec spec{.num_key_heads = delta.num_key_heads / builder.tp(),
                            .num_value_heads = delta.num_value_heads / builder.tp(),
                            .key_size = delta.key_size,
                            .value_size = delta.value_size};
  Program& program = builder.program();
  if (builder.has_slots()) {
    builder.add_slots(inputs);
    return program.add(make_gated_delta_batch(spec, builder.cache->num_slots), inputs,
                       {"delta_out"}, {builder.port(Port::kDeltaStates)})[0];
  }
  inputs.push_back(builder.port(builder.cache ? Port::kStart : Port::kCuSeqlens));
  if (!builder.cache) return program.add1(make_gated_delta(spec), inputs, "delta_out");
  return program.add(make_gated_delta_cached(spec), inputs, {"delta_out"},
                     {builder.port(Port::kDeltaStates)})[0];
}

}  // namespace

ValueId build_delta(LayerBuilder& builder, ValueId normed) {
  const ModelConfig& config = builder.config;
  const DeltaConfig& delta = config.delta;
  const ValueId x = builder.gather_tokens(normed, "delta_in");
  const ValueId q = convolve(builder, "q", x, delta.keys(), Port::kQueryConvState);
  const ValueId k = convolve(builder, "k", x, delta.keys(), Port::kKeyConvState);
  const ValueId v = convolve(builder, "v", x, delta.values(), Port::kValueConvState);
  const ValueId z = project(builder, "z", x, delta.values());
  const auto gates = build_gates(builder, x);
  Program& program = builder.program();
  const ValueId read =
      run_rule(builder, {q, k, v, gates[DeltaGates::kDecay], gates[DeltaGates::kBeta]});
  const ValueId weight = builder.f32_weight("delta.norm.weight", builder.whole({delta.value_size}));
  const ValueId gated =
      program.add1(make_gated_norm(config.norm_eps), {read, z, weight}, "delta_gated");
  return builder.row_linear("delta.o", gated, delta.values(), config.hidden_size, false,
                            "delta_projected");
}

ValueId build_mixer(LayerBuilder& builder, ValueId normed) {
  if (builder.kind.delta) return build_delta(builder, normed);
  if (builder.kind.conv) return build_conv(builder, normed);
  return builder.kind.mamba ? build_mamba(builder, normed) : build_attention(builder, normed);
}

}  // namespace tessera
