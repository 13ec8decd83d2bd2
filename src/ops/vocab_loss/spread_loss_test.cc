#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "comm/thread/thread_world.h"
#include "ops/collective/collective.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/vocab_lse.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"
#include "ops/vocab_loss/vocab_loss.h"

namespace tessera::testing {
namespace {

constexpr float kScale = 0.125F;

KernelTable kernels() {
  KernelTable table;
  add_collective_cpu(table);
  add_linear_cross_entropy_cpu(table);
  add_vocab_loss_cpu(table);
  return table;
}

/// A head over tokens and a vocabulary that are spread over ranks, and the same on one rank.
struct SpreadHead {
  int64_t ranks;
  int64_t tokens;  ///< of one rank
  int64_t hidden;
  std::vector<int64_t> first_rows;  ///< of the ranks' parts of the vocabulary, and its end
  CrossEntropySpec cut;
  DType dtype;
  std::vector<TestInput> whole;             ///< x, weight, labels, scale
  std::vector<OwnedTensor> outputs, grads;  ///< of linear_cross_entropy

  SpreadHead(int64_t num_ranks, DType type, uint64_t seed);

  int64_t vocab() const { return first_rows.back(); }
  int64_t first_row(int64_t rank) const { return first_rows[rank]; }
  int64_t num_rows(int64_t rank) const { return first_row(rank + 1) - first_row(rank); }
  void check_rank(World& world, float& loss) const;
};

SpreadHead::SpreadHead(int64_t num_ranks, DType type, uint64_t seed)
    : ranks(num_ranks), dtype(type) {
  Random random(seed, static_cast<uint64_t>(num_ranks));
  const auto up_to = [&](uint64_t most) {
    return static_cast<int64_t>(random.next_below(most + 1));
  };
  tokens = up_to(12);
  hidden = 1 + up_to(40);
  cut = {1 + up_to(40), 1 + up_to(40)};
  const int64_t size = 1 + up_to(200);
  first_rows = {0, size};
  while (std::ssize(first_rows) <= ranks) first_rows.push_back(up_to(static_cast<uint64_t>(size)));
  std::ranges::sort(first_rows);
  std::vector<int32_t> labels;
  for (int64_t t = 0; t < ranks * tokens; ++t)
    labels.push_back(random.next_below(5) == 0
                         ? kIgnoredLabel
                         : static_cast<int32_t>(random.next_below(static_cast<uint64_t>(size))));
  whole = list_inputs(
      TestInput{random_tensor(dtype, {ranks * tokens, hidden}, random), Role::kValue, "x"},
      TestInput{random_tensor(dtype, {size, hidden}, random, 0.5), Role::kWeight, "weight"},
      TestInput{tensor_of_i32({ranks * tokens}, labels), Role::kConstant, "labels"},
      TestInput{tensor_of({1}, {kScale}), Role::kConstant, "scale"});
  cut.weighted = seed % 2 == 0;
  if (cut.weighted)
    whole.push_back({random_tensor(DType::kF32, {ranks * tokens}, random, 1.5), Role::kConstant,
                     "token_weights"});
  outputs = run_operator(*make_linear_cross_entropy(cut), kernels(), whole);
  if (tokens == 0) return;
  std::vector<OwnedTensor> grad_outputs(3);
  grad_outputs[0] = tensor_of({1}, {1.0F});
  grads = run_gradients(make_linear_cross_entropy(cut), kernels(), whole, grad_outputs);
}

/// Rows [begin, begin + count) of a tensor.
Tensor rows_of(const Tensor& tensor, int64_t begin, int64_t count) {
  Tensor rows = tensor;
  rows.shape[0] = count;
  if (tensor.shape[0] > 0)
    rows.data = static_cast<std::byte*>(tensor.data) + tensor.num_bytes() / tensor.shape[0] * begin;
  return rows;
}

void copy(const Tensor& from, const Tensor& to) {
  ASSERT_EQ(from.shape, to.shape);
  if (from.num_bytes() > 0) std::memcpy(to.data, from.data, from.num_bytes());
}

/// The program of one rank.
struct RankHead {
  Program program{"head"};
  ValueId x, labels, weight, scale, loss, token_loss;
  ValueId token_weights = -1;

