#include "program/compile/quantize_early.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/thread/thread_world.h"
#include "ops/collective/collective.h"
#include "ops/collective/ragged_collective.h"
#include "ops/dequantize/dequantize.h"
#include "ops/permute/permute.h"
#include "ops/quantize/quantize.h"
#include "ops/registry/cpu_kernels.h"
#include "program/testing/program_testing.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kRanks = 2;
constexpr int64_t kTokens = 6;
constexpr int64_t kWidth = 40;

/// Tokens that an exchange and a permutation move before they are quantized.
struct MovedRows {
  Program program{"moved"};
  ValueId x, arrived, rows, out;

  MovedRows(const CommunicatorPtr& comm, bool counted) {
    x = program.add_input("x", {DType::kBF16, {kTokens, kWidth}});
    const ValueId source = program.add_input("source", {DType::kI32, {2 * kTokens}});
    const ValueId row_of = program.add_input("row_of", {DType::kI32, {comm->size() * kTokens}});
    if (counted) {
      const ValueId counts = program.add_input("counts", {DType::kI64, {kRanks}});
      arrived = program.add1(make_all_gather_v(comm, kRanks * kTokens), {x, counts}, "arrived");
    } else {
      arrived = program.add1(make_all_gather(comm), {x}, "arrived");
    }
    rows = program.add1(make_permute(), {arrived, source, row_of}, "rows");
    const ValueId coded =
        program.add1(make_quantize({.scale = ScaleLayout::block(1, 16)}), {rows}, "coded");
    out = program.add1(make_dequantize(DType::kBF16), {coded}, "out");
    program.set_outputs({out});
  }
};

std::vector<std::string_view> names_of(const Program& program) {
  std::vector<std::string_view> names;
  for (const Node& node : program.nodes()) names.push_back(node.op->name());
  return names;
}

const std::map<std::string, std::vector<int64_t>> kMaps = {
    {"source", {5, 0, 3, -1, 9, 11, 2, 8, 1, 4, 7, -1}},
    {"row_of", std::vector<int64_t>(kRanks* kTokens, 0)},
    {"counts", {4, kTokens}}};

TEST(QuantizeEarly, MovesFewerBytesToTheSameBits) {
  for (const bool counted : {false, true}) {
    run_thread_world(kRanks, [&](World& world) {
      const MovedRows moved(world.make_world_group(), counted);
      const Program early = quantize_early(moved.program, {});
      EXPECT_THAT(names_of(early), ElementsAre("quantize", counted ? "all_gather_v" : "all_gather",
                                               "permute", "dequantize"));
      const auto expected =
          testing::run_on_noise(moved.program, make_cpu_kernels(), {}, kMaps).at(moved.out);
      EXPECT_EQ(testing::run_on_noise(early, make_cpu_kernels(), {}, kMaps).at(moved.out),
                expected);
    });
  }
}

/// Values that somebody else reads, or that outlive the program, stay what they are.
TEST(QuantizeEarly, LeavesWhatOthersRead) {
  const MovedRows moved(make_single_communicator("ep"), false);
  EXPECT_THAT(names_of(quantize_early(moved.program, {moved.rows})),
              ElementsAre("all_gather", "permute", "quantize", "dequantize"));
  EXPECT_THAT(names_of(quantize_early(moved.program, {moved.arrived})),
              ElementsAre("all_gather", "quantize", "permute", "dequantize"));
  Program read_twice = moved.program;
  const ValueId again =
      read_twice.add1(make_all_to_all(make_single_communicator("ep")), {moved.rows}, "again");
  read_twice.set_outputs({moved.out, again});
  EXPECT_THAT(names_of(quantize_early(read_twice, {})),
              ElementsAre("all_gather", "permute", "quantize", "dequantize", "all_to_all"));
}

/// Nor is anything moved that nobody reads.
TEST(QuantizeEarly, LeavesOutWhatNobodyReads) {
  MovedRows moved(make_single_communicator("ep"), false);
  moved.program.set_outputs({moved.out});
  moved.program.add1(make_all_to_all(make_single_communicator("ep")), {moved.rows}, "unread");
  EXPECT_THAT(names_of(quantize_early(moved.program, {})),
              ElementsAre("quantize", "all_gather", "permute", "dequantize"));
}

/// Two that quantize one value alike become one; scales of several rows stay behind.
TEST(QuantizeEarly, SharesWhatIsAlike) {
  const CommunicatorPtr comm = make_single_communicator("ep");
  Program program("shared");
  const ValueId x = program.add_input("x", {DType::kBF16, {kTokens, kWidth}});
  const ValueId arrived = program.add1(make_all_gather(comm), {x}, "arrived");
  const OperatorPtr by_row = make_quantize({.scale = ScaleLayout::row()});
  const ValueId first = program.add1(by_row, {x}, "first");
  const ValueId second = program.add1(by_row, {arrived}, "second");
  const ValueId blocks = program.add1(make_all_gather(comm), {x}, "blocks");
  const ValueId third =
      program.add1(make_quantize({.scale = ScaleLayout::block(2, 8)}), {blocks}, "third");
  program.set_outputs({program.add1(make_dequantize(DType::kBF16), {first}, "a"),
                       program.add1(make_dequantize(DType::kBF16), {second}, "b"), third});
  EXPECT_THAT(
      names_of(quantize_early(program, {})),
      ElementsAre("quantize", "all_gather", "all_gather", "quantize", "dequantize", "dequantize"));
}

}  // namespace
}  // namespace tessera
