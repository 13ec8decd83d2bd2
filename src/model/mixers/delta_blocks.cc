#include "model/mixers/delta_blocks.h"

#include "model/build/sequence_exchange.h"
#include "model/mixers/attention_blocks.h"
#include "model/mixers/conv_blocks.h"
#include "model/mixers/mamba_blocks.h"
#include "model/mixers/short_conv_block.h"
#include "ops/delta_gates/delta_gates.h"
#include "ops/gated_delta/gated_delta.h"
#include "ops/gated_norm/gated_norm.h"
#include "ops/kda/kda.h"
#include "ops/kda_gates/kda_gates.h"

namespace tessera {
namespace {

ValueId project(LayerBuilder& builder, const std::string& name, ValueId x, int64_t width) {
  const Shape global = {width, builder.config.hidden_size};
  return builder.column_linear("delta." + name, x, builder.head_rows(global).slice, 1, false,
                               "delta_" + name);
}

/// The heads of queries, keys or values.
struct DeltaHeads {
  int64_t count;
  int64_t size;
};

/// Projected, then convolved; `state` is the port of the cached inputs.
ValueId convolve(LayerBuilder& builder, const std::string& name, ValueId x, const DeltaHeads& heads,
                 Port state) {
  const ValueId projected = project(builder, name, x, heads.count * heads.size);
  return build_short_conv(builder,
                          {.weight = fmt::format("delta.{}_conv", name),
                           .num_heads = heads.count,
                           .head_size = heads.size,
                           .taps = builder.config.delta.conv_size,
                           .state = state},
                          projected, fmt::format("delta_{}_conv", name));
}

/// Through `rank` elements, which the ranks of the group make of their own tokens and gather.
ValueId project_through(LayerBuilder& builder, const std::string& name, ValueId normed,
                        int64_t rank, int64_t width) {
  const std::string down = fmt::format("delta_{}_down", name);
  const ValueId low = builder.linear(fmt::format("delta.{}_down", name), normed, rank, false, down);
  return builder.column_linear(fmt::format("delta.{}_up", name),
                               builder.gather_tokens(low, down + "_gathered"),
                               builder.head_rows({width, rank}).slice, 1, false, "delta_" + name);
}

/// The block's input, and of its own tokens' where a rank has some of them.
struct DeltaInput {
  ValueId normed;
  ValueId gathered;
};

/// The output gate.
ValueId build_output_gate(LayerBuilder& builder, const DeltaInput& x) {
  const DeltaConfig& delta = builder.config.delta;
  return delta.is_kimi() ? project_through(builder, "z", x.normed, delta.value_size, delta.values())
                         : project(builder, "z", x.gathered, delta.values());
}

/// Decays and writing strength of each value head that the rank runs, of all tokens. They are made
/// of its own tokens, by all heads' weights.
std::vector<ValueId> build_gates(LayerBuilder& builder, const DeltaInput& x) {
  const DeltaConfig& delta = builder.config.delta;
  const int64_t heads = delta.num_value_heads;
  const int64_t decays = delta.is_kimi() ? delta.keys() : heads;
  const ValueId strength = project(builder, "b", x.gathered, heads);
  const ValueId step = delta.is_kimi()
                           ? project_through(builder, "a", x.normed, delta.key_size, decays)
                           : project(builder, "a", x.gathered, decays);
  const ValueId log_decay = builder.f32_weight("delta.log_decay", builder.head_rows({heads}));
  const ValueId bias = builder.f32_weight("delta.decay_bias", builder.head_rows({decays}));
  auto gates =
      builder.program().add(delta.is_kimi() ? make_kda_gates() : make_delta_gates(),
                            {step, strength, log_decay, bias}, {"delta_decay", "delta_beta"});
  const int64_t own = heads / builder.tp();
  gates[DeltaGates::kDecay] =
      gather_sequences(builder, gates[DeltaGates::kDecay], own, "delta_decay");
  gates[DeltaGates::kBeta] = gather_sequences(builder, gates[DeltaGates::kBeta], own, "delta_beta");
  return gates;
}

/// The rule's operators over packed tokens, those behind a cache, and those behind states in slots.
struct DeltaRule {
  DeltaRule(const DeltaConfig& delta, const StageGroups& groups)
      : is_kimi(delta.is_kimi()),
        gated{.num_key_heads = own_heads(groups, delta.num_key_heads),
              .num_value_heads = own_heads(groups, delta.num_value_heads),
              .key_size = delta.key_size,
              .value_size = delta.value_size},
        kimi{.num_heads = own_heads(groups, delta.num_value_heads),
             .key_size = delta.key_size,
             .value_size = delta.value_size} {}

