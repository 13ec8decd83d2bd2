#include <fmt/ranges.h>

#include <numeric>

#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_testing.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/narrow_gpu.h"

namespace tessera {
namespace {

using testing::cumulative;
using testing::heads;
using testing::OperatorInputs;

struct Case {
  AttentionSpec spec;
  std::vector<int64_t> lengths;
  bool shares_keys = false;  ///< with the values

  int64_t num_tokens() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}); }
  std::string to_string() const {
    return fmt::format("N={}/{} D={}/{} window={} lengths {}", spec.num_heads, spec.num_kv_heads,
                       spec.head_size, spec.head_size_v, spec.window, lengths);
  }
};

/// Our own kernels.
class AttentionCudaTest : public testing::GpuTest {
 protected:
  void SetUp() override {
    testing::GpuTest::SetUp();
    if (IsSkipped()) return;
    reset_options();
    options().cudnn = false;
  }
  void TearDown() override {
    if (!IsSkipped()) reset_options();
  }
  static cuda::CudaContext& context() { return static_cast<cuda::CudaContext&>(*gpu().context()); }
  static cuda::AttentionOptions& options() { return context().get<cuda::AttentionOptions>(); }
  static void reset_options() { options() = cuda::AttentionOptions(context()); }

  /// With the gradient of lse too where `outputs` has it.
  void check(const Case& test, const std::vector<int>& outputs = {0, 1}) const {
    testing::GpuCheck how;
    how.repeatable = options().deterministic;
    check_on(gpu(), test, outputs, how);
  }
  void check_on(const Backend& on, const Case& test, const std::vector<int>& outputs,
                testing::GpuCheck how) const {
    SCOPED_TRACE(test.to_string());
    const OperatorPtr op = make_attention(test.spec);
    const AttentionSpec& spec = static_cast<const Attention&>(*op).spec();
    const int64_t tokens = test.num_tokens();
    const OwnedTensor ends = cumulative(test.lengths);
    const auto inputs = [&](DType dtype) -> OperatorInputs {
      return {{"xq", "xk", test.shares_keys ? "xk" : "xv", "cu_seqlens"},
              {{dtype, {tokens, spec.num_heads * spec.head_size}},
               {dtype, {tokens, spec.num_kv_heads * spec.head_size}},
               {dtype, {tokens, spec.num_kv_heads * spec.head_size_v}},
               {DType::kI32, ends.get().shape}}};
    };
    how.values = {{"cu_seqlens", ends}};
    // Without a gradient of lse, those of a sequence's first query cancel to nothing.
    how.tolerance_f32 = outputs.size() > 1 ? 5e-5 : 5e-3;
    // Probabilities and their gradients are rounded to BF16, as on a CPU with BF16 products; half a
    // unit of BF16 where the CPU's own rows happen to err less.
    how.tolerance_bf16 = 1e-2;
    check_operator_on_gpu(op, inputs, outputs, cpu(), on, how);
  }

  /// The last `queries` tokens of a sequence of `length` over a cache with room to spare.
  void check_cached(const AttentionSpec& spec, int64_t queries, int64_t length,
                    testing::GpuCheck how = {}) const {
    SCOPED_TRACE(fmt::format("{} of {}", queries, length));
    const OperatorPtr op = make_attention_cached(spec, queries % 2 == 1);
    const AttentionSpec& full = static_cast<const AttentionCached&>(*op).spec();
    const OwnedTensor valid = testing::tensor_of_i32({1}, {static_cast<int32_t>(length)});
    const auto inputs = [&](DType dtype) -> OperatorInputs {
      return {{"q", "k", "v", "cache_length"},
              {{dtype, {queries, full.num_heads * full.head_size}},
               {dtype, {length + 70, full.num_kv_heads * full.head_size}},
               {dtype, {length + 70, full.num_kv_heads * full.head_size_v}},
               {DType::kI32, {1}}}};
    };
    how.values = {{"cache_length", valid}};
    how.tolerance_f32 = 5e-5;
    how.tolerance_bf16 = 1e-2;
    check_operator_on_gpu(op, inputs, {}, cpu(), gpu(), how);
  }
};

TEST_F(AttentionCudaTest, HeadSizes) {
  for (const int64_t size : {1, 8, 24, 33, 64, 80, 128, 136, 192, 200, 256, 264, 512, 576})
    check({heads(2, 1, size, size == 192 ? 128 : 0), {37, 150}});
}

