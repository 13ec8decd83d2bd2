#include <cmath>

#include "ops/index_topk/index_topk.h"
#include "ops/paged_attention/pages.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

/// Whole numbers, whose scores are exact on both sides and often equal.
OwnedTensor whole_numbers(const Shape& shape, uint64_t seed) {
  Random random(seed, 3);
  OwnedTensor tensor = testing::random_tensor(DType::kF32, shape, random);
  for (float& x : tensor.get().span<float>()) x = std::round(x);
  return tensor;
}

OwnedTensor vector_of(const std::vector<int32_t>& values) {
  return testing::tensor_of_i32({std::ssize(values)}, values);
}

class IndexTopkCuda : public testing::GpuTest {
 protected:
  /// `tokens` queries of a spec over so many rows of keys, and what says where these are.
  void check(const OperatorPtr& op, const IndexSpec& spec, int64_t tokens, int64_t rows,
             const std::vector<OwnedTensor>& bounds, bool once = false) const {
    const OwnedTensor q = whole_numbers({tokens, spec.num_heads * spec.head_size}, 1);
    const OwnedTensor weights = whole_numbers({tokens, spec.num_heads}, 2);
    const OwnedTensor keys = whole_numbers({rows, spec.head_size}, 3);
    testing::GpuCheck how = {.values = {{"q", q}, {"weights", weights}, {"keys", keys}},
                             .once = once};
    testing::OperatorInputs inputs = {{"q", "weights", "keys"}, {}};
    for (size_t i = 0; i < bounds.size(); ++i) {
      inputs.names.push_back(fmt::format("bounds{}", i));
      how.values.emplace(inputs.names.back(), bounds[i]);
    }
    testing::check_operator_on_gpu(
        op,
        [&](DType dtype) {
          testing::OperatorInputs own = inputs;
          own.types = {
              {dtype, q.get().shape}, {dtype, weights.get().shape}, {dtype, keys.get().shape}};
          for (const OwnedTensor& bound : bounds)
            own.types.push_back({DType::kI32, bound.get().shape});
          return own;
        },
        {}, cpu(), gpu(), how);
  }

  void check_packed(const IndexSpec& spec, const std::vector<int32_t>& bounds,
                    bool once = false) const {
    std::vector<OwnedTensor> given;
    given.push_back(vector_of(bounds));
    check(make_index_topk(spec), spec, bounds.back(), bounds.back(), given, once);
  }
};

TEST_F(IndexTopkCuda, PackedSequences) {
  check_packed({.num_heads = 3, .head_size = 5, .top_k = 4}, {0, 40, 40, 43});
  check_packed({.num_heads = 64, .head_size = 128, .top_k = 50}, {0, 1, 700});
  check_packed({.num_heads = 9, .head_size = 16, .top_k = 300}, {0, 650, 651});
  check_packed({.num_heads = 1, .head_size = 8, .top_k = 1}, {0, 5});
  check_packed({.num_heads = 2, .head_size = 8, .top_k = 4}, {0, 0});
}

TEST_F(IndexTopkCuda, Caches) {
  const IndexSpec spec = {.num_heads = 8, .head_size = 32, .top_k = 20};
  for (const int32_t length : {7, 100, 512}) {
    std::vector<OwnedTensor> bounds;
    bounds.push_back(vector_of({length}));
    check(make_index_topk_cached(spec), spec, 7, 512, bounds);
  }
}

TEST_F(IndexTopkCuda, Pages) {
  const IndexSpec spec = {.num_heads = 8, .head_size = 32, .top_k = 20};
  std::vector<OwnedTensor> bounds;
  bounds.push_back(vector_of({0, 3, 3, 5}));
  bounds.push_back(vector_of({kPageTokens + 22, 0, 9}));
  bounds.push_back(testing::tensor_of_i32({3, 2}, {2, 0, -1, -1, 3, -1}));
  check(make_index_topk_paged(spec), spec, 6, 4 * kPageTokens, bounds);
}

TEST_F(IndexTopkCuda, Entries) {
  const IndexSpec spec = {.num_heads = 8, .head_size = 32, .top_k = 20};
  for (const int64_t rate : {1, 4}) {
    std::vector<int32_t> positions;
    for (const int32_t length : {3, 300, 141}) {
      for (int32_t i = 0; i < length; ++i) positions.push_back(i);
    }
    std::vector<OwnedTensor> bounds;
    bounds.push_back(vector_of(positions));
    const int64_t tokens = std::ssize(positions);
    check(make_index_topk_entries(spec, rate), spec, tokens, tokens / rate, bounds);
  }
}

TEST_F(IndexTopkCuda, KeptEntries) {
  const IndexSpec spec = {.num_heads = 8, .head_size = 32, .top_k = 20};
  std::vector<OwnedTensor> cached;
  cached.push_back(vector_of({497, 498, 499, 500}));
  check(make_index_topk_entries(spec, 4, KeptRows::kCached), spec, 4, 128, cached);
  std::vector<OwnedTensor> paged;
  paged.push_back(vector_of({200, 201, 202, 7, 0, 0}));
  paged.push_back(vector_of({0, 3, 4}));
  paged.push_back(testing::tensor_of_i32({2, 2}, {2, 0, 1, -1}));
  check(make_index_topk_entries(spec, 4, KeptRows::kPaged), spec, 6, 3 * kPageTokens, paged);
}

TEST_F(IndexTopkCuda, TinyEntries) {
  const IndexSpec spec = {.num_heads = 2, .head_size = 8, .top_k = 2};
  std::vector<OwnedTensor> bounds;
  bounds.push_back(vector_of({0, 1, 2, 3, 4, 5, 0, 1, 2}));
  check(make_index_topk_entries(spec, 2), spec, 9, 4, bounds, true);
}

TEST_F(IndexTopkCuda, TinySequence) {
  check_packed({.num_heads = 2, .head_size = 8, .top_k = 3}, {0, 7, 9}, true);
}

}  // namespace
}  // namespace tessera