  static int64_t own_heads(const StageGroups& groups, int64_t num_heads) {
    return sequence_heads(groups, num_heads / groups.tp->size()).count;
  }

  OperatorPtr packed() const { return is_kimi ? make_kda(kimi) : make_gated_delta(gated); }
  OperatorPtr cached() const {
    return is_kimi ? make_kda_cached(kimi) : make_gated_delta_cached(gated);
  }
  OperatorPtr batch(int64_t num_slots) const {
    return is_kimi ? make_kda_batch(kimi, num_slots) : make_gated_delta_batch(gated, num_slots);
  }

  bool is_kimi;
  GatedDeltaSpec gated;
  KdaSpec kimi;
};

/// The rule itself, of q, k, v and both gates.
ValueId run_rule(LayerBuilder& builder, std::vector<ValueId> inputs) {
  const DeltaRule rule(builder.config.delta, builder.groups);
  Program& program = builder.program();
  if (builder.has_slots()) {
    builder.add_slots(inputs);
    return program.add(rule.batch(builder.cache->num_slots), inputs, {"delta_out"},
                       {builder.port(Port::kDeltaStates)})[0];
  }
  inputs.push_back(builder.port(builder.cache ? Port::kStart : Port::kCuSeqlens));
  if (!builder.cache) return program.add1(rule.packed(), inputs, "delta_out");
  return program.add(rule.cached(), inputs, {"delta_out"}, {builder.port(Port::kDeltaStates)})[0];
}

}  // namespace

ValueId build_delta(LayerBuilder& builder, ValueId normed) {
  const ModelConfig& config = builder.config;
  const DeltaConfig& delta = config.delta;
  const ValueId x = builder.gather_tokens(normed, "delta_in");
  const DeltaHeads keys{delta.num_key_heads, delta.key_size};
  const DeltaHeads values{delta.num_value_heads, delta.value_size};
  const ValueId q = convolve(builder, "q", x, keys, Port::kQueryConvState);
  const ValueId k = convolve(builder, "k", x, keys, Port::kKeyConvState);
  const ValueId v = convolve(builder, "v", x, values, Port::kValueConvState);
  const DeltaInput input{normed, x};
  const ValueId z = build_output_gate(builder, input);
  const auto gates = build_gates(builder, input);
  Program& program = builder.program();
  const ValueId read_by_rank =
      run_rule(builder, {q, k, v, gates[DeltaGates::kDecay], gates[DeltaGates::kBeta]});
  const ValueId read =
      scatter_sequences(builder, read_by_rank, delta.num_value_heads / builder.tp(), "delta_out");
  const ValueId weight = builder.f32_weight("delta.norm.weight", builder.whole({delta.value_size}));
  const NormGate gate = delta.is_kimi() ? NormGate::kSigmoid : NormGate::kSilu;
  const ValueId gated =
      program.add1(make_gated_norm(config.norm_eps, gate), {read, z, weight}, "delta_gated");
  return builder.row_linear("delta.o", gated, delta.values(), config.hidden_size, false,
                            "delta_projected");
}

ValueId build_mixer(LayerBuilder& builder, ValueId normed) {
  if (builder.kind.delta) return build_delta(builder, normed);
  if (builder.kind.conv) return build_conv(builder, normed);
  return builder.kind.mamba ? build_mamba(builder, normed) : build_attention(builder, normed);
}

}  // namespace tessera
