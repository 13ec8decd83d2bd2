#include "model/layers/layer_program.h"

#include "model/experts/mlp_blocks.h"
#include "model/experts/moe_blocks.h"
#include "model/layers/residual_blocks.h"
#include "model/mixers/delta_blocks.h"
#include "ops/add/add.h"
#include "ops/scale_by/scale_by.h"

namespace tessera {
namespace {

/// What a layer of multi-token prediction works on. Two matrices instead of one for both halves, so
/// that no operator joins or splits values.
ValueId join_embedding(LayerBuilder& builder) {
  Program& program = builder.program();
  const int64_t size = builder.config.hidden_size;
  const ValueId embedding = builder.port(Port::kEmbedded);
  const auto project = [&](const std::string& name, ValueId x) {
    return builder.linear(name + "_proj", builder.state_norm(name + "_norm", x), size, false,
                          name + "_projected");
  };
  ValueId state = builder.port(Port::kHidden);
  if (builder.config.has_streams()) return join_embedding_to_streams(builder, state, embedding);
  if (builder.config.mtp_normed) state = builder.state_norm("previous_norm", state);
  const ValueId hidden = project("hidden", state);
  const ValueId embedded = project("embed", embedding);
  return program.add1(make_add(), {hidden, embedded}, "joined");
}

const char* mixer_name(LayerKind kind) {
  if (kind.delta) return "delta_";
  if (kind.mamba) return "mamba_";
  if (kind.conv) return "conv_";
  if (kind.no_mixer) return "";
  if (kind.compression == Compression::kSparse) return "sparse_";
  if (kind.compression == Compression::kHeavy) return "heavy_";
  if (kind.no_mlp && !kind.window) return "attention_";
  return kind.window ? "window_" : "";
}

const char* mlp_name(LayerKind kind) {
  if (kind.no_mlp) return "only_";
  if (kind.no_mixer && kind.hash) return "hash_moe_only_";
  if (kind.no_mixer) return kind.moe ? "moe_only_" : "mlp_only_";
  if (kind.hash) return "hash_moe_";
  return kind.moe ? "moe_" : "dense_";
}

}  // namespace

std::string layer_kind_name(LayerKind kind) {
  return fmt::format("{}{}{}layer", kind.mtp ? "mtp_" : "", mixer_name(kind), mlp_name(kind));
}

ModelProgram build_layer(const ModelConfig& model, LayerKind kind, const BatchShape& shape,
                         const StageGroups& groups, const std::optional<CacheShape>& cache) {
  const ModelConfig config = model.of_layer(kind);
  ModelProgram layer{.forward = Program(layer_kind_name(kind))};
  Program& program = layer.forward;
  LayerBuilder builder{config, kind, shape, groups, layer, cache};
  const ValueId hidden = builder.port(Port::kHidden);

  const auto norm = [&](const char* name, ValueId x) { return builder.state_norm(name, x); };
  const auto joining = [&](ValueId given, const char* norm_name, const char* name) {
    const ValueId normed = config.post_norms ? norm(norm_name, given) : given;
    return add_scaled(program, normed, config.residual_multiplier, name);
  };
  ValueId state = kind.mtp ? join_embedding(builder) : hidden;
  if (!kind.no_mixer) {
    const ResidualRead read = read_residual(builder, state, "attn");
    const ValueId mixed =
        joining(build_mixer(builder, norm("attn_norm", read.x)), "attn_out_norm", "attn_scaled");
    state = join_residual(builder, state, read, mixed, kind.no_mlp ? "hidden_out" : "hidden_mid");
  }
  if (!kind.no_mlp) {
    const ResidualRead read = read_residual(builder, state, "mlp");
    const ValueId normed = norm("mlp_norm", read.x);
    const ValueId mlp = kind.moe ? build_moe(builder, read.x, normed)
                                 : build_mlp(builder, "mlp", normed, config.dense_inner_size());
    state = join_residual(builder, state, read, joining(mlp, "mlp_out_norm", "mlp_scaled"),
                          "hidden_out");
  }
  if (config.layer_scalars) {
    const ValueId factor = builder.constant("layer_scalar", builder.whole({1}));
    state = program.add1(make_scale_by(), {state, factor}, "layer_scaled");
  }
  layer.ports.set(Port::kHiddenOut, state);
  builder.sum_residuals_first();
  finish_ports(program, layer.ports, builder.context());
  return layer;
}

}  // namespace tessera
