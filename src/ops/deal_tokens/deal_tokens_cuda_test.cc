#include "ops/deal_tokens/deal_tokens.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class DealTokensCuda : public testing::GpuTest {
 protected:
  void check(const Zigzag& deal, int64_t width, bool once = false) {
    for (const OperatorPtr& op : {make_deal_tokens(deal), make_collect_tokens(deal)}) {
      testing::check_operator_on_gpu(
          op,
          [&](DType dtype) {
            return testing::OperatorInputs{{"x"}, {{dtype, {deal.num_tokens(), width}}}};
          },
          {0}, cpu(), gpu(), {.once = once});
    }
  }
};

TEST_F(DealTokensCuda, Rings) {
  check({.num_rows = 3, .row_length = 5}, 8);
  check({.num_rows = 1, .row_length = 4, .ring = 2}, 16);
  check({.num_rows = 3, .row_length = 240, .ring = 3}, 264);
  check({.num_rows = 2, .row_length = 1024, .ring = 8}, 7);
  check({.num_rows = 0, .row_length = 8, .ring = 2}, 4);
}

TEST_F(DealTokensCuda, TinyRing) {
  check({.num_rows = 2, .row_length = 12, .ring = 3}, 5, true);
}

}  // namespace
}  // namespace tessera