TEST_F(AttentionCudaTest, ValuesOfAnotherSize) {
  check({heads(4, 4, 192, 128), {130, 0, 270, 1}});
  check({heads(4, 2, 24, 40), {150}});
  check({heads(2, 2, 128, 64), {90, 3}});
  check({heads(2, 1, 5, 129), {50}});
  check({heads(2, 1, 64, 128), {140}});
  check({heads(4, 2, 256, 136), {100, 1, 70}});
  check({heads(2, 1, 72, 256), {130}});
  check({heads(2, 1, 576, 512), {130, 3}});
  check({heads(2, 1, 264, 24), {70}});
  check({heads(2, 1, 8, 512), {50}});
  check({heads(2, 1, 576, 520), {50}});
}

TEST_F(AttentionCudaTest, GroupedHeads) {
  for (const int64_t size : {64, 128, 256, 512}) {
    check({heads(4, 4, size), {5, 131, 64}});
    check({heads(8, 2, size), {200, 7}});
    check({heads(6, 2, size), {140}});
  }
}

TEST_F(AttentionCudaTest, Lengths) {
  for (const auto& lengths : std::vector<std::vector<int64_t>>{{},
                                                               {0},
                                                               {1},
                                                               {0, 1, 0, 7, 0},
                                                               {63, 64, 65},
                                                               {127, 128, 129},
                                                               {1, 300, 0, 130},
                                                               {511, 33}}) {
    check({heads(2, 2, 64), lengths});
    check({heads(4, 1, 128), lengths});
    check({heads(2, 1, 256), lengths});
    check({heads(2, 1, 512), lengths});
    check({heads(2, 1, 512), lengths, true});
  }
}

TEST_F(AttentionCudaTest, Windows) {
  for (const int64_t window : {1, 2, 63, 64, 100, 129, 1000}) {
    check({heads(2, 1, 64, 0, window), {400, 1, 33}});
    check({heads(2, 2, 192, 128, window), {300}});
    check({heads(2, 1, 256, 0, window), {300, 65}});
    check({heads(2, 1, 512, 0, window), {200, 65}});
    check({heads(4, 2, 512, 0, window), {200, 65}, true});
  }
}

TEST_F(AttentionCudaTest, TheOutputsGradientAlone) {
  check({heads(4, 2, 128), {200, 50}}, {0});
  check({heads(2, 1, 40), {70}}, {0});
}

/// Pairs of one key-value head at a time, of none, and of fewer tokens than sequences' blocks take.
TEST_F(AttentionCudaTest, RoomForPairs) {
  const std::vector<Case> cases = {{heads(6, 3, 96), {300, 200, 12}},
                                   {heads(4, 4, 128), {512}},
                                   {heads(3, 3, 192, 128), {129, 383}},
                                   {heads(4, 2, 256), {300, 65, 147}},
                                   {heads(2, 2, 128), std::vector<int64_t>(100, 3)}};
  for (const int64_t most_bytes : {int64_t{0}, int64_t{1} << 20, int64_t{2} << 20}) {
    options().pairs = {.most_bytes = most_bytes, .least_tasks = 0};
    for (const Case& test : cases) check(test);
  }
}

TEST_F(AttentionCudaTest, RandomCases) {
  Random random(3, 11);
  const auto draw = [&](int64_t bound) {
    return static_cast<int64_t>(random.next_below(static_cast<uint64_t>(bound)));
  };
  for (int i = 0; i < 12; ++i) {
    const int64_t kv_heads = 1 + draw(3);
    AttentionSpec spec =
        heads(kv_heads * (1 + draw(4)), kv_heads, 8 + 8 * draw(32), 8 + 8 * draw(32));
    if (draw(2) == 0) spec.window = 1 + draw(300);
    if (draw(3) == 0) spec.scale = 0.01 + 0.2 * random.next_uniform();
    std::vector<int64_t> lengths(draw(5));
    for (int64_t& length : lengths) length = draw(3) == 0 ? draw(5) : draw(400);
    check({spec, lengths});
  }
}

TEST_F(AttentionCudaTest, ManySequences) {
  std::vector<int64_t> lengths(300, 0);
  for (size_t i = 0; i < lengths.size(); i += 3) lengths[i] = static_cast<int64_t>(i % 17);
  check({heads(2, 1, 64), lengths});
}

TEST_F(AttentionCudaTest, Cached) {
  for (const AttentionSpec& spec : {heads(4, 2, 64), heads(2, 1, 33, 17, 50)}) {
    check_cached(spec, 1, 1);
    check_cached(spec, 1, 200);
    check_cached(spec, 70, 130);
    check_cached(spec, 100, 100);
    check_cached(spec, 0, 5);
  }
}

