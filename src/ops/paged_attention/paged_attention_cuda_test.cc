#include "ops/paged_attention/paged_attention.h"

#include <numeric>

#include "ops/testing/gpu_kernel.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"

namespace tessera {
namespace {

using testing::copy_to;
using testing::copy_to_host;
using testing::OperatorInputs;

/// A sequence of `length` tokens, of which the last `count` are new.
struct Piece {
  int32_t length;
  int32_t count;
};

/// Sequences with pages of their own, in falling order.
struct Batch {
  std::vector<int32_t> bounds = {0};
  std::vector<int32_t> lengths;
  std::vector<int32_t> table;
  int32_t num_pages = 1;  // page 0 belongs to nobody
  int64_t width;

  Batch(const std::vector<Piece>& pieces, int64_t table_width) : width(table_width) {
    for (const Piece& piece : pieces) num_pages += static_cast<int32_t>(pages_of(piece.length));
    int32_t next = num_pages - 1;
    for (const Piece& piece : pieces) {
      bounds.push_back(bounds.back() + piece.count);
      lengths.push_back(piece.length);
      for (int64_t page = 0; page < pages_of(piece.length); ++page) table.push_back(next--);
      table.resize(lengths.size() * static_cast<size_t>(width), -7);  // nobody reads these
    }
  }
  int64_t num_sequences() const { return std::ssize(lengths); }
};

const std::vector<Piece> kPieces = {{1, 1},   {127, 1},   {0, 0},     {128, 5},
                                    {300, 1}, {129, 129}, {1300, 40}, {5, 0}};

class PagedAttentionCuda : public testing::GpuTest {
 protected:
  void check(const AttentionSpec& spec, const std::vector<Piece>& pieces, int64_t padding,
             int64_t width, bool once = false) const {
    const Batch batch(pieces, width);
    const OperatorPtr op = make_paged_attention(spec);
    const AttentionSpec& full = static_cast<const PagedAttention&>(*op).spec();
    SCOPED_TRACE(fmt::format("N={}/{} D={}/{} window {}", full.num_heads, full.num_kv_heads,
                             full.head_size, full.head_size_v, full.window));
    const int64_t tokens = batch.bounds.back() + padding;
    const int64_t sequences = batch.num_sequences();
    const auto inputs = [&](DType dtype) -> OperatorInputs {
      const int64_t rows = batch.num_pages * kPageTokens;
      return {{"q", "keys", "values", "cu_seqlens", "lengths", "page_table"},
              {{dtype, {tokens, full.num_heads * full.head_size}},
               {dtype, {rows, full.num_kv_heads * full.head_size}},
               {dtype, {rows, full.num_kv_heads * full.head_size_v}},
               {DType::kI32, {sequences + 1}},
               {DType::kI32, {sequences}},
               {DType::kI32, {sequences, width}}}};
    };
    const OwnedTensor bounds = testing::tensor_of_i32({sequences + 1}, batch.bounds);
    const OwnedTensor lengths = testing::tensor_of_i32({sequences}, batch.lengths);
    const OwnedTensor table = testing::tensor_of_i32({sequences, width}, batch.table);
    testing::GpuCheck how;
    how.values = {{"cu_seqlens", bounds}, {"lengths", lengths}, {"page_table", table}};
    how.tolerance_bf16 = 1e-2;  // a CPU with BF16 products rounds the probabilities
    how.once = once;
    check_operator_on_gpu(op, inputs, {}, cpu(), gpu(), how);
  }
};

AttentionSpec heads(int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t head_size_v,
                    int64_t window = 0) {
  return {.num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_size = head_size,
          .head_size_v = head_size_v,
          .window = window};
}

TEST_F(PagedAttentionCuda, SequencesOfAnyLength) {
  check(heads(4, 2, 16, 16), kPieces, 0, 11);
  check(heads(32, 4, 128, 128), kPieces, 2, 12);
  check(heads(6, 2, 24, 40, 50), kPieces, 3, 11);
  check(heads(2, 2, 33, 17, 130), kPieces, 1, 20);
}

TEST_F(PagedAttentionCuda, HeadsOfAnyNumberAndSize) {
  check(heads(20, 1, 64, 64), kPieces, 0, 11);  // more than a block takes
  check(heads(9, 3, 1, 1), kPieces, 0, 11);
  check(heads(2, 2, 192, 128), kPieces, 0, 11);
  check(heads(16, 1, 576, 512), kPieces, 0, 11);
  check(heads(2, 1, 640, 300), kPieces, 0, 11);
}

TEST_F(PagedAttentionCuda, ManyRunsOfKeys) {
  check(heads(4, 1, 32, 32), {{9000, 1}, {3, 1}, {8300, 3}}, 0, 75);
  check(heads(4, 1, 32, 32, 1000), {{9000, 2}, {700, 1}}, 0, 75);
}

/// Pieces of four tokens and more, beside tokens alone, for the kernel of prompts.
TEST_F(PagedAttentionCuda, PromptsOfAnyLength) {
  const std::vector<Piece> pieces = {{1, 1},   {3, 3},    {4, 4},     {64, 64}, {200, 1}, {65, 65},
                                     {130, 5}, {300, 33}, {257, 257}, {0, 0},   {700, 70}};
  check(heads(16, 2, 128, 128), pieces, 3, 6);
  check(heads(6, 2, 128, 128, 70), pieces, 0, 7);
  check(heads(4, 4, 64, 64), pieces, 1, 6);
  check(heads(20, 1, 64, 64, 9), pieces, 0, 40);
  check(heads(32, 4, 128, 128), {{1500, 1500}}, 0, 12);
}

/// Chunks of fewer tokens than a page, of whole pages, and of more.
TEST_F(PagedAttentionCuda, ChunksOfSequences) {
  AttentionSpec spec = heads(4, 2, 64, 64);
  for (const int64_t chunk : {1, 9, 100, 128, 200, 2000}) {
    spec.chunk = chunk;
    check(spec, kPieces, 2, 11);
    check(spec, {{64, 64}, {300, 33}, {257, 257}, {1, 1}}, 1, 6);
  }
}

TEST_F(PagedAttentionCuda, PromptsOfManySequences) {
  std::vector<Piece> pieces;
  for (int i = 0; i < 300; ++i) pieces.push_back({i % 7 + i % 50, i % 7});
  check(heads(4, 2, 64, 64), pieces, 5, 1);
}

TEST_F(PagedAttentionCuda, TinyPrompts) {
  check(heads(4, 2, 64, 64), {{70, 9}, {3, 2}, {5, 5}}, 1, 1, true);
}

TEST_F(PagedAttentionCuda, NoSequencesGiveZeros) {
  check(heads(2, 1, 8, 8), {}, 4, 3);
  check(heads(2, 1, 8, 8), {{0, 0}}, 2, 1);
}

TEST_F(PagedAttentionCuda, TinySequences) {
  check(heads(3, 1, 24, 16), {{130, 1}, {3, 2}}, 1, 2, true);
}

TEST_F(PagedAttentionCuda, RefusesHeadsThatAreTooLarge) {
  EXPECT_THROW(check(heads(1, 1, 641, 8), {{1, 1}}, 0, 1), UserError);
  EXPECT_THROW(check(heads(1, 1, 8, 513), {{1, 1}}, 0, 1), UserError);
}

class PageWriteCuda : public testing::GpuTest {
 protected:
  static OwnedTensor write(const Backend& backend, const Tensor& cache, const Tensor& rows,
                           const std::vector<int32_t>& to) {
    const OwnedTensor own_cache = copy_to(backend, cache);
    const OwnedTensor own_rows = copy_to(backend, rows);
    const OwnedTensor own_to =
        copy_to(backend, testing::tensor_of_i32({static_cast<int64_t>(to.size())}, to));
    const Tensor inputs[] = {own_rows, own_to};
    const Tensor outputs[] = {own_cache};
    testing::run_kernel(*make_page_write(cache.shape[0]), backend, inputs, outputs);
    return copy_to_host(backend, own_cache);
  }
  void check(int64_t capacity, const std::vector<int32_t>& to) const {
    Random random(1, 1);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t width : {1, 5, 8, 72, 1024}) {
        SCOPED_TRACE(fmt::format("{} rows of {} {}", to.size(), width, dtype_name(dtype)));
        const OwnedTensor cache = testing::random_tensor(dtype, {capacity, width}, random);
        const OwnedTensor rows =
            testing::random_tensor(dtype, {static_cast<int64_t>(to.size()), width}, random);
        testing::expect_bitwise_equal(write(gpu(), cache, rows, to), write(cpu(), cache, rows, to),
                                      "the cache");
      }
    }
  }
};

TEST_F(PageWriteCuda, WritesItsRowsAndNoOthers) {
  check(9, {8, -1, 0, 5});
  check(9, {});
  check(9, {-1, -1});
  std::vector<int32_t> all(300);
  std::iota(all.rbegin(), all.rend(), 0);
  check(300, all);
}

TEST_F(PageWriteCuda, TinyPage) {
  check(4, {3, -1, 0});
}

}  // namespace
}  // namespace tessera
