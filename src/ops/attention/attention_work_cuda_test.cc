#include <algorithm>
#include <numeric>
#include <tuple>

#include "ops/attention/attention_cuda_kernels.h"
#include "ops/attention/attention_testing.h"
#include "ops/cuda/context.h"
#include "ops/cuda/device_buffer.h"
#include "ops/cuda/tensor_map.h"
#include "ops/testing/gpu_test.h"

namespace tessera::cuda::attention {
namespace {

using testing::cumulative;
using testing::random_tensor;

template <typename T>
DeviceBuffer buffer_of(int64_t num_values) {
  DeviceBuffer buffer(static_cast<size_t>(std::max<int64_t>(num_values, 1)) * sizeof(T));
  check(cudaMemset(buffer.as<T>(), 0xff, buffer.num_bytes()));
  check(cudaDeviceSynchronize());  // the kernels' stream does not wait for it
  return buffer;
}

DeviceBuffer copy_of(const OwnedTensor& host) {
  DeviceBuffer buffer = buffer_of<std::byte>(host.get().num_bytes());
  if (host.get().num_bytes() == 0) return buffer;
  check(cudaMemcpy(buffer.as<std::byte>(), host.get().data,
                   static_cast<size_t>(host.get().num_bytes()), cudaMemcpyHostToDevice));
  check(cudaDeviceSynchronize());
  return buffer;
}

template <typename T>
std::vector<T> read(const DeviceBuffer& buffer) {
  std::vector<T> values(buffer.num_bytes() / sizeof(T));
  buffer.copy_to(values.data());
  return values;
}

/// A list's memory, for sequences with these ends.
class List {
 public:
  List(const OwnedTensor& ends, int num_tokens, int block, bool keeps_pairs = false)
      : num_sequences_(static_cast<int>(ends.get().shape[0] - 1)),
        num_tokens_(num_tokens),
        block_(block),
        capacity_(static_cast<int>(max_items(num_tokens, num_sequences_, block))),
        keeps_pairs_(keeps_pairs),
        ends_(copy_of(ends)),
        counts_(buffer_of<int>(2)),
        num_of_length_(buffer_of<int>(capacity_ + 1)),
        items_(buffer_of<Item>(capacity_)),
        first_pairs_(buffer_of<int64_t>(num_sequences_)) {}

  SequenceList sequences(int64_t pair_capacity = 0) const {
    return {.list = {.num_items = counts_.as<int>(),
                     .num_of_length = num_of_length_.as<int>(),
                     .items = items_.as<Item>(),
                     .capacity = capacity_,
                     .first_pairs = keeps_pairs_ ? first_pairs_.as<int64_t>() : nullptr,
                     .pairs_fit = counts_.as<int>() + 1,
                     .pair_capacity = pair_capacity},
            .cu_seqlens = ends_.as<int>(),
            .num_sequences = num_sequences_,
            .num_tokens = num_tokens_,
            .block = block_};
  }
  int capacity() const { return capacity_; }
  int num_items() const { return read<int>(counts_)[0]; }
  int pairs_fit() const { return read<int>(counts_)[1]; }
  std::vector<Item> items() const {
    std::vector<Item> items = read<Item>(items_);
    items.resize(static_cast<size_t>(num_items()));
    return items;
  }

