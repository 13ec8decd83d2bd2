#include "model/experts/mlp_blocks.h"

#include "ops/activation/activation.h"

namespace tessera {

std::string first_matrix_name(const ModelConfig& config) {
  return config.is_gated() ? "gate_up" : "up";
}

ValueId build_mlp(LayerBuilder& builder, const std::string& name, ValueId normed,
                  int64_t inner_size) {
  const ModelConfig& config = builder.config;
  const int64_t share = inner_size / builder.tp();
  const int64_t begin = builder.tp_rank() * share;
  std::vector<IndexRange> rows = {{begin, share}};
  if (config.is_gated()) rows.push_back({inner_size + begin, share});
  const int64_t width = config.is_gated() ? 2 * inner_size : inner_size;
  const ValueId x = builder.gather_tokens(normed, name + "_in");
  const ValueId pre =
      builder.column_linear(fmt::format("{}.{}", name, first_matrix_name(config)), x,
                            Slice::of_rows({width, config.hidden_size}, std::move(rows)), 1,
                            config.mlp_bias, name + "_pre",
                            config.is_gated() ? std::vector<int64_t>{inner_size, inner_size}
                                              : std::vector<int64_t>{inner_size});
  const ValueId act =
      builder.program().add1(make_activation(config.activation_function()), {pre}, name + "_act");
  return builder.row_linear(name + ".down", act, inner_size, config.hidden_size, config.mlp_bias,
                            name + "_out");
}

}  // namespace tessera
