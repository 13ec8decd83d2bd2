#include "ops/window_choice/window_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

KernelTable kernels() {
  KernelTable table;
  add_window_choice_cpu(table);
  return table;
}

TestInput ids(const Shape& shape, const std::vector<int32_t>& values, const char* name) {
  return {tensor_of_i32(shape, values), Role::kConstant, name};
}

TEST(WindowChoice, WindowsAndAllEntries) {
  // Sequences of 5, 1 and 2 tokens; entries of the first are rows 0 and 1, of the last row 3.
  const auto rows = run_operator(WindowChoice({.window = 3, .rate = 2, .entries = 2}, false),
                                 kernels(), list_inputs(ids({8}, {0, 1, 2, 3, 4, 0, 0, 1}, "p")));
  expect_bitwise_equal(rows[0], tensor_of_i32({8, 5}, {0, -1, -1, -1, -1,  //
                                                       0, 1,  8,  -1, -1,  //
                                                       0, 1,  2,  8,  -1,  //
                                                       1, 2,  3,  8,  9,   //
                                                       2, 3,  4,  8,  9,   //
                                                       5, -1, -1, -1, -1,  //
                                                       6, -1, -1, -1, -1,  //
                                                       6, 7,  11, -1, -1}),
                       "rows");
}

TEST(WindowChoice, WindowsAndChosenEntries) {
  const auto rows = run_operator(
      WindowChoice({.window = 2, .rate = 1, .entries = 2}, true), kernels(),
      list_inputs(ids({3}, {0, 1, 0}, "p"), ids({3, 2}, {0, -1, 0, 1, -1, -1}, "chosen")));
  expect_bitwise_equal(rows[0], tensor_of_i32({3, 4}, {0, 3, -1, -1, 0, 1, 3, 4, 2, -1, -1, -1}),
                       "rows");
}

/// Of one sequence's tokens behind its cache of 6 keys.
TEST(WindowChoice, KeptRows) {
  const WindowChoice cached(
      {.window = 2, .rate = 2, .entries = 3, .kept = KeptRows::kCached, .first_entry = 6}, false);
  const auto rows = run_operator(cached, kernels(), list_inputs(ids({2}, {4, 5}, "p")));
  expect_bitwise_equal(rows[0], tensor_of_i32({2, 5}, {3, 4, 6, 7, -1, 4, 5, 6, 7, 8}), "rows");
}

/// Of two sequences in pages 1, 0 and 2, and a row that only fills.
TEST(WindowChoice, Pages) {
  const WindowChoice paged(
      {.window = 2, .rate = 64, .entries = 2, .kept = KeptRows::kPaged, .first_entry = 1000},
      false);
  const auto rows =
      run_operator(paged, kernels(),
                   list_inputs(ids({3}, {128, 0, 0}, "p"), ids({3}, {0, 1, 2}, "cu_seqlens"),
                               ids({2, 2}, {1, 0, 2, -1}, "page_table")));
  expect_bitwise_equal(rows[0],
                       tensor_of_i32({3, 4}, {255, 0, 1128, 1129, 256, -1, -1, -1, -1, -1, -1, -1}),
                       "rows");
  const WindowChoice chosen(
      {.window = 1, .rate = 64, .entries = 1, .kept = KeptRows::kPaged, .first_entry = 1000}, true);
  const auto own = run_operator(
      chosen, kernels(),
      list_inputs(ids({2}, {128, 0}, "p"), ids({2}, {0, 1}, "cu_seqlens"),
                  ids({1, 2}, {1, 0}, "page_table"), ids({2, 1}, {129, -1}, "chosen")));
  expect_bitwise_equal(own[0], tensor_of_i32({2, 2}, {0, 1129, -1, -1}), "rows");
}

TEST(WindowChoice, NoTokens) {
  const auto rows = run_operator(WindowChoice({.window = 2, .rate = 4, .entries = 1}, false),
                                 kernels(), list_inputs(ids({0}, {}, "p")));
  EXPECT_EQ(rows[0].get().num_elements(), 0);
}

TEST(WindowChoice, RefusesWhatDoesNotFit) {
  const auto run = [&](const std::vector<int32_t>& positions) {
    run_operator(WindowChoice({.window = 2, .rate = 2, .entries = 1}, false), kernels(),
                 list_inputs(ids({std::ssize(positions)}, positions, "p")));
  };
  EXPECT_THAT([&] { run({0, 2}); }, ThrowsMessage<UserError>(HasSubstr("has position 2")));
  EXPECT_THAT(
      [&] {
        run({0, 1, 2, 3});
      },
      ThrowsMessage<UserError>(HasSubstr("token 3 sees 2 entries of 2 tokens")));
  EXPECT_THROW(WindowChoice({.window = 0}, false), UserError);
  const WindowChoice op({.window = 2, .rate = 2, .entries = 3}, true);
  const ValueType positions{DType::kI32, {4}};
  EXPECT_EQ(op.infer(std::vector{positions, ValueType{DType::kI32, {4, 3}}})[0],
            (ValueType{DType::kI32, {4, 5}}));
  EXPECT_THAT([&] { op.infer(std::vector{positions}); },
              ThrowsMessage<UserError>(HasSubstr("takes 2 inputs")));
  EXPECT_THAT(
      [&] {
        op.infer(std::vector{positions, ValueType{DType::kI32, {4, 2}}});
      },
      ThrowsMessage<UserError>(HasSubstr("chosen entries are")));
}

}  // namespace
}  // namespace tessera::testing