 private:
  int num_sequences_;
  int num_tokens_;
  int block_;
  int capacity_;
  bool keeps_pairs_;
  DeviceBuffer ends_;
  DeviceBuffer counts_;
  DeviceBuffer num_of_length_;
  DeviceBuffer items_;
  DeviceBuffer first_pairs_;
};

using ItemValues = std::tuple<int, int, int, int, int, int, int64_t>;

ItemValues values_of(const Item& item) {
  return {item.first,     item.query_row, item.key_row,    item.length,
          item.num_after, item.begin,     item.first_pairs};
}

std::vector<ItemValues> sorted(const std::vector<Item>& items) {
  std::vector<ItemValues> all;
  all.reserve(items.size());
  for (const Item& item : items) all.push_back(values_of(item));
  std::sort(all.begin(), all.end());
  return all;
}

class AttentionWorkCudaTest : public testing::GpuTest {
 protected:
  static CudaContext& context() { return static_cast<CudaContext&>(*gpu().context()); }
  static cudaStream_t stream() { return context().stream(); }
  static int total(const std::vector<int64_t>& lengths) {
    return static_cast<int>(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
  }

  static std::vector<Item> expected_items(const std::vector<int64_t>& lengths, int block,
                                          bool keeps_pairs) {
    std::vector<Item> items;
    int begin = 0;
    int64_t pairs = 0;
    for (const int64_t length : lengths) {
      const int size = static_cast<int>(length);
      const int num_blocks = (size + block - 1) / block;
      for (int b = 0; b < num_blocks; ++b)
        items.push_back({.query_row = begin,
                         .key_row = begin,
                         .length = size,
                         .first = b * block,
                         .num_after = num_blocks - 1 - b,
                         .begin = 0,
                         .first_pairs = keeps_pairs ? pairs : 0});
      begin += size;
      pairs += num_pair_tiles(length);
    }
    return items;
  }

  static void expect_list(const List& list, const std::vector<Item>& expected) {
    const std::vector<Item> items = list.items();
    EXPECT_EQ(sorted(items), sorted(expected));
    for (size_t i = 1; i < items.size(); ++i) ASSERT_GE(items[i - 1].first, items[i].first) << i;
  }

  void check_list(const std::vector<int64_t>& lengths, int block) const {
    SCOPED_TRACE(fmt::format("{} sequences, {} tokens, blocks of {}", lengths.size(),
                             total(lengths), block));
    int64_t pairs = 0;
    for (const int64_t length : lengths) pairs += num_pair_tiles(length);
    for (const int64_t room : {int64_t{-1}, pairs, pairs - 1}) {
      const bool keeps_pairs = room >= 0;
      const List list(cumulative(lengths), total(lengths), block, keeps_pairs);
      launch_list_sequences(list.sequences(room), stream());
      gpu().device().synchronize();
      expect_list(list, expected_items(lengths, block, keeps_pairs));
      if (keeps_pairs) {
        EXPECT_EQ(list.pairs_fit(), room >= pairs ? 1 : 0);
      }
    }
  }

  /// The list and the sums by one launch, and the sums by one of their own.
  void check_beside_delta(const std::vector<int64_t>& lengths, int64_t num_heads,
                          int64_t head_size) {
    SCOPED_TRACE(fmt::format("{} sequences, {} tokens", lengths.size(), total(lengths)));
    const int tokens = total(lengths);
    const auto rows = [&] {
      return copy_of(random_tensor(DType::kBF16, {tokens, num_heads * head_size}, random_));
    };
    const DeviceBuffer o = rows();
    const DeviceBuffer grad_o = rows();
    const DeviceBuffer alone = buffer_of<float>(tokens * num_heads);
    const DeviceBuffer beside = buffer_of<float>(tokens * num_heads);
    const List list(cumulative(lengths), tokens, kTensorBlock);
    DeltaParams params{.o = o.as<void>(),
                       .grad_o = grad_o.as<void>(),
                       .grad_lse = nullptr,
                       .delta = alone.as<float>(),
                       .num_rows = tokens,
                       .num_heads = static_cast<int>(num_heads),
                       .head_size_v = static_cast<int>(head_size)};
    launch_delta(params, DType::kBF16, stream());
    params.delta = beside.as<float>();
    launch_delta_and_list(params, list.sequences(), DType::kBF16, stream());
    gpu().device().synchronize();
    EXPECT_EQ(read<uint32_t>(alone), read<uint32_t>(beside));
    expect_list(list, expected_items(lengths, kTensorBlock, false));
  }

  Random random_{7, 3};
};

std::vector<std::vector<int64_t>> various_lengths() {
  std::vector<std::vector<int64_t>> cases = {{1},
                                             {0, 1},
                                             {0, 1, 0, 7, 0},
                                             {127, 128, 129},
                                             {1, 300, 0, 130},
                                             {20000},
                                             {5000, 3, 9000, 0, 1},
                                             std::vector<int64_t>(8, 256),
                                             std::vector<int64_t>(100, 3)};
  for (const int num_sequences : {31, 32, 33, 64, 300}) {
    std::vector<int64_t>& lengths = cases.emplace_back();
    for (int s = 0; s < num_sequences; ++s) lengths.push_back(s * 97 % 401);
  }
  return cases;
}

TEST_F(AttentionWorkCudaTest, TinyList) {
  check_list({130, 0, 1}, kExactBlock);
}

TEST_F(AttentionWorkCudaTest, ListsOfFewAndOfManySequences) {
  for (const std::vector<int64_t>& lengths : various_lengths())
    for (const int block : {kExactBlock, kTensorBlock}) check_list(lengths, block);
}

TEST_F(AttentionWorkCudaTest, NoTokenIsListed) {
  for (const int64_t num_sequences : {1, 40}) {
    const std::vector<int64_t> lengths(num_sequences, 0);
    const List list(cumulative(lengths), 50, kTensorBlock);
    launch_list_sequences(list.sequences(), stream());
    gpu().device().synchronize();
    EXPECT_EQ(list.num_items(), 0);
  }
}

/// Ends that go back and beyond the tokens: what is listed stays within the list and the tokens.
TEST_F(AttentionWorkCudaTest, EndsThatAreNone) {
  for (const int num_sequences : {6, 40}) {
    std::vector<int32_t> ends;
    for (int s = 0; s <= num_sequences; ++s) ends.push_back(s % 2 == 0 ? -7 : 2000);
    const List list(testing::tensor_of_i32({std::ssize(ends)}, ends), 600, kTensorBlock);
    launch_list_sequences(list.sequences(), stream());
    gpu().device().synchronize();
    EXPECT_EQ(list.num_items(), std::min(list.capacity(), num_sequences / 2 * 5));
    for (const Item& item : list.items()) {
      EXPECT_GE(item.key_row, 0);
      EXPECT_LE(item.key_row + item.length, 600);
      EXPECT_LT(item.first, item.length);
    }
  }
}

TEST_F(AttentionWorkCudaTest, TheListBesideDelta) {
  for (const std::vector<int64_t>& lengths : various_lengths())
    check_beside_delta(lengths, 3, lengths.size() % 2 == 0 ? 64 : 40);
}

/// The tensor cores' kernels, by different launches.
class AttentionLaunchesCudaTest : public AttentionWorkCudaTest {
 protected:
  struct Shape {
    Heads heads;
    std::vector<int64_t> lengths;

