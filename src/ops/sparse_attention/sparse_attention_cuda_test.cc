#include "ops/sparse_attention/sparse_attention.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

/// For each of so many tokens at most `top_k` of those up to itself; for the fourth none.
OwnedTensor draw_choice(int64_t tokens, int64_t top_k) {
  Random random(5, 7);
  std::vector<int32_t> rows;
  for (int64_t token = 0; token < tokens; ++token) {
    std::vector<int32_t> own;
    for (int32_t row = 0; row <= token && token != 3; ++row) own.push_back(row);
    while (std::ssize(own) > top_k)
      own.erase(own.begin() + static_cast<int64_t>(random.next_below(own.size())));
    own.resize(top_k, -1);
    rows.insert(rows.end(), own.begin(), own.end());
  }
  return testing::tensor_of_i32({tokens, top_k}, rows);
}

class SparseAttentionCuda : public testing::GpuTest {
 protected:
  /// `others`: rows of keys behind the tokens' own, which nobody chose.
  void check(const AttentionSpec& spec, int64_t tokens, int64_t top_k, bool once = false,
             int64_t others = 0) const {
    const OwnedTensor chosen = draw_choice(tokens, top_k);
    const int64_t rows = tokens + others;
    testing::check_operator_on_gpu(
        make_sparse_attention(spec),
        [&](DType dtype) {
          return testing::OperatorInputs{{"xq", "xk", "xv", "chosen"},
                                         {{dtype, {tokens, spec.num_heads * spec.head_size}},
                                          {dtype, {rows, spec.num_kv_heads * spec.head_size}},
                                          {dtype, {rows, spec.num_kv_heads * spec.head_size_v}},
                                          {DType::kI32, {tokens, top_k}}}};
        },
        {0, 1}, cpu(), gpu(), {.values = {{"chosen", chosen}}, .once = once});
  }
};

AttentionSpec heads(int64_t num_heads, int64_t num_kv_heads, int64_t size, int64_t size_v) {
  return {.num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_size = size,
          .head_size_v = size_v};
}

TEST_F(SparseAttentionCuda, Shapes) {
  for (const int64_t top_k : {1, 7, 64, 200}) {
    check(heads(4, 4, 192, 128), 150, top_k);
    check(heads(4, 2, 33, 7), 60, top_k);
    check(heads(3, 1, 576, 512), 40, top_k);
  }
  check(heads(8, 1, 512, 512), 70, 20, false, 33);
  check(heads(33, 3, 70, 41), 50, 9);
  check(heads(2, 2, 16, 16), 0, 4);
  check(heads(2, 2, 16, 16), 1, 4);
}

TEST_F(SparseAttentionCuda, TinySharedKeys) {
  check(heads(9, 1, 16, 8), 9, 3, true, 2);
}

TEST_F(SparseAttentionCuda, TinyChoice) {
  check(heads(2, 1, 16, 8), 9, 3, true);
}

}  // namespace
}  // namespace tessera
