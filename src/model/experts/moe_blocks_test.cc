#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>

#include "model/experts/moe_blocks.h"
#include "model/run/model_testing.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"

namespace tessera {
namespace {

using testing::ModelRig;
using testing::ProgramRun;
using Row = std::vector<double>;

/// A matrix in double precision, by rows.
struct Matrix {
  Row values;
  size_t width = 0;

  explicit Matrix(const Tensor& tensor)
      : values(testing::to_doubles(tensor)), width(static_cast<size_t>(tensor.shape.last())) {}
  size_t rows() const { return values.size() / width; }
  double at(size_t row, size_t col) const { return values[row * width + col]; }
};

/// Rows [first, first + count) of `matrix` times x.
Row times(const Matrix& matrix, size_t first, size_t count, const Row& x) {
  Row result(count, 0.0);
  for (size_t r = 0; r < count; ++r) {
    for (size_t c = 0; c < matrix.width; ++c) result[r] += matrix.at(first + r, c) * x[c];
  }
  return result;
}

Row times(const Matrix& matrix, const Row& x) {
  return times(matrix, 0, matrix.rows(), x);
}

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

/// SwiGLU of the two halves.
Row gated(const Row& gate, const Row& up) {
  Row result(gate.size());
  for (size_t i = 0; i < gate.size(); ++i) result[i] = gate[i] * sigmoid(gate[i]) * up[i];
  return result;
}

/// The MoE layer of one token, straight from its definition: the router and the shared expert see
/// the token, the experts its projection (Megatron-Core MoE, section 7.3).
class PlainMoe {
 public:
  PlainMoe(const ModelConfig& config, std::map<std::string, Matrix> weights)
      : config_(config), weights_(std::move(weights)) {}

  Row output(const Row& x) const {
    const bool latent = config_.moe.latent_size > 0;
    Row y = routed_sum(x, latent ? times(weights_.at("moe.latent_down.weight"), x) : x);
    if (latent) y = times(weights_.at("moe.latent_up.weight"), y);
    if (config_.moe.shared_inner_size == 0) return y;
    const Row shared = shared_expert(x);
    for (size_t i = 0; i < y.size(); ++i) y[i] += shared[i];
    return y;
  }