    std::string to_string() const {
      return fmt::format("N={}/{} D={} window={} {} sequences of {} tokens", heads.num_heads,
                         heads.num_kv_heads, heads.head_size, heads.window, lengths.size(),
                         heads.num_rows);
    }
  };
  struct Memory {
    DeviceBuffer q, k, v, grad_o, lse, delta;
    List list;
  };
  using Bits = std::vector<std::vector<uint16_t>>;

  static Shape shape_of(int num_heads, int num_kv_heads, int size, std::vector<int64_t> lengths,
                        int window = 0) {
    const auto num_rows = total(lengths);
    return {.heads = {.num_heads = num_heads,
                      .num_kv_heads = num_kv_heads,
                      .head_size = size,
                      .head_size_v = size,
                      .window = window,
                      .num_rows = num_rows,
                      .scale = 0.125F},
            .lengths = std::move(lengths)};
  }

  Memory memory_of(const Shape& shape) {
    const Heads& heads = shape.heads;
    const auto rows = [&](int64_t num_heads, int64_t size, DType dtype) {
      return copy_of(random_tensor(dtype, {heads.num_rows, num_heads * size}, random_));
    };
    return {
        .q = rows(heads.num_heads, heads.head_size, DType::kBF16),
        .k = rows(heads.num_kv_heads, heads.head_size, DType::kBF16),
        .v = rows(heads.num_kv_heads, heads.head_size_v, DType::kBF16),
        .grad_o = rows(heads.num_heads, heads.head_size_v, DType::kBF16),
        .lse = rows(heads.num_heads, 1, DType::kF32),
        .delta = rows(heads.num_heads, 1, DType::kF32),
        .list = List(cumulative(shape.lengths), static_cast<int>(heads.num_rows), kTensorBlock)};
  }

