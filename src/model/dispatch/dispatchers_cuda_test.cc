// MoE layers whose experts are spread over GPUs, beside the same on one rank of the CPU: ranks are
// threads that share the GPUs there are.
#include "model/dispatch/dispatch_testing.h"
#include "ops/testing/gpu_ranks.h"

namespace tessera::testing {
namespace {

class DispatchersCuda : public GpuTest {
 protected:
  /// `variant` by all dispatchers over several degrees of EP and ETP.
  static void check_layouts(const MoeCase& variant, double tolerance_f32 = 2e-4) {
    uint64_t seed = 0;
    for (const auto& [ep, etp] :
         {std::pair(2, 1), std::pair(4, 1), std::pair(1, 2), std::pair(2, 2)}) {
      for (const auto& [kind, exchange] :
           {std::pair(DispatcherKind::kAllToAll, ExchangeSizes::kExact),
            std::pair(DispatcherKind::kAllToAll, ExchangeSizes::kBounded),
            std::pair(DispatcherKind::kAllGather, ExchangeSizes::kExact),
            std::pair(DispatcherKind::kDeduplicated, ExchangeSizes::kExact),
            std::pair(DispatcherKind::kDeduplicated, ExchangeSizes::kDirect),
            std::pair(DispatcherKind::kDeduplicated, ExchangeSizes::kBounded),
            std::pair(DispatcherKind::kHierarchical, ExchangeSizes::kExact),
            std::pair(DispatcherKind::kHierarchical, ExchangeSizes::kBounded)}) {
        MoeCase c = variant;
        c.ep = ep;
        c.etp = etp;
        c.kind = kind;
        c.exchange = exchange;
        if (kind == DispatcherKind::kHierarchical && ep > 1) c.nodes = 2;
        check(c, ++seed, tolerance_f32);
      }
    }
  }

  static void check(const MoeCase& c, uint64_t seed, double tolerance_f32) {
    SCOPED_TRACE(c.to_string());
    const MoeValues values(c, seed);
    const MoeResult expected = run_on_one(c, values);
    const MoeResult found = run_on_ranks(c, values, run_gpu_ranks);
    const double tolerance = c.dtype == DType::kBF16 ? 3e-2 : tolerance_f32;
    expect_rows_near(found.y, expected.y, tolerance, "y");
    expect_rows_near(found.grad_x, expected.grad_x, tolerance, "dx");
    expect_rows_near(found.grad_router, expected.grad_router, tolerance, "drouter");
    expect_rows_near(found.grad_fc1, expected.grad_fc1, tolerance, "dfc1");
    expect_rows_near(found.grad_fc2, expected.grad_fc2, tolerance, "dfc2");
    EXPECT_EQ(found.dropped, expected.dropped);
  }

  static MoeCase layer(DType dtype) {
    return {.tokens_each = 37,
            .hidden = 64,
            .top_k = 2,
            .sizes = std::vector<int64_t>(8, 32),
            .dtype = dtype};
  }
};

TEST_F(DispatchersCuda, Dropless) {
  check_layouts(layer(DType::kF32));
  check_layouts(layer(DType::kBF16));
  MoeCase late = layer(DType::kF32);
  late.early_probs = false;
  check_layouts(late);
}

TEST_F(DispatchersCuda, OneTokenAndNone) {
  MoeCase c = layer(DType::kF32);
  c.tokens_each = 1;
  c.top_k = 1;
  check_layouts(c, 5e-3);  // a row of a gradient is one number times the token, which may cancel
  c.tokens_each = 0;
  check_layouts(c);
}

TEST_F(DispatchersCuda, CapacityOfEachRanksTokens) {
  MoeCase c = layer(DType::kF32);
  c.capacity_factor = 0.7;
  c.kind = DispatcherKind::kAllToAll;
  c.sharing_ranks = 0;
  for (const auto& [padded, exchange] :
       {std::pair(false, ExchangeSizes::kExact), std::pair(true, ExchangeSizes::kExact),
        std::pair(false, ExchangeSizes::kBounded)}) {
    c.pad_to_capacity = padded;
    c.exchange = exchange;
    c.ep = 4;
    const MoeValues values(c, 9);
    const MoeResult expected = run_on_ranks(c, values);
    const MoeResult found = run_on_ranks(c, values, run_gpu_ranks);
    EXPECT_GT(expected.dropped, 0);
    EXPECT_EQ(found.dropped, expected.dropped);
    expect_rows_near(found.y, expected.y, 2e-4, "y");
    expect_rows_near(found.grad_x, expected.grad_x, 2e-4, "dx");
    expect_rows_near(found.grad_fc1, expected.grad_fc1, 2e-4, "dfc1");
  }
}

/// All tokens of all ranks go to one expert; the ranks of the others get none.
TEST_F(DispatchersCuda, OneExpertGetsAll) {
  MoeCase c = layer(DType::kF32);
  c.top_k = 1;
  c.bias = std::vector<float>(8, 0.0F);
  c.bias[5] = 1e4F;
  check_layouts(c);
}

}  // namespace
}  // namespace tessera::testing