TEST_F(AttentionCudaTest, CachedChunks) {
  AttentionSpec spec = heads(4, 2, 64);
  for (const int64_t chunk : {1, 50, 64, 130}) {
    spec.chunk = chunk;
    check_cached(spec, 1, 200);
    check_cached(spec, 70, 130);
    check_cached(spec, 300, 300);
  }
}

// Blocks that take several pieces in turn, a sequence of more than one piece, one without tokens.

/// On the tensor cores, with pairs that are kept.
TEST_F(AttentionCudaTest, TinyWithPairs) {
  check_on(testing::make_narrow_gpu(), {heads(2, 1, 80), {130, 0, 1}}, {0, 1},
           {.dtypes = {DType::kBF16}, .once = true});
}

/// On the tensor cores; the scores are computed twice.
TEST_F(AttentionCudaTest, TinyWithoutPairs) {
  check_on(testing::make_narrow_gpu(), {heads(2, 1, 64), {130, 0, 1}}, {0, 1},
           {.dtypes = {DType::kBF16}, .once = true});
}

/// Heads whose keys' and values' gradients two warpgroups sum up.
TEST_F(AttentionCudaTest, TinyWideWithPairs) {
  check_on(testing::make_narrow_gpu(), {heads(2, 1, 256), {130, 0, 1}}, {0, 1},
           {.dtypes = {DType::kBF16}, .once = true});
}

TEST_F(AttentionCudaTest, TinyWideWithoutPairs) {
  const Backend narrow = testing::make_narrow_gpu();
  static_cast<cuda::CudaContext&>(*narrow.context()).get<cuda::AttentionOptions>().pairs = {
      .most_bytes = 0};
  check_on(narrow, {heads(2, 1, 200), {130, 0, 1}}, {0, 1},
           {.dtypes = {DType::kBF16}, .once = true});
}

TEST_F(AttentionCudaTest, TinyLargeHeads) {
  check_on(testing::make_narrow_gpu(), {heads(2, 1, 512), {70, 0, 1}}, {0, 1},
           {.dtypes = {DType::kBF16}, .once = true});
}

TEST_F(AttentionCudaTest, TinyLargeHeadsThatShareKeys) {
  check_on(testing::make_narrow_gpu(), {heads(2, 1, 512), {70, 0, 1}, true}, {0, 1},
           {.dtypes = {DType::kBF16}, .once = true});
}

TEST_F(AttentionCudaTest, TinyExact) {
  check_on(testing::make_narrow_gpu(), {heads(2, 1, 40), {65, 0, 1}}, {0, 1},
           {.dtypes = {DType::kF32}, .once = true});
}

TEST_F(AttentionCudaTest, TinyCache) {
  check_cached(heads(2, 1, 64), 3, 70, {.once = true});
}

/// cuDNN's, where it can be loaded.
class AttentionCudnnTest : public AttentionCudaTest {
 protected:
  void SetUp() override {
    AttentionCudaTest::SetUp();
    if (IsSkipped()) return;
    options().cudnn = true;
    const std::string& why_not = context().get<cuda::CudnnAttention>().why_not();
    if (!why_not.empty()) GTEST_SKIP() << why_not;
  }
  /// Forward and our backward on its results; forward and backward.
  void check_both(const Case& test) const {
    for (const bool deterministic : {true, false}) {
      SCOPED_TRACE(deterministic);
      options().deterministic = deterministic;
      check(test, {0});
      EXPECT_EQ(options().why_not_cudnn, "") << test.to_string();
    }
  }
};

TEST_F(AttentionCudnnTest, Shapes) {
  check_both({heads(4, 4, 64), {63, 0, 130, 1, 7}});
  check_both({heads(4, 1, 128), {300, 64}});
  check_both({heads(8, 2, 80), {0, 140, 0}});
  check_both({heads(4, 4, 192, 128), {200, 0, 90}});
  check_both({heads(2, 2, 128, 64), {257}});
}

TEST_F(AttentionCudnnTest, Windows) {
  for (const int64_t window : {2, 64, 100, 1000})
    check_both({heads(4, 2, 64, 0, window), {300, 33}});
}

TEST_F(AttentionCudnnTest, TheGradientOfLseIsOurs) {
  options().deterministic = false;
  check({heads(4, 2, 128), {200, 50}}, {0, 1});
}

TEST_F(AttentionCudnnTest, RefusalsRunOnOurKernels) {
  check({heads(2, 1, 33), {70}}, {0});
  EXPECT_NE(options().why_not_cudnn, "");
  check({heads(2, 1, 64), std::vector<int64_t>(40, 5)}, {0});
  EXPECT_NE(options().why_not_cudnn, "");
}

}  // namespace
}  // namespace tessera
