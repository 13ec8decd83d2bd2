#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/window_choice/window_choice.h"

namespace tessera {
namespace {

class WindowChoiceCuda : public testing::GpuTest {
 protected:
  void check(const WindowChoiceSpec& spec, const std::vector<int64_t>& lengths, bool chosen,
             bool once = false) {
    std::vector<int32_t> own;
    std::vector<int32_t> entries;
    for (const int64_t length : lengths) {
      for (int32_t i = 0; i < length; ++i) {
        own.push_back(i);
        for (int32_t k = 0; k < spec.entries; ++k)
          entries.push_back(k < (i + 1) / spec.rate ? k : -1);
      }
    }
    const int64_t tokens = std::ssize(own);
    const OwnedTensor positions = testing::tensor_of_i32({tokens}, own);
    const OwnedTensor choice = testing::tensor_of_i32({tokens, spec.entries}, entries);
    testing::check_operator_on_gpu(
        make_window_choice(spec, chosen),
        [&](DType /*dtype*/) {
          testing::OperatorInputs inputs{{"positions"}, {{DType::kI32, {tokens}}}};
          if (chosen) {
            inputs.names.emplace_back("chosen");
            inputs.types.push_back({DType::kI32, {tokens, spec.entries}});
          }
          return inputs;
        },
        {}, cpu(), gpu(), {.values = {{"positions", positions}, {"chosen", choice}}, .once = once});
  }
};

TEST_F(WindowChoiceCuda, Shapes) {
  for (const bool chosen : {false, true}) {
    check({.window = 5, .rate = 4, .entries = 60}, {}, chosen);
    check({.window = 5, .rate = 4, .entries = 60}, {37, 0, 3, 200}, chosen);
    check({.window = 128, .rate = 128, .entries = 4}, {127, 300, 128}, chosen);
  }
}

TEST_F(WindowChoiceCuda, TinyPages) {
  const OwnedTensor positions = testing::tensor_of_i32({4}, {130, 131, 5, 0});
  const OwnedTensor bounds = testing::tensor_of_i32({3}, {0, 2, 3});
  const OwnedTensor pages = testing::tensor_of_i32({2, 2}, {1, 0, 2, -1});
  testing::check_operator_on_gpu(
      make_window_choice(
          {.window = 4, .rate = 2, .entries = 70, .kept = KeptRows::kPaged, .first_entry = 384},
          false),
      [&](DType /*dtype*/) {
        return testing::OperatorInputs{
            {"positions", "bounds", "pages"},
            {{DType::kI32, {4}}, {DType::kI32, {3}}, {DType::kI32, {2, 2}}}};
      },
      {}, cpu(), gpu(),
      {.values = {{"positions", positions}, {"bounds", bounds}, {"pages", pages}}, .once = true});
}

TEST_F(WindowChoiceCuda, TinyWindows) {
  check({.window = 2, .rate = 2, .entries = 3}, {5, 4}, false, true);
}

}  // namespace
}  // namespace tessera
