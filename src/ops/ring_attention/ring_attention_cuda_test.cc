// Ring attention on GPUs, beside the same on the CPU: ranks are threads that share the GPUs there
// are.
#include <fmt/ranges.h>

#include <cstring>

#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_testing.h"
#include "ops/ring_attention/ring_attention.h"
#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_ranks.h"

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

/// What a rank holds of [matrices, tokens, width].
OwnedTensor take(const Tensor& whole, int64_t matrices, const Zigzag& tokens, int64_t rank) {
  const int64_t row_bytes = whole.num_bytes() / (matrices * tokens.num_tokens());
  Shape shape = whole.shape;
  shape[matrices == 1 ? 0 : 1] = tokens.tokens_per_rank();
  OwnedTensor part(whole.dtype, shape);
  auto* to = static_cast<std::byte*>(part.get().data);
  for (int64_t matrix = 0; matrix < matrices; ++matrix) {
    tokens.for_each_run(rank, [&](const IndexRange& run) {
      const int64_t first = matrix * tokens.num_tokens() + run.begin;
      const int64_t num_bytes = run.count * row_bytes;
      std::memcpy(to, static_cast<const std::byte*>(whole.data) + first * row_bytes, num_bytes);
      to += num_bytes;
    });
  }
  return part;
}

/// Attention forward and backward on a GPU; what it gives is brought to the host.
struct OnGpu {
  OwnedTensor o, lse, grad_q;

  OnGpu(const Operator& forward, const Operator& backward, const Backend& gpu,
        const std::vector<OwnedTensor>& qkv, const Tensor& grad_o, const Tensor& cu_seqlens) {
    const Tensor host_q = qkv[0];
    const int64_t heads = static_cast<const AttentionOperator&>(forward).spec().num_heads;
    const OwnedTensor q = copy_to(gpu, qkv[0]);
    const OwnedTensor k = copy_to(gpu, qkv[1]);
    const OwnedTensor v = copy_to(gpu, qkv[2]);
    const OwnedTensor ends = copy_to(gpu, cu_seqlens);
    const OwnedTensor there_grad_o = copy_to(gpu, grad_o);
    const auto make = [&](DType dtype, const Shape& shape) {
      return OwnedTensor(dtype, shape, "a result", gpu.device());
    };
    const OwnedTensor there_o = make(host_q.dtype, grad_o.shape);
    const OwnedTensor there_lse = make(DType::kF32, {heads, host_q.shape[0]});
    const OwnedTensor there_grad_q = make(host_q.dtype, host_q.shape);
    const OwnedTensor grad_k = make(host_q.dtype, k.get().shape);
    const OwnedTensor grad_v = make(host_q.dtype, v.get().shape);
    run_kernel(forward, gpu, std::vector<Tensor>{q, k, v, ends},
               std::vector<Tensor>{there_o, there_lse});
    run_kernel(backward, gpu, std::vector<Tensor>{q, k, v, there_o, there_lse, there_grad_o, ends},
               std::vector<Tensor>{there_grad_q, grad_k, grad_v});
    o = copy_to_host(gpu, there_o);
    lse = copy_to_host(gpu, there_lse);
    grad_q = copy_to_host(gpu, there_grad_q);
  }
};

/// As ring attention, whose queries' gradients are summed in another order than kept pairs are.
void keep_no_pairs(const Backend& gpu) {
  auto& context = static_cast<cuda::CudaContext&>(*gpu.context());
  context.get<cuda::AttentionOptions>().pairs.most_bytes = 0;
}

void expect_same_bits(const Tensor& found, const Tensor& expected, const char* what) {
  ASSERT_EQ(found.shape, expected.shape) << what;
  EXPECT_EQ(std::memcmp(found.data, expected.data, static_cast<size_t>(expected.num_bytes())), 0)
      << what;
}

