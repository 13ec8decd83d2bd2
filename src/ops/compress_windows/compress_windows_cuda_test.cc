#include "ops/compress_windows/compress_windows.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

class CompressWindowsCuda : public testing::GpuTest {
 protected:
  void check(const CompressSpec& spec, const std::vector<int64_t>& lengths, int64_t size,
             bool once = false) {
    std::vector<int32_t> own;
    for (const int64_t length : lengths) {
      for (int32_t i = 0; i < length; ++i) own.push_back(i);
    }
    const int64_t tokens = std::ssize(own);
    const int64_t width = spec.parts() * size;
    const OwnedTensor positions = testing::tensor_of_i32({tokens}, own);
    testing::check_operator_on_gpu(
        make_compress_windows(spec),
        [&](DType dtype) {
          return testing::OperatorInputs{{"xkv", "xgate", "wbias", "positions"},
                                         {{dtype, {tokens, width}},
                                          {dtype, {tokens, width}},
                                          {DType::kF32, {spec.rate, width}},
                                          {DType::kI32, {tokens}}}};
        },
        {0}, cpu(), gpu(), {.values = {{"positions", positions}}, .once = once});
  }
};

TEST_F(CompressWindowsCuda, Shapes) {
  for (const bool overlaps : {false, true}) {
    check({.rate = 4, .overlaps = overlaps}, {}, 8);
    check({.rate = 4, .overlaps = overlaps}, {1}, 8);
    check({.rate = 1, .overlaps = overlaps}, {5, 2}, 3);
    check({.rate = 4, .overlaps = overlaps}, {37, 0, 3, 200}, 130);
    check({.rate = 128, .overlaps = overlaps}, {127, 300, 128}, 512);
  }
}

TEST_F(CompressWindowsCuda, TinyWindows) {
  check({.rate = 2, .overlaps = true}, {5, 4}, 6, true);
}

}  // namespace
}  // namespace tessera