  static TensorParams params_of(const Shape& shape, const Memory& memory) {
    const Heads& heads = shape.heads;
    const auto map = [&](const DeviceBuffer& rows, int64_t num_heads, int64_t size) {
      return make_heads_map({rows.as<void>(), heads.num_rows, num_heads, size}, kTensorBox);
    };
    const WorkList list = memory.list.sequences().list;
    return {.q = map(memory.q, heads.num_heads, heads.head_size),
            .k = map(memory.k, heads.num_kv_heads, heads.head_size),
            .v = map(memory.v, heads.num_kv_heads, heads.head_size_v),
            .grad_o = map(memory.grad_o, heads.num_heads, heads.head_size_v),
            .num_items = list.num_items,
            .items = list.items,
            .max_items = list.capacity,
            .num_sms = context().num_sms(),
            .heads = heads,
            .delta = memory.delta.as<float>(),
            .lse = memory.lse.as<float>(),
            .pairs = {.num_kv_heads = heads.num_kv_heads}};
  }

  static Bits run(TensorParams params, bool by_one) {
    const Heads& heads = params.heads;
    const int64_t of_head = heads.num_rows * heads.head_size;
    const DeviceBuffer grad_q = buffer_of<uint16_t>(of_head * heads.num_heads);
    const DeviceBuffer grad_k = buffer_of<uint16_t>(of_head * heads.num_kv_heads);
    const DeviceBuffer grad_v = buffer_of<uint16_t>(of_head * heads.num_kv_heads);
    params.grad_q = grad_q.as<void>();
    params.grad_k = grad_k.as<void>();
    params.grad_v = grad_v.as<void>();
    if (by_one) {
      launch_tensor_gradients(params, stream());
    } else {
      launch_tensor_key_grads(params, stream());
      launch_tensor_query_grad(params, stream());
    }
    gpu().device().synchronize();
    return {read<uint16_t>(grad_q), read<uint16_t>(grad_k), read<uint16_t>(grad_v)};
  }

  /// Those of keys and values as a ring of one rank computes them, in F32, rounded here.
  static Bits run_ring_of_one(TensorParams params) {
    const Heads& heads = params.heads;
    const auto tokens = static_cast<int>(heads.num_rows);
    const int64_t num_values = heads.num_rows * heads.num_kv_heads * heads.head_size;
    const DeviceBuffer grad_k = buffer_of<float>(num_values);
    const DeviceBuffer grad_v = buffer_of<float>(num_values);
    params.ring = {
        .num_runs = 1, .chunk = tokens, .row_length = tokens, .num_rows = 1, .rank = 0, .ring = 1};
    params.grad_k = grad_k.as<void>();
    params.grad_v = grad_v.as<void>();
    launch_tensor_key_grads(params, stream());
    gpu().device().synchronize();
    return {rounded(read<float>(grad_k)), rounded(read<float>(grad_v))};
  }
  static std::vector<uint16_t> rounded(const std::vector<float>& values) {
    std::vector<uint16_t> bits;
    bits.reserve(values.size());
    for (const float value : values) bits.push_back(Bf16(value).bits);
    return bits;
  }

  /// Sums whose stages overlap, and those that have one after the other.
  void check_stages(const Shape& shape) {
    SCOPED_TRACE(shape.to_string());
    const Memory memory = memory_of(shape);
    launch_list_sequences(memory.list.sequences(), stream());
    const TensorParams params = params_of(shape, memory);
    const Bits bits = run(params, false);
    EXPECT_EQ((Bits{bits[1], bits[2]}), run_ring_of_one(params));
  }

  /// o and lse.
  static Bits run_forward(TensorParams params) {
    const Heads& heads = params.heads;
    const int64_t num_rows = heads.num_rows * heads.num_heads;
    const DeviceBuffer o = buffer_of<uint16_t>(num_rows * heads.head_size_v);
    const DeviceBuffer lse = buffer_of<float>(num_rows);
    params.o = o.as<void>();
    params.lse = lse.as<float>();
    launch_tensor_forward(params, stream());
    gpu().device().synchronize();
    return {read<uint16_t>(o), read<uint16_t>(lse)};
  }