class RingAttentionCuda : public GpuTest {
 protected:
  void check(const Case& test, const GpuCheck& wanted = {}) const {
    const OwnedTensor ends = cumulative(test.lengths);
    run_gpu_ranks(test.ring, [&](World& world, const Backend& gpu) {
      SCOPED_TRACE(fmt::format("{}, rank {}", test.to_string(), world.rank()));
      const OperatorPtr op =
          make_ring_attention(test.spec, test.num_rows, test.row_length, world.make_world_group());
      const int64_t tokens = test.num_rows * test.row_length / test.ring;
      const AttentionSpec& spec = test.spec;
      GpuCheck how = wanted;
      how.seed = static_cast<uint64_t>(1 + world.rank());
      how.values = {{"cu_seqlens", ends}};
      how.tolerance_f32 = 1e-4;
      how.tolerance_bf16 = 2e-2;  // gradients of a sequence's first queries cancel in part
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

  /// Of queries, whose keys a rank has all gathered.
  static void check_query_bits(const Case& test, DType dtype) {
    const Zigzag tokens{test.num_rows, test.row_length, test.ring};
    const OwnedTensor ends = cumulative(test.lengths);
    const AttentionSpec& spec = test.spec;
    Random random(5, 6);
    std::vector<OwnedTensor> whole;
    for (const int64_t width :
         {spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size,
          spec.num_kv_heads * spec.head_size_v, spec.num_heads * spec.head_size_v})
      whole.push_back(random_tensor(dtype, {tokens.num_tokens(), width}, random));
    const OwnedTensor grad_o = std::move(whole.back());
    whole.pop_back();
    run_gpu_ranks(test.ring, [&](World& world, const Backend& gpu) {
      SCOPED_TRACE(
          fmt::format("{} {}, rank {}", test.to_string(), dtype_name(dtype), world.rank()));
      const auto own = [&](const Tensor& tensor, int64_t matrices = 1) {
        return take(tensor, matrices, tokens, world.rank());
      };
      std::vector<OwnedTensor> parts;
      for (const OwnedTensor& tensor : whole) parts.push_back(own(tensor));
      const CommunicatorPtr group = world.make_world_group();
      keep_no_pairs(gpu);
      const OnGpu plain(*make_attention(spec), *make_attention_backward(spec, false), gpu, whole,
                        grad_o, ends);
      const OnGpu ring(
          *make_ring_attention(spec, test.num_rows, test.row_length, group),
          *make_ring_attention_backward(spec, test.num_rows, test.row_length, group, false), gpu,
          parts, own(grad_o), ends);
      expect_same_bits(ring.o, own(plain.o), "o");
      expect_same_bits(ring.lse, own(plain.lse, spec.num_heads), "lse");
      expect_same_bits(ring.grad_q, own(plain.grad_q), "grad_q");
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
  for (const int64_t size : {64, 33, 256}) {
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

TEST_F(RingAttentionCuda, TinyExact) {
  check({heads(2, 1, 24), 2, 1, 132, {70, 0, 62}}, {.dtypes = {DType::kF32}, .once = true});
}

TEST_F(RingAttentionCuda, TinyOnTensorCores) {
  check({heads(2, 1, 64), 2, 1, 260, {199, 0, 61}}, {.dtypes = {DType::kBF16}, .once = true});
}

TEST_F(RingAttentionCuda, TinyWideOnTensorCores) {
  check({heads(2, 1, 256), 2, 1, 260, {199, 0, 61}}, {.dtypes = {DType::kBF16}, .once = true});
}

TEST_F(RingAttentionCuda, Windows) {
  for (const int64_t window : {1, 17, 130, 1000}) {
    check({heads(2, 1, 256, 0, window), 2, 1, 240, {100, 140}});
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

TEST_F(RingAttentionCuda, QueriesGetPlainAttentionsBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    check_query_bits({heads(2, 1, 64), 2, 3, 120, {1, 150, 1, 7, 201}}, dtype);
    check_query_bits({heads(4, 2, 128), 3, 1, 6 * 131, {500, 286}}, dtype);
    check_query_bits({heads(2, 1, 64, 0, 90), 4, 2, 320, {600, 40}}, dtype);
    check_query_bits({heads(2, 2, 192, 128), 2, 1, 600, {600}}, dtype);
  }
}

TEST_F(RingAttentionCuda, NoTokens) {
  check({heads(2, 1, 64), 2, 0, 8, {}});
  check({heads(2, 1, 64), 2, 2, 0, {0, 0}});
}

}  // namespace
}  // namespace tessera::testing
