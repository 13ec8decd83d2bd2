#include "ops/join_rows/join_rows.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class JoinRowsCuda : public testing::GpuTest {
 protected:
  void check(int64_t first, int64_t second, int64_t width, bool once = false) {
    testing::check_operator_on_gpu(make_join_rows(),
                                   [&](DType dtype) {
                                     return testing::OperatorInputs{
                                         {"xa", "xb"},
                                         {{dtype, {first, width}}, {dtype, {second, width}}}};
                                   },
                                   {0}, cpu(), gpu(), {.once = once});
  }
};

TEST_F(JoinRowsCuda, Shapes) {
  check(0, 3, 5);
  check(7, 0, 5);
  check(200, 33, 129);
}

TEST_F(JoinRowsCuda, TinyRows) {
  check(3, 2, 4, true);
}

}  // namespace
}  // namespace tessera
