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

struct How {
  bool once = false;
  int64_t others = 0;  ///< rows of keys behind the tokens' own, which nobody chose
  double tolerance_bf16 = testing::GpuCheck{}.tolerance_bf16;
};

/// On tensor cores probabilities and their gradients are rounded to BF16, as in attention.
constexpr double kRounded = 1e-2;

class SparseAttentionCuda : public testing::GpuTest {
 protected:
  void check(const AttentionSpec& spec, int64_t tokens, int64_t top_k, const How& how = {}) const {
    check_with("xv", spec, tokens, top_k, how);
  }
  /// The same, the keys being the values.
  void check_shared(const AttentionSpec& spec, int64_t tokens, int64_t top_k,
                    const How& how = {}) const {
    check_with("xk", spec, tokens, top_k, how);
  }

 private:
  void check_with(const std::string& values, const AttentionSpec& spec, int64_t tokens,
                  int64_t top_k, const How& how) const {
    const OwnedTensor chosen = draw_choice(tokens, top_k);
    const int64_t rows = tokens + how.others;
    testing::check_operator_on_gpu(
        make_sparse_attention(spec),
        [&](DType dtype) {
          return testing::OperatorInputs{{"xq", "xk", values, "chosen"},
                                         {{dtype, {tokens, spec.num_heads * spec.head_size}},
                                          {dtype, {rows, spec.num_kv_heads * spec.head_size}},
                                          {dtype, {rows, spec.num_kv_heads * spec.head_size_v}},
                                          {DType::kI32, {tokens, top_k}}}};
        },
        {0, 1}, cpu(), gpu(),
        {.values = {{"chosen", chosen}}, .tolerance_bf16 = how.tolerance_bf16, .once = how.once});
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
  check(heads(2, 1, 512, 512), 70, 20, {.others = 33});
  check(heads(33, 3, 70, 41), 50, 9);
  check(heads(2, 2, 16, 16), 0, 4);
  check(heads(2, 2, 16, 16), 1, 4);
}

/// On tensor cores: units that are full and not, keys that more tokens chose than a block takes.
TEST_F(SparseAttentionCuda, LargeHeads) {
  const auto check_large = [&](const AttentionSpec& spec, int64_t tokens, int64_t top_k,
                               int64_t others = 0) {
    check(spec, tokens, top_k, {.others = others, .tolerance_bf16 = kRounded});
  };
  for (const int64_t top_k : {1, 32, 33, 90}) check_large(heads(8, 1, 576, 512), 150, top_k, 70);
  check_large(heads(64, 1, 512, 512), 300, 40);
  check_large(heads(80, 1, 328, 64), 70, 20);
  check_large(heads(80, 2, 64, 264), 40, 9);
  check_large(heads(16, 2, 512, 512), 140, 30, 1);
  check_large(heads(64, 1, 512, 512), 0, 4, 5);
  check_large(heads(64, 1, 512, 512), 1, 4);
}

TEST_F(SparseAttentionCuda, KeysThatAreTheValues) {
  const auto check_large = [&](const AttentionSpec& spec, int64_t tokens, int64_t top_k,
                               int64_t others = 0) {
    check_shared(spec, tokens, top_k, {.others = others, .tolerance_bf16 = kRounded});
  };
  for (const int64_t top_k : {1, 32, 33, 90}) check_large(heads(8, 1, 512, 512), 150, top_k);
  check_large(heads(64, 1, 512, 512), 300, 40, 33);
  check_large(heads(80, 1, 136, 136), 70, 20);
  check_large(heads(16, 2, 320, 320), 140, 30, 1);
  check_shared(heads(2, 1, 16, 16), 30, 4);
}

TEST_F(SparseAttentionCuda, TinyLargeHeads) {
  check(heads(8, 1, 576, 512), 9, 3, {.once = true, .others = 60, .tolerance_bf16 = kRounded});
}

TEST_F(SparseAttentionCuda, TinyKeysThatAreTheValues) {
  check_shared(heads(8, 1, 512, 512), 66, 40,
               {.once = true, .others = 2, .tolerance_bf16 = kRounded});
}

TEST_F(SparseAttentionCuda, TinySharedKeys) {
  check(heads(9, 1, 16, 8), 9, 3, {.once = true, .others = 2});
}

TEST_F(SparseAttentionCuda, TinyChoice) {
  check(heads(2, 1, 16, 8), 9, 3, {.once = true});
}

}  // namespace
}  // namespace tessera
