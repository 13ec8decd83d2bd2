#include "model/build/layer_builder.h"

#include <algorithm>

#include "core/text/nearest.h"
#include "model/build/sequence_exchange.h"
#include "model/build/token_share.h"
#include "ops/add/add.h"
#include "ops/add_bias/add_bias.h"
#include "ops/collective/collective.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/scale/scale.h"

namespace tessera {

ValueId LayerBuilder::add_weight(const std::string& name, DType dtype, WeightPlacement placement) {
  const ValueType type{dtype, placement.slice.shape()};
  layer.placements.emplace(name, std::move(placement));
  return program().add_weight(name, type);
}

ValueId LayerBuilder::linear(const std::string& name, ValueId x, int64_t width, bool bias,
                             const std::string& result) {
  return column_linear(name, x, Slice::whole({width, program().type(x).shape.last()}), tp(), bias,
                       result);
}

ValueId LayerBuilder::column_linear(const std::string& name, ValueId x, const Slice& rows,
                                    int64_t copies, bool bias, const std::string& result,
                                    std::vector<int64_t> matrix_rows) {
  std::vector<ValueId> inputs = {
      x, matrix(name + ".weight",
                {.slice = rows, .tp_copies = copies, .matrix_rows = std::move(matrix_rows)})};
  if (bias) {
    const Slice part = Slice::of_rows({rows.global[0]}, rows.rows);
    inputs.push_back(f32_weight(name + ".bias", {.slice = part, .tp_copies = copies}));
  }
  if (!is_adapted(config, name)) return program().add1(make_linear(bias), inputs, result);
  const int64_t rank = config.lora.rank;
  const LinearAdapter adapter{
      .down = whole({rank, rows.global[1]}),
      .up = {.slice = Slice::of_rows({rows.global[0], rank}, rows.rows), .tp_copies = copies}};
  const ValueId y = program().add1(make_linear(bias), inputs, result + "_base");
  return adapted(name, x, y, adapter, result);
}

ValueId LayerBuilder::adapted(const std::string& name, ValueId x, ValueId y,
                              const LinearAdapter& matrices, const std::string& result) {
  const ValueId down = adapter(name + ".lora_a.weight", matrices.down);
  const ValueId up = adapter(name + ".lora_b.weight", matrices.up);
  const ValueId low = scaled_low(program().add1(make_linear(), {x, down}, result + "_low"), result);
  const ValueId added = program().add1(make_linear(), {low, up}, result + "_added");
  adapted_sums.push_back(program().add1(make_add(), {y, added}, result));
  return adapted_sums.back();
}

void LayerBuilder::sum_residuals_first() {
  if (adapted_sums.empty()) return;
  std::vector<Node> nodes = program().nodes();
  for (const ValueId sum : adapted_sums) {
    const auto reads = [&](const Node& node) {
      return std::ranges::find(node.inputs, sum) != node.inputs.end();
    };
    const auto makes = [](ValueId id) {
      return [id](const Node& node) {
        return std::ranges::find(node.outputs, id) != node.outputs.end();
      };
    };
    const auto reader = std::ranges::find_if(nodes, reads);
    const bool is_residual = std::ranges::count_if(nodes, reads) == 1 &&
                             dynamic_cast<const Add*>(reader->op.get()) != nullptr;
    if (!is_residual) continue;
    const auto own = std::ranges::find_if(nodes, makes(sum));
    const ValueId residual = reader->inputs[reader->inputs[0] == sum ? 1 : 0];
    const auto maker = std::ranges::find_if(nodes, makes(residual));
    if (maker != nodes.end() && maker > own) continue;
    const ValueId added = own->inputs[1];
    own->inputs = {residual, own->inputs[0]};
    reader->inputs = {sum, added};
  }
  layer.forward = program().with_nodes(std::move(nodes));
}

ValueId LayerBuilder::scaled_low(ValueId low, const std::string& result) {
  const double factor = config.lora.scale();
  return factor == 1 ? low : program().add1(make_scale(factor), {low}, result + "_low_scaled");
}

ValueId LayerBuilder::row_linear(const std::string& name, ValueId x, int64_t inner, int64_t width,
                                 bool bias, const std::string& result) {
  if (tp() == 1) return linear(name, x, width, bias, result);
  const int64_t share = inner / tp();
  const Slice columns = Slice::of_columns({width, inner}, {tp_rank() * share, share});
  const bool has_adapter = is_adapted(config, name);
  const std::string part_name = result + "_part";
  ValueId part = program().add1(make_linear(),
                                {x, matrix(name + ".weight", {.slice = columns, .tp_copies = 1})},
                                has_adapter ? part_name + "_base" : part_name);
  if (has_adapter) {
    const int64_t rank = config.lora.rank;
    const Slice down = Slice::of_columns({rank, inner}, {tp_rank() * share, share});
    part =
        adapted(name, x, part, {{.slice = down, .tp_copies = 1}, whole({width, rank})}, part_name);
  }
  const ValueId sum = program().add1(make_reduce_scatter(groups.tp), {part}, result);
  if (!bias) return sum;
  return program().add1(make_add_bias(), {sum, f32_weight(name + ".bias", whole({width}))},
                        result + "_biased");
}

ValueId LayerBuilder::norm(const std::string& name, ValueId x, int64_t size, double eps) {
  const ValueId weight = f32_weight(name + ".weight", whole({size}));
  return program().add(make_rmsnorm(eps), {x, weight}, {name, name + ".rstd"})[0];
}

ValueId LayerBuilder::state_norm(const std::string& name, ValueId x) {
  const int64_t size = config.hidden_size;
  if (config.norm == NormKind::kRms) return norm(name, x, size, config.norm_eps);
  const ValueId weight = f32_weight(name + ".weight", whole({size}));
  const ValueId bias = f32_weight(name + ".bias", whole({size}));
  return program().add1(make_layer_norm(config.norm_eps), {x, weight, bias}, name);
}

ValueId LayerBuilder::gather_tokens(ValueId x, const std::string& name) {
  if (tp() == 1) return x;
  return program().add1(make_all_gather(groups.tp), {x}, name);
}

namespace {

void check_divides(int64_t degree, int64_t number, std::string_view degree_name,
                   std::string_view number_name) {
  require(number % degree == 0, "{} {} does not divide {} {}; the nearest that does is {}",
          degree_name, degree, number_name, number, nearest_divisors(number, degree));
}

void check_tensor_parallel(const ModelConfig& config, const StageGroups& groups) {
  const int64_t tp = groups.tp->size();
  if (tp == 1) return;
  if (config.has_dense_layers())
    check_divides(tp, config.dense_inner_size(), "parallel.tp", "the dense layers' inner size");
  if (config.num_moe_layers() > 0 && config.moe.shared_inner_size > 0)
    check_divides(tp, config.moe.shared_inner_size, "parallel.tp", "moe.shared_inner_size");
  if (groups.policy.replicated_attention) return;
  const ModelConfig windows = config.of_layer({.window = true});
  check_divides(tp, config.num_heads, "parallel.tp", "model.num_heads");
  check_divides(tp, windows.num_heads, "parallel.tp", "model.window_heads");
  const auto check_kv_heads = [&](int64_t kv, const char* key) {
    require(kv % tp == 0 || tp % kv == 0,
            "parallel.tp {} neither divides {} {} nor is a multiple of it; the nearest that does "
            "is {}",
            tp, key, kv, nearest_divisors(kv, tp));
  };
  check_kv_heads(config.kv_heads(), "model.num_kv_heads");
  check_kv_heads(windows.kv_heads(), "model.window_kv_heads");
  if (config.is_compressed())
    check_divides(tp, config.compressed.output_groups, "parallel.tp", "compressed.output_groups");
}

/// The key that lists layers whose mixers hand a state from token to token.
const char* list_of_states(const ModelConfig& config) {
  if (!config.delta_layers.empty()) return "model.delta_layers";
  return config.mamba_layers.empty() ? "model.conv_layers" : "model.mamba_layers";
}

/// Heads that the ranks of CP exchange for tokens; each rank needs equally many.
void check_exchanged(int64_t heads, int64_t parts, std::string_view number_name) {
  require(heads % parts == 0,
          "parallel.cp {} does not divide {} {}, which its ranks exchange for tokens where layers "
          "hand a state from token to token; the nearest that does is {}",
          parts, number_name, heads, nearest_divisors(heads, parts));
}

/// The same of what several heads share: ranks may have copies.
void check_shared(int64_t shared, int64_t parts, std::string_view number_name) {
  require(shared % parts == 0 || parts % shared == 0,
          "parallel.cp {} neither divides {} {} nor is a multiple of it, as exchanging heads for "
          "tokens needs where layers hand a state from token to token; the nearest that does is {}",
          parts, number_name, shared, nearest_divisors(shared, parts));
}

/// Of the heads of one tensor-parallel rank.
void check_sequence_parts(const ModelConfig& config, const StageGroups& groups) {
  const int64_t parts = sequence_parts(groups);
  if (parts == 1) return;
  const int64_t tp = groups.tp->size();
  const auto named = [tp](const char* key) {
    return tp == 1 ? std::string(key) : fmt::format("{} over parallel.tp,", key);
  };
  if (!config.delta_layers.empty()) {
    check_exchanged(config.delta.num_value_heads / tp, parts, named("delta.num_value_heads"));
    check_shared(config.delta.num_key_heads / tp, parts, named("delta.num_key_heads"));
  }
  if (!config.mamba_layers.empty()) {
    check_exchanged(config.mamba.num_heads / tp, parts, named("mamba.num_heads"));
    check_shared(config.mamba.num_groups / tp, parts, named("mamba.num_groups"));
  }
  if (!config.conv_layers.empty())
    check_exchanged(config.hidden_size / tp, parts, named("model.hidden_size"));
}

/// Of layers whose mixers hand a state from token to token.
void check_states(const ModelConfig& config, const StageGroups& groups) {
  if (!config.has_states()) return;
  const int64_t tp = groups.tp->size();
  if (tp > 1) {
    require(!groups.policy.replicated_attention,
            "parallel.attention spreads sequences over the ranks of parallel.tp, but the layers of "
            "{} hand a state from token to token; spread heads instead",
            list_of_states(config));
    if (!config.delta_layers.empty())
      check_divides(tp, config.delta.num_key_heads, "parallel.tp", "delta.num_key_heads");
    if (!config.mamba_layers.empty())
      check_divides(tp, config.mamba.num_groups, "parallel.tp",
                    "mamba.num_groups, whose norms each are of one rank,");
    if (!config.conv_layers.empty())
      check_divides(tp, config.hidden_size, "parallel.tp",
                    "model.hidden_size, whose channels the layers of model.conv_layers convolve,");
  }
  check_sequence_parts(config, groups);
}

/// An indexer chooses among whole sequences.
void check_index(const ModelConfig& config, const StageGroups& groups) {
  if (!config.index.is_on() || config.is_compressed()) return;
  const int64_t tp = groups.tp->size();
  require(groups.token_ranks() == tp,
          "parallel.cp is {}, but an indexer (index.top_k) chooses among the keys of whole "
          "sequences; set parallel.cp to 1",
          groups.token_ranks() / tp);
  require(tp == 1 || !groups.policy.replicated_attention,
          "parallel.attention spreads sequences over the ranks of parallel.tp, but an indexer "
          "(index.top_k) chooses among the keys of whole sequences; spread heads instead");
}

/// Tokens are compressed where all of their sequence are.
void check_compression(const ModelConfig& config, const StageGroups& groups) {
  if (!config.compressed.has_entries()) return;
  const int64_t tp = groups.tp->size();
  require(groups.token_ranks() == tp,
          "parallel.cp is {}, but layers of compressed.sparse_layers or compressed.heavy_layers "
          "compress tokens of whole sequences; set parallel.cp to 1",
          groups.token_ranks() / tp);
  require(tp == 1 || !groups.policy.replicated_attention,
          "parallel.attention spreads sequences over the ranks of parallel.tp, but layers of "
          "compressed.sparse_layers or compressed.heavy_layers compress tokens of whole "
          "sequences; spread heads instead");
}

void check_head_exchange(const ModelConfig& config, const StageGroups& groups) {
  const int64_t parts = groups.heads->size();
  if (parts == 1) return;
  const bool by_heads = !groups.policy.replicated_attention;
  const int64_t tp = by_heads ? groups.tp->size() : 1;
  const int64_t heads = config.num_heads / tp;
  const int64_t kv = std::max<int64_t>(config.kv_heads() / tp, 1);
  require(heads % parts == 0,
          "attention's all-to-all is over {} ranks, which do not divide its {} heads; the nearest "
          "number that does is {}",
          parts, heads, nearest_divisors(heads, parts));
  require(
      kv % parts == 0 || parts % kv == 0,
      "attention's all-to-all is over {} ranks, which neither divide its {} key-value heads nor "
      "are a multiple of them; the nearest number that does is {}",
      parts, kv, nearest_divisors(kv, parts));
}

void check_expert_adapters(const ModelConfig& config, const StageGroups& groups) {
  const auto is_experts = [&](const std::string& matrix) {
    return matrix.starts_with("moe.experts.") && is_adapted(config, matrix);
  };
  if (std::ranges::none_of(adaptable_matrices(config), is_experts)) return;
  require(groups.etp->size() == 1,
          "parallel.etp is {}, but experts with adapters (lora.targets) are whole on a rank; set "
          "parallel.etp = 1, or name other targets",
          groups.etp->size());
  require(
      groups.policy.clone_slots == 0,
      "parallel.clone_experts does not go with adapters of experts (lora.targets), which clones "
      "have not; set it to 0, or name other targets");
}

void check_expert_shares(const ModelConfig& config, const StageGroups& groups) {
  const MoeConfig& moe = config.moe;
  const int64_t ep = groups.ep->size();
  const int64_t etp = groups.etp->size();
  if (config.num_moe_layers() == 0) {
    require(ep * etp == 1,
            "parallel.ep {} and parallel.etp {} spread experts, and no layer of the model has any; "
            "set both to 1, or give it experts (moe.num_experts)",
            ep, etp);
    return;
  }
  check_divides(ep, moe.num_experts, "parallel.ep", "moe.num_experts");
  if (moe.mlp_bias) {
    check_divides(etp, config.expert_width(), "parallel.etp",
                  "the experts' width, whose biases (moe.mlp_bias) it spreads,");
  }
  check_expert_adapters(config, groups);
  for (const int64_t size : moe.expert_sizes()) {
    check_divides(etp, size, "parallel.etp", "the experts' inner size");
    require(moe.experts != ExpertPath::kBlockSparse || (size / etp) % moe.block_size == 0,
            "parallel.etp {} leaves {} of an expert's inner size {}, no multiple of moe.block_size "
            "{}",
            etp, size / etp, size, moe.block_size);
  }
}

}  // namespace

void check_shares(const ModelConfig& config, const BatchShape& shape, const StageGroups& groups) {
  share_tokens(shape, groups);
  check_tensor_parallel(config, groups);
  check_states(config, groups);
  check_index(config, groups);
  check_compression(config, groups);
  check_head_exchange(config, groups);
  check_head_exchange(config.of_layer({.window = true}), groups);
  check_expert_shares(config, groups);
}

}  // namespace tessera
