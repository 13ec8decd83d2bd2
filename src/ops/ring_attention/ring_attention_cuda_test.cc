// Ring attention on GPUs, beside the same on the CPU: ranks are threads that share the GPUs there
// are.
#include <fmt/ranges.h>

#include "ops/ring_attention/ring_attention.h"
#include "ops/testing/gpu_ranks.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {
namespace {

struct Case {
  AttentionSpec spec;
  int64_t ring;
  int64_t num_rows;
  int64_t row_length;
  std::vector<int64_t> lengths;  ///< sum to all rows' tokens

  std::string to_string() const {
    return fmt::format("N={}/{} D={}/{} window={} ring={} rows={}x{} lengths {}", spec.num_heads,
                       spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.window, ring,
                       num_rows, row_length, lengths);
  }
};

AttentionSpec heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_size,
                    int64_t head_size_v = 0, int64_t window = 0) {
  return {.num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_size = head_size,
          .head_size_v = head_size_v == 0 ? head_size : head_size_v,
          .window = window};
}

OwnedTensor cumulative(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> ends = {0};
  for (const int64_t length : lengths) ends.push_back(ends.back() + static_cast<int32_t>(length));
  return tensor_of_i32({std::ssize(ends)}, ends);
}

class RingAttentionCuda : public GpuTest {
 protected:
  void check(const Case& test) const {
    const OwnedTensor ends = cumulative(test.lengths);
    run_gpu_ranks(test.ring, [&](World& world, const Backend& gpu) {
      SCOPED_TRACE(fmt::format("{}, rank {}", test.to_string(), world.rank()));
      const OperatorPtr op =
          make_ring_attention(test.spec, test.num_rows, test.row_length, world.make_world_group());
      const int64_t tokens = test.num_rows * test.row_length / test.ring;
      const AttentionSpec& spec = test.spec;
      GpuCheck how;
      how.seed = static_cast<uint64_t>(1 + world.rank());
      how.values = {{"cu_seqlens", ends}};
      how.tolerance_f32 = 1e-4;
      how.tolerance_bf16 = 1e-2;  // as of plain attention
      check_operator_on_gpu(
          op,
          [&](DType dtype) {
            return OperatorInputs{{"xq", "xk", "xv", "cu_seqlens"},
                                  {{dtype, {tokens, spec.num_heads * spec.head_size}},
                                   {dtype, {tokens, spec.num_kv_heads * spec.head_size}},
                                   {dtype, {tokens, spec.num_kv_heads * spec.head_size_v}},
                                   {DType::kI32, ends.get().shape}}};
          },
          {0, 1}, cpu(), gpu, how);
    });
  }
};

TEST_F(RingAttentionCuda, WholeRows) {
  check({heads(2, 1, 64), 1, 1, 150, {150}});
  check({heads(2, 1, 64), 2, 1, 512, {512}});
  check({heads(4, 2, 128), 2, 2, 300, {300, 300}});
  check({heads(2, 2, 64), 3, 1, 6 * 131, {786}});
  check({heads(2, 1, 64), 4, 2, 8 * 37, {296, 296}});
}

TEST_F(RingAttentionCuda, SequencesThatCrossChunksAndRows) {
  for (const int64_t size : {64, 33}) {
    check({heads(2, 1, size), 2, 3, 120, {1, 150, 1, 7, 201}});
    check({heads(2, 1, size), 3, 3, 120, {360, 0, 0}});
    check({heads(2, 1, size), 2, 2, 120, std::vector<int64_t>(240, 1)});
    check({heads(2, 1, size), 2, 2, 120, {0, 239, 0, 1, 0}});
    check({heads(2, 1, size), 4, 1, 800, {500, 299, 1}});
  }
}

TEST_F(RingAttentionCuda, ChunksOfOneToken) {
  check({heads(2, 2, 64), 2, 3, 4, {4, 4, 4}});
  check({heads(2, 2, 24), 3, 2, 6, {12}});
}

TEST_F(RingAttentionCuda, Windows) {
  for (const int64_t window : {1, 17, 130, 1000}) {
    check({heads(2, 1, 64, 0, window), 2, 2, 240, {200, 280}});
    check({heads(2, 1, 40, 0, window), 3, 1, 300, {299, 1}});
  }
}

TEST_F(RingAttentionCuda, HeadSizes) {
  check({heads(8, 2, 128), 2, 1, 264, {100, 164}});
  check({heads(2, 2, 192, 128), 2, 1, 264, {264}});
  check({heads(3, 1, 80), 2, 1, 264, {264}});
  check({heads(2, 2, 256), 2, 1, 132, {132}});
  check({heads(6, 3, 5, 7), 2, 1, 132, {132}});
}

TEST_F(RingAttentionCuda, NoTokens) {
  check({heads(2, 1, 64), 2, 0, 8, {}});
  check({heads(2, 1, 64), 2, 2, 0, {0, 0}});
}

}  // namespace
}  // namespace tessera::testing
