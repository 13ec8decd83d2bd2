#include "model/build/mamba_blocks.h"

#include "ops/gated_norm/gated_group_norm.h"
#include "ops/short_conv/short_conv.h"
#include "ops/short_conv/short_conv_batch.h"
#include "ops/ssd_scan/ssd_scan.h"

namespace tessera {
namespace {

ValueId mamba_projection(LayerBuilder& builder, const std::string& name, ValueId x, int64_t width) {
  const Shape global = {width, builder.config.hidden_size};
  return builder.column_linear("mamba." + name, x, builder.head_rows(global).slice, 1,
                               builder.config.mamba.proj_bias, "mamba_" + name);
}

/// Projected, then convolved; `state` is the port of the cached inputs.
ValueId convolve_projected(LayerBuilder& builder, const std::string& name, ValueId x, int64_t width,
                           Port state) {
  const MambaConfig& mamba = builder.config.mamba;
  const ValueId projected = mamba_projection(builder, name, x, width);
  const std::string weight = fmt::format("mamba.{}_conv", name);
  std::vector<ValueId> inputs = {
      projected,
      builder.f32_weight(weight + ".weight", builder.head_rows({width, mamba.conv_size}))};
  if (builder.has_slots()) {
    builder.add_slots(inputs);
  } else {
    inputs.push_back(builder.port(builder.cache ? Port::kStart : Port::kCuSeqlens));
  }
  if (mamba.conv_bias)
    inputs.push_back(builder.f32_weight(weight + ".bias", builder.head_rows({width})));
  const std::string result = fmt::format("mamba_{}_conv", name);
  Program& program = builder.program();
  const ShortConvSpec spec{.biased = mamba.conv_bias};
  if (!builder.cache) return program.add1(make_short_conv(spec), inputs, result);
  const OperatorPtr goes_on = builder.has_slots()
                                  ? make_short_conv_batch(builder.cache->num_slots, spec)
                                  : make_short_conv_cached(spec);
  return program.add(goes_on, inputs, {result}, {builder.port(state)})[0];
}

/// The scan itself, of x, dt, B and C.
ValueId run_scan(LayerBuilder& builder, std::vector<ValueId> inputs) {
  const MambaConfig& mamba = builder.config.mamba;
  const SsdSpec spec{.num_heads = mamba.num_heads / builder.tp(),
                     .num_groups = mamba.num_groups / builder.tp(),
                     .head_size = mamba.head_size,
                     .state_size = mamba.state_size,
                     .min_step = mamba.min_step,
                     .max_step = mamba.max_step};
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
  const ValueId x =
      convolve_projected(builder, "x", gathered, mamba.inner(), Port::kValueConvState);
  const ValueId b = convolve_projected(builder, "b", gathered, mamba.states(), Port::kKeyConvState);
  const ValueId c =
      convolve_projected(builder, "c", gathered, mamba.states(), Port::kQueryConvState);
  const ValueId dt = mamba_projection(builder, "dt", gathered, mamba.num_heads);
  const ValueId scanned = run_scan(builder, {x, dt, b, c});
  const ValueId weight =
      builder.f32_weight("mamba.norm.weight", builder.head_rows({mamba.inner()}));
  const GroupNormSpec norm{.num_groups = mamba.num_groups / builder.tp(), .eps = config.norm_eps};
  const ValueId gated =
      builder.program().add1(make_gated_group_norm(norm), {scanned, z, weight}, "mamba_gated");
  return builder.row_linear("mamba.o", gated, mamba.inner(), config.hidden_size, mamba.proj_bias,
                            "mamba_projected");
}

}  // namespace tessera