 private:
  Row routed_sum(const Row& x, const Row& in) const {
    Row scores = times(weights_.at("moe.router.weight"), x);
    for (double& score : scores) score = std::exp(score);
    std::vector<size_t> order(scores.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::sort(order, [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    order.resize(config_.moe.top_k);
    double total = 0;
    for (const size_t e : order) total += scores[e];
    Row sum(in.size(), 0.0);
    for (const size_t e : order) {
      const Row out = expert(e, in);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += scores[e] / total * out[i];
    }
    return sum;
  }

  Row expert(size_t e, const Row& in) const {
    const Matrix& first = weights_.at("moe.experts.gate_up.weight");
    const Matrix& down = weights_.at("moe.experts.down.weight");
    const auto sizes = config_.moe.expert_sizes();
    const size_t size = sizes[e];
    const size_t begin =
        std::accumulate(sizes.begin(), sizes.begin() + static_cast<ptrdiff_t>(e), int64_t{0});
    const Row act =
        gated(times(first, 2 * begin, size, in), times(first, 2 * begin + size, size, in));
    Row out(down.width, 0.0);
    for (size_t f = 0; f < size; ++f) {
      for (size_t i = 0; i < out.size(); ++i) out[i] += act[f] * down.at(begin + f, i);
    }
    return out;
  }

  Row shared_expert(const Row& x) const {
    const Matrix& first = weights_.at("moe.shared.gate_up.weight");
    const size_t size = first.rows() / 2;
    Row out = times(weights_.at("moe.shared.down.weight"),
                    gated(times(first, 0, size, x), times(first, size, size, x)));
    if (!config_.moe.shared_gate) return out;
    const double gate = sigmoid(times(weights_.at("moe.shared_gate.weight"), x)[0]);
    for (double& value : out) value *= gate;
    return out;
  }

  const ModelConfig& config_;
  std::map<std::string, Matrix> weights_;
};

/// The MoE part of a layer as a program over `num_tokens` random tokens, on one rank.
class BlockRun {
 public:
  BlockRun(const ModelConfig& config, int64_t num_tokens) : config_(config) {
    const BatchShape shape{.num_tokens = num_tokens, .sequence_length = num_tokens};
    const StageGroups groups = single_rank_groups();
    ModelProgram layer{.forward = Program("moe")};
    LayerBuilder builder{config_, {.moe = true}, shape, groups, layer};
    x_ = layer.forward.add_input("x", {DType::kF32, {num_tokens, config.hidden_size}});
    y_ = build_moe(builder, x_, x_);
    layer.forward.set_outputs({y_, layer.at(Port::kDropped)});
    run_.emplace(std::move(layer.forward), DifferentiateRequest{{y_}, {x_}}, make_cpu_kernels());
    Random random(17, 0);
    for (ValueId id = 0; id < run_->forward().num_values(); ++id) {
      const Value& value = run_->forward().value(id);
      if (id != x_ && value.kind != ValueKind::kWeight) continue;
      for (float& element : run_->value(id).span<float>())
        element = static_cast<float>(random.next_normal()) * (id == x_ ? 1.0F : 0.4F);
      if (id != x_) weights_.emplace(value.name, Matrix(run_->value(id)));
    }
    run_->run_forward();
  }

  void expect_plain() const {
    const PlainMoe plain(config_, weights_);
    const Row x = testing::to_doubles(run_->value(x_));
    std::vector<float> expected;
    const auto width = static_cast<ptrdiff_t>(config_.hidden_size);
    for (auto token = x.begin(); token != x.end(); token += width) {
      const Row row = plain.output({token, token + width});
      expected.insert(expected.end(), row.begin(), row.end());
    }
    const Tensor y = run_->value(y_);
    testing::expect_rows_near(y, testing::tensor_of(y.shape, expected), 2e-6, "the layer's output");
  }

 private:
  ModelConfig config_;
  ValueId x_ = -1;
  ValueId y_ = -1;
  std::optional<ProgramRun> run_;
  std::map<std::string, Matrix> weights_;
};

std::vector<ModelConfig> expert_variants() {
  ModelConfig plain = testing::tiny_config();
  plain.moe.inner_sizes = {8, 16, 8, 24};
  ModelConfig late = plain;
  late.moe.memory_efficient = false;
  ModelConfig sparse = plain;
  sparse.moe.experts = ExpertPath::kBlockSparse;
  sparse.moe.block_size = 8;
  ModelConfig shared = plain;
  shared.moe.shared_inner_size = 5;
  shared.moe.shared_gate = true;
  return {plain, late, sparse, shared};
}

TEST(MoeBlock, IsItsPlainComposition) {
  for (ModelConfig config : expert_variants()) {
    for (const int64_t latent_size : {0, 1, 6, 15}) {
      for (const int64_t num_tokens : {0, 1, 13}) {
        SCOPED_TRACE(::testing::Message() << "latent size " << latent_size << ", " << num_tokens
                                          << " tokens, shared " << config.moe.shared_inner_size);
        config.moe.latent_size = latent_size;
        BlockRun(config, num_tokens).expect_plain();
      }
    }
  }
}

/// What a token costs falls with the experts' width except for the two projections.
TEST(MoeBlock, FlopsOfExpertsFallByTheCompression) {
  const auto flops = [](int64_t latent_size) {
    ModelConfig config = testing::tiny_config();
    config.moe.latent_size = latent_size;
    return ModelRig(config, testing::tiny_shape(2, 6)).model.model_flops();
  };
  const ModelConfig config = testing::tiny_config();
  const auto tokens = 12.0;
  const auto layers = static_cast<double>(config.num_layers);
  const auto hidden = static_cast<double>(config.hidden_size);
  const auto experts = 3.0 * static_cast<double>(config.moe.top_k * config.moe.inner_size) * hidden;
  // 2 FLOPs a weight forward, twice that backward.
  EXPECT_DOUBLE_EQ(flops(0) - flops(4),
                   6 * tokens * layers * (experts * (1 - 4 / hidden) - 2 * hidden * 4));
}

}  // namespace
}  // namespace tessera
