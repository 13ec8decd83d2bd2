#include "model/mixers/mamba_blocks.h"

#include "model/build/sequence_exchange.h"
#include "model/mixers/short_conv_block.h"
#include "ops/gated_norm/gated_group_norm.h"
#include "ops/ssd_scan/ssd_scan.h"

namespace tessera {
namespace {

ValueId mamba_projection(LayerBuilder& builder, const std::string& name, ValueId x, int64_t width) {
  const Shape global = {width, builder.config.hidden_size};
  return builder.column_linear("mamba." + name, x, builder.head_rows(global).slice, 1,
                               builder.config.mamba.proj_bias, "mamba_" + name);
}

/// Projected, then convolved; `state` is the port of the cached inputs.
ValueId convolve_projected(LayerBuilder& builder, const std::string& name, ValueId x,
                           int64_t num_heads, int64_t head_size, Port state) {
  const MambaConfig& mamba = builder.config.mamba;
  const ValueId projected = mamba_projection(builder, name, x, num_heads * head_size);
  return build_short_conv(builder,
                          {.weight = fmt::format("mamba.{}_conv", name),
                           .num_heads = num_heads,
                           .head_size = head_size,
                           .taps = mamba.conv_size,
                           .biased = mamba.conv_bias,
                           .state = state},
                          projected, fmt::format("mamba_{}_conv", name));
}

/// What the rank scans: its own heads among those of its weights.
SsdSpec scan_spec(const LayerBuilder& builder) {
  const MambaConfig& mamba = builder.config.mamba;
  const int64_t heads = mamba.num_heads / builder.tp();
  const IndexRange own = sequence_heads(builder.groups, heads);
  const IndexRange groups = sequence_heads(builder.groups, mamba.num_groups / builder.tp());
  return {.num_heads = own.count,
          .num_groups = groups.count,
          .head_size = mamba.head_size,
          .state_size = mamba.state_size,
          .min_step = mamba.min_step,
          .max_step = mamba.max_step,
          .all_heads = own.count < heads ? heads : 0,
          .first_head = own.begin};
}

/// The scan itself, of x, dt, B and C.
ValueId run_scan(LayerBuilder& builder, std::vector<ValueId> inputs) {
  const MambaConfig& mamba = builder.config.mamba;
  const SsdSpec spec = scan_spec(builder);
  for (const char* name : {"mamba.log_decay", "mamba.skip", "mamba.step_bias"})
    inputs.push_back(builder.f32_weight(name, builder.head_rows({mamba.num_heads})));
  Program& program = builder.program();
  if (builder.has_slots()) {
    builder.add_slots(inputs);
    return program.add(make_ssd_scan_batch(spec, builder.cache->num_slots), inputs, {"mamba_out"},
                       {builder.port(Port::kScanStates)})[0];
  }
  inputs.push_back(builder.port(builder.cache ? Port::kStart : Port::kCuSeqlens));
  if (!builder.cache) return program.add1(make_ssd_scan(spec), inputs, "mamba_out");
  return program.add(make_ssd_scan_cached(spec), inputs, {"mamba_out"},
                     {builder.port(Port::kScanStates)})[0];
}

}  // namespace

ValueId build_mamba(LayerBuilder& builder, ValueId normed) {
  const ModelConfig& config = builder.config;
  const MambaConfig& mamba = config.mamba;
  const ValueId gathered = builder.gather_tokens(normed, "mamba_in");
  const ValueId z = mamba_projection(builder, "z", gathered, mamba.inner());
  const auto convolved = [&](const char* name, int64_t heads, int64_t size, Port state) {
    return convolve_projected(builder, name, gathered, heads, size, state);
  };
  const ValueId x = convolved("x", mamba.num_heads, mamba.head_size, Port::kValueConvState);
  const ValueId b = convolved("b", mamba.num_groups, mamba.state_size, Port::kKeyConvState);
  const ValueId c = convolved("c", mamba.num_groups, mamba.state_size, Port::kQueryConvState);
  const int64_t heads = mamba.num_heads / builder.tp();
  const ValueId dt = gather_sequences(
      builder, mamba_projection(builder, "dt", gathered, mamba.num_heads), heads, "mamba_dt");
  const ValueId scanned =
      scatter_sequences(builder, run_scan(builder, {x, dt, b, c}), heads, "mamba_out");
  const ValueId weight =
      builder.f32_weight("mamba.norm.weight", builder.head_rows({mamba.inner()}));
  const GroupNormSpec norm{.num_groups = mamba.num_groups / builder.tp(), .eps = config.norm_eps};
  const ValueId gated =
      builder.program().add1(make_gated_group_norm(norm), {scanned, z, weight}, "mamba_gated");
  return builder.row_linear("mamba.o", gated, mamba.inner(), config.hidden_size, mamba.proj_bias,
                            "mamba_projected");
}

}  // namespace tessera
