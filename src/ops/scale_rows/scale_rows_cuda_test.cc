#include "ops/scale_rows/scale_rows_testing.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"

namespace tessera {
namespace {

class ScaleRowsCuda : public testing::GpuTest {
 protected:
  /// The CPU's bits.
  void check(const testing::RowsFormat& format, int64_t rows, int64_t columns) const {
    SCOPED_TRACE(
        fmt::format("{} rows of {}, master {}", rows, columns, master_suffix(format.beside)));
    const OperatorPtr op = make_scale_rows(format.weight, format.beside, columns);
    const testing::RowsCase expected = testing::make_rows(format, rows, columns, 1);
    const OwnedTensor factors = testing::copy_to(gpu(), expected.factors);
    std::vector<OwnedTensor> copies;
    std::vector<Tensor> outputs;
    for (const Tensor& tensor : expected.outputs())
      outputs.push_back(copies.emplace_back(testing::copy_to(gpu(), tensor)));
    const Tensor on_host = expected.factors;
    const Tensor on_device = factors;
    testing::run_kernel(*op, cpu(), std::span(&on_host, 1), expected.outputs());
    testing::run_kernel(*op, gpu(), std::span(&on_device, 1), outputs);
    for (size_t i = 0; i < outputs.size(); ++i)
      testing::expect_bitwise_equal(testing::copy_to_host(gpu(), outputs[i]), expected.outputs()[i],
                                    "kept");
  }
};

TEST_F(ScaleRowsCuda, MultipliesEachRow) {
  for (const testing::RowsFormat& format : testing::kRowsFormats) {
    for (const auto& [rows, columns] :
         {std::pair(0, 3), std::pair(1, 1), std::pair(7, 1), std::pair(5, 33), std::pair(64, 1000)})
      check(format, rows, columns);
  }
}

TEST_F(ScaleRowsCuda, TinyRows) {
  for (const testing::RowsFormat& format : testing::kRowsFormats) check(format, 3, 5);
}

}  // namespace
}  // namespace tessera
