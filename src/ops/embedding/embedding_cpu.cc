#include <omp.h>

#include <algorithm>
#include <cstring>

#include "ops/cpu_dispatch.h"
#include "ops/embedding/embedding.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

void check_ids(std::span<const int32_t> tokens, int64_t vocab_size) {
  const auto bad =
      std::ranges::find_if(tokens, [=](int32_t id) { return id < 0 || id >= vocab_size; });
  if (bad == tokens.end()) return;
  user_error(
      "token id {} at position {} is outside the vocabulary of {}; was the text tokenized "
      "with another tokenizer?",
      *bad, bad - tokens.begin(), vocab_size);
}

/// The part of the vocabulary that a table holds.
class LocalRows {
 public:
  /// Throws UserError for an id outside the whole vocabulary.
  LocalRows(const EmbeddingSpec& spec, int64_t num_rows, std::span<const int32_t> tokens)
      : first_(spec.first_row), count_(num_rows) {
    check_ids(tokens, spec.vocab_size == 0 ? num_rows : spec.vocab_size);
  }
  /// The table's row for a token, -1 where another table has it.
  int64_t row_of(int32_t token) const {
    const int64_t row = token - first_;
    return row >= 0 && row < count_ ? row : -1;
  }

 private:
  int64_t first_;
  int64_t count_;
};

void embed(const Embedding& op, const Args<Embedding>& args) {
  const std::span<const int32_t> tokens = args.in(Embedding::kTokens).span<int32_t>();
  const Tensor& table = args.in(Embedding::kTable);
  const LocalRows rows(op.spec(), table.shape[0], tokens);
  const size_t row_bytes = table.shape[1] * dtype_size(table.dtype);
  const auto* from = static_cast<const std::byte*>(table.data);
  auto* to = static_cast<std::byte*>(args.out(Embedding::kRows).data);
#pragma omp parallel for schedule(static)
  for (size_t t = 0; t < tokens.size(); ++t) {
    const int64_t row = rows.row_of(tokens[t]);
    if (row < 0) {
      std::memset(to + t * row_bytes, 0, row_bytes);
    } else {
      std::memcpy(to + t * row_bytes, from + row * row_bytes, row_bytes);
    }
  }
}

/// Each thread owns a range of columns and walks all tokens in order, so that repeated tokens are
/// summed in the same order by any number of threads.
template <typename T>
void add_gradients(std::span<const int32_t> tokens, const LocalRows& rows, int64_t padding_token,
                   const T* grad_TH, int64_t hidden, float* accumulator_VH) {
  constexpr int64_t kMinCols = 32;
  /// Rows of the accumulator lie anywhere in memory: they are fetched this many tokens ahead.
  constexpr size_t kAhead = 8;
  const int64_t slices =
      std::clamp<int64_t>(omp_get_max_threads(), 1, std::max<int64_t>(hidden / kMinCols, 1));
  const int64_t width =
      ((hidden + slices - 1) / slices + simd::kLanes - 1) / simd::kLanes * simd::kLanes;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t begin = 0; begin < hidden; begin += width) {
    const int64_t cols = std::min(width, hidden - begin);
    for (size_t t = 0; t < tokens.size(); ++t) {
      if (t + kAhead < tokens.size()) {
        __builtin_prefetch(
            accumulator_VH + std::max<int64_t>(rows.row_of(tokens[t + kAhead]), 0) * hidden + begin,
            1);
      }
      const int64_t row = rows.row_of(tokens[t]);
      if (row < 0 || tokens[t] == padding_token) continue;
      const T* grad = grad_TH + static_cast<int64_t>(t) * hidden + begin;
      float* sum = accumulator_VH + row * hidden + begin;
      simd::for_each_vector(cols, [=](int64_t i, auto lanes) {
        simd::store(sum + i, simd::load(sum + i, lanes) + simd::load(grad + i, lanes), lanes);
      });
    }
  }
}

void embed_backward(const EmbeddingBackward& op, const Args<EmbeddingBackward>& args) {
  using Op = EmbeddingBackward;
  const Tensor& accumulator = args.out(Op::kGradTable);
  if (!accumulator) return;
  const std::span<const int32_t> tokens = args.in(Op::kTokens).span<int32_t>();
  const EmbeddingSpec& spec = op.spec();
  const LocalRows rows(spec, accumulator.shape[0], tokens);
  const Tensor& grad = args.in(Op::kGrad);
  with_storage(grad.dtype, [&](auto storage) {
    using T = decltype(storage);
    add_gradients(tokens, rows, spec.padding_token, grad.as<T>(), grad.shape[1],
                  accumulator.as<float>());
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_embedding_cpu, table) {
  add_kernel<Embedding>(table, embed);
  add_kernel<EmbeddingBackward>(table, embed_backward);
}

}  // namespace tessera
