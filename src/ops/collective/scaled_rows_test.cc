// Exchanges of FP8 rows, whose scales go along.
#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"
#include "ops/collective/collective_testing.h"
#include "ops/collective/ragged_collective.h"
#include "ops/dequantize/dequantize_testing.h"

namespace tessera::testing {
namespace {

constexpr int64_t kRanks = 3;
constexpr int64_t kRows = 6;
constexpr int64_t kWidth = 20;

/// Tokens of a rank, larger from rank to rank.
OwnedTensor tokens_of(int64_t rank) {
  Random random(7, static_cast<uint64_t>(rank));
  return random_tensor(DType::kBF16, {kRows, kWidth}, random, 10.0 * static_cast<double>(rank + 1));
}

/// What the operator makes of rows, each as wide as `like`.
Tensor exchanged(const Operator& op, const std::vector<Tensor>& inputs, const Tensor& output) {
  const std::vector<Tensor> outputs = {output};
  collective_kernels().find(op.name())->second(op, {.inputs = inputs, .outputs = outputs});
  return output;
}

/// Compares the exchange of quantized rows with the quantized exchange of rows.
void check(const OperatorPtr& op, const std::vector<Tensor>& counts, int64_t rank,
           const QuantizeSpec& spec) {
  const OwnedTensor tokens = tokens_of(rank);
  const ScaledTensor coded = quantize(tokens.get(), spec);
  std::vector<Tensor> inputs = {tokens.get()};
  inputs.insert(inputs.end(), counts.begin(), counts.end());
  std::vector<ValueType> types;
  for (const Tensor& input : inputs) types.push_back(type_of(input));
  const OwnedTensor plain(DType::kBF16, op->infer(types)[0].shape);
  exchanged(*op, inputs, plain.get());

  inputs[0] = coded.tensor;
  types[0] = type_of(coded.tensor);
  const ValueType expected_type = op->infer(types)[0];
  EXPECT_EQ(expected_type.scale, spec.scale);
  const ScaledTensor found(expected_type);
  exchanged(*op, inputs, found.tensor);
  EXPECT_EQ(to_doubles(dequantize(found.tensor, DType::kBF16).get()),
            to_doubles(dequantize(quantize(plain.get(), spec).tensor, DType::kBF16).get()))
      << op->name() << " " << spec.scale.to_string();
}

TEST(ScaledRows, ScalesGoAlong) {
  run_thread_world(kRanks, [](World& world) {
    const CommunicatorPtr comm = world.make_world_group();
    const int64_t rank = world.rank();
    // Rank r sends (r + i) mod 3 rows to rank i, and 1, 0 and 5 rows to all.
    std::vector<int64_t> sent;
    for (int64_t i = 0; i < kRanks; ++i) sent.push_back((rank + i) % kRanks);
    const OwnedTensor send = tensor_of_i64({kRanks}, sent);
    const OwnedTensor receive = tensor_of_i64({kRanks}, sent);
    const OwnedTensor counts = tensor_of_i64({kRanks}, {1, 0, 5});
    for (const QuantizeSpec& spec : row_specs()) {
      check(make_all_gather(comm), {}, rank, spec);
      check(make_all_to_all(comm), {}, rank, spec);
      check(make_all_to_all_v(comm, 2 * kRows), {send.get(), receive.get()}, rank, spec);
      check(make_all_gather_v(comm, 2 * kRows), {counts.get()}, rank, spec);
    }
  });
}

TEST(ScaledRows, AreOneExchangeWithTheirScales) {
  run_thread_world(kRanks, [](World& world) {
    const CommunicatorPtr comm = world.make_world_group();
    const OwnedTensor tokens = tokens_of(world.rank());
    const ScaledTensor coded = quantize(tokens.get(), {.scale = ScaleLayout::row()});
    const OperatorPtr op = make_all_to_all(comm);
    const ScaledTensor found(op->infer(std::vector{type_of(coded.tensor)})[0]);
    exchanged(*op, {coded.tensor}, found.tensor);
    const CommCount count = world.statistics().count(comm->name(), CommKind::kAllToAll);
    EXPECT_EQ(count.calls, 1);
    EXPECT_EQ(count.bytes, kRows / kRanks * (kRanks - 1) * (kWidth + int64_t{sizeof(float)}));
  });
}

TEST(ScaledRows, AreNotAddedUp) {
  const CommunicatorPtr comm = make_single_communicator("tp");
  ValueType x{.dtype = DType::kE4M3, .shape = {4, 8}, .scale = ScaleLayout::row()};
  EXPECT_THROW(make_reduce_scatter(comm)->infer(std::vector{x}), UserError);
  x.scale = ScaleLayout::block(2, 8);
  EXPECT_THROW(make_all_gather(comm)->infer(std::vector{x}), UserError);
}

}  // namespace
}  // namespace tessera::testing