  void check_forward(const Shape& shape) {
    SCOPED_TRACE(shape.to_string());
    const Memory memory = memory_of(shape);
    const SequenceList sequences = memory.list.sequences();
    ASSERT_TRUE(tensor_forward_lists(sequences));
    launch_list_sequences(sequences, stream());
    TensorParams params = params_of(shape, memory);
    const Bits expected = run_forward(params);
    params.to_list = sequences;
    params.num_items = nullptr;
    params.items = nullptr;
    EXPECT_EQ(run_forward(params), expected);
    params.num_sms = 3;  // blocks take several tasks
    EXPECT_EQ(run_forward(params), expected);
  }

  void check_same(const Shape& shape) {
    SCOPED_TRACE(shape.to_string());
    const Memory memory = memory_of(shape);
    launch_list_sequences(memory.list.sequences(), stream());
    TensorParams params = params_of(shape, memory);
    ASSERT_TRUE(tensor_gradients_share(params));
    const Bits expected = run(params, false);
    EXPECT_EQ(run(params, true), expected);
    params.num_sms = 2 * params.max_items * shape.heads.num_kv_heads;  // as few as may be
    ASSERT_TRUE(tensor_gradients_share(params));
    EXPECT_EQ(run(params, true), expected);
  }
};

TEST_F(AttentionLaunchesCudaTest, TinyGradientsByOneLaunch) {
  check_same(shape_of(2, 1, 64, {130, 0, 1}));
}

TEST_F(AttentionLaunchesCudaTest, OneLaunchGivesTheBitsOfTwo) {
  check_same(shape_of(6, 2, 64, std::vector<int64_t>(8, 256)));
  check_same(shape_of(6, 2, 64, {130, 0, 1, 300, 64}));
  check_same(shape_of(32, 1, 64, {300, 140, 1}));
  check_same(shape_of(4, 4, 40, {1, 0, 129}));
  check_same(shape_of(4, 2, 64, {400, 1, 33}, 100));
  check_same(shape_of(2, 1, 8, {2000}));
  check_same(shape_of(3, 1, 64, {1}));
}

TEST_F(AttentionLaunchesCudaTest, StagesThatOverlapKeepTheOrderOfTheSums) {
  check_stages(shape_of(6, 2, 64, std::vector<int64_t>(8, 256)));
  check_stages(shape_of(6, 2, 64, {130, 0, 1, 300, 64}));
  check_stages(shape_of(4, 4, 40, {1, 0, 129, 63, 65}));
  check_stages(shape_of(4, 2, 64, {400, 1, 33}, 1));
  check_stages(shape_of(4, 2, 64, {400, 1, 33}, 100));
  check_stages(shape_of(8, 1, 64, {2000}));
}

TEST_F(AttentionLaunchesCudaTest, TinyForwardWithItsOwnList) {
  check_forward(shape_of(2, 1, 64, {130, 0, 1}));
}

TEST_F(AttentionLaunchesCudaTest, TheForwardsOwnListGivesTheSameBits) {
  check_forward(shape_of(6, 2, 64, std::vector<int64_t>(8, 256)));
  check_forward(shape_of(4, 2, 128, {130, 0, 1, 300, 64}, 100));
  check_forward(shape_of(2, 1, 40, std::vector<int64_t>(32, 77)));
  check_forward(shape_of(2, 2, 64, {64 * 128}));
  check_forward(shape_of(1, 1, 64, {0, 1, 0}));
}

TEST_F(AttentionLaunchesCudaTest, LongListsAreNotTheForwards) {
  const auto lists = [](const std::vector<int64_t>& lengths) {
    return tensor_forward_lists(
        List(cumulative(lengths), total(lengths), kTensorBlock).sequences());
  };
  EXPECT_FALSE(lists({64 * 128 + 1}));
  EXPECT_FALSE(lists(std::vector<int64_t>(33, 1)));
  EXPECT_TRUE(lists(std::vector<int64_t>(32, 1)));
}

TEST_F(AttentionLaunchesCudaTest, TwoLaunchesWhereKeysFillTheGpu) {
  const Shape large = shape_of(8, 8, 64, {4096});
  const Memory memory = memory_of(large);
  EXPECT_FALSE(tensor_gradients_share(params_of(large, memory)));
  const Shape wide = shape_of(2, 1, 128, {200});
  const Memory wide_memory = memory_of(wide);
  EXPECT_FALSE(tensor_gradients_share(params_of(wide, wide_memory)));
}

}  // namespace
}  // namespace tessera::cuda::attention