  RankHead(const SpreadHead& head, World& world) {
    const CommunicatorPtr group = world.make_group("tp", world.make_world_group()->ranks());
    x = program.add_input("x", {head.dtype, {head.tokens, head.hidden}});
    labels = program.add_input("labels", {DType::kI32, {head.tokens}});
    weight = program.add_weight("weight", {head.dtype, {head.num_rows(world.rank()), head.hidden}});
    scale = program.add_input("scale", {DType::kF32, {1}});
    const ValueId all_x = program.add1(make_all_gather(group), {x}, "all_x");
    const ValueId all_labels = program.add1(make_all_gather(group), {labels}, "all_labels");
    CrossEntropySpec cut = head.cut;
    cut.weighted = false;
    const auto statistics =
        program.add(make_vocab_lse({head.first_row(world.rank()), head.vocab(), cut}),
                    {all_x, weight, all_labels}, {"lse", "label_logit"});
    const ValueId lse = program.add1(make_all_to_all(group), {statistics[0]}, "own_lse");
    const ValueId logit = program.add1(make_all_to_all(group), {statistics[1]}, "own_logit");
    std::vector<ValueId> inputs = {lse, logit, labels, scale};
    if (head.cut.weighted) {
      token_weights = program.add_input("token_weights", {DType::kF32, {head.tokens}});
      inputs.push_back(token_weights);
    }
    const auto results =
        program.add(make_vocab_loss(head.ranks, head.cut.weighted), inputs, {"loss", "token_loss"});
    loss = results[0];
    token_loss = results[1];
    program.set_outputs(results);
  }
};

void SpreadHead::check_rank(World& world, float& rank_loss) const {
  const int64_t rank = world.rank();
  const RankHead head(*this, world);
  const ProgramRun run(head.program, {{head.loss}, {head.x}}, kernels());
  copy(rows_of(whole[0].tensor, rank * tokens, tokens), run.value(head.x));
  copy(rows_of(whole[1].tensor, first_row(rank), num_rows(rank)), run.value(head.weight));
  copy(rows_of(whole[2].tensor, rank * tokens, tokens), run.value(head.labels));
  copy(whole[3].tensor, run.value(head.scale));
  if (cut.weighted)
    copy(rows_of(whole[4].tensor, rank * tokens, tokens), run.value(head.token_weights));
  *run.grad(head.loss).as<float>() = 1.0F;
  run.run_forward();
  run.run_backward();
  rank_loss = *run.value(head.loss).as<float>();
  const Tensor token_loss = rows_of(outputs[1], rank * tokens, tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    const float expected = token_loss.as<float>()[t];
    EXPECT_NEAR(run.value(head.token_loss).as<float>()[t], expected, 3e-6 * (5 + expected));
  }
  if (tokens == 0) return;
  // In BF16 the ranks' parts of dx are rounded before they are summed.
  const double tolerance = dtype == DType::kF32 ? 1e-5 : 2e-2;
  expect_rows_near(run.grad(head.x), rows_of(grads[0], rank * tokens, tokens), tolerance, "dx");
  if (num_rows(rank) > 0) {
    expect_rows_near(run.grad(head.weight), rows_of(grads[1], first_row(rank), num_rows(rank)),
                     dtype == DType::kF32 ? 1e-5 : 4e-3, "dweight");
  }
}

TEST(SpreadLoss, EqualsTheLossOverTheWholeVocabulary) {
  for (int64_t ranks = 1; ranks <= 5; ++ranks) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (uint64_t seed = 1; seed <= 4; ++seed) {
        SCOPED_TRACE(fmt::format("{} ranks, {}, seed {}", ranks, dtype_name(dtype), seed));
        const SpreadHead head(ranks, dtype, seed);
        std::vector<float> losses(ranks);
        run_thread_world(ranks,
                         [&](World& world) { head.check_rank(world, losses[world.rank()]); });
        double loss = 0;
        for (const float part : losses) loss += part;
        const double expected = *head.outputs[0].get().as<float>();
        EXPECT_NEAR(loss, expected, 3e-6 * (1 + std::abs(expected)));
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
