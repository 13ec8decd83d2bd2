#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/sparse_attention/sparse_attention.h"
#include "ops/storage.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using simd::Vec;

/// Rows whose products with one other are computed together, so that this is loaded once for all.
constexpr int kRowsAtOnce = 4;

/// The rows chosen for a token, without the -1 behind them.
std::span<const int32_t> chosen_rows(const Operator& op, const Tensor& chosen, int64_t token,
                                     int64_t num_rows) {
  const int64_t width = chosen.shape[1];
  const int32_t* begin = chosen.as<int32_t>() + token * width;
  int64_t count = 0;
  while (count < width && begin[count] >= 0) {
    check_shape(op, begin[count] < num_rows, "row {} is chosen of {}", begin[count], num_rows);
    ++count;
  }
  return {begin, static_cast<size_t>(count)};
}

/// One head's rows of a tensor [R, heads · size].
template <typename T>
struct HeadRows {
  T* data;
  int64_t stride;
  int64_t size;

  T* row(int64_t idx) const { return data + idx * stride; }
};

template <typename T>
HeadRows<T> head_rows(const Tensor& tensor, int64_t head, int64_t size) {
  return {tensor.as<T>() + head * size, tensor.shape[1], size};
}

template <int kCount, typename T>
void multiply_some(const T* x, const HeadRows<T>& y, const int32_t* rows, float* products) {
  Vec sums[kCount] = {};
  const T* own[kCount];
  for (int i = 0; i < kCount; ++i) own[i] = y.row(rows[i]);
  simd::for_each_vector(y.size, [&](int64_t c, auto lanes) {
    const Vec from = simd::load(x + c, lanes);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) sums[i] += from * simd::load(own[i] + c, lanes);
  });
  for (int i = 0; i < kCount; ++i) products[i] = simd::sum(sums[i]);
}

/// products[i] = x · y[rows[i]].
template <typename T>
void multiply_rows(const T* x, const HeadRows<T>& y, std::span<const int32_t> rows,
                   float* products) {
  const int64_t count = std::ssize(rows);
  int64_t i = 0;
  for (; i + kRowsAtOnce <= count; i += kRowsAtOnce)
    multiply_some<kRowsAtOnce>(x, y, rows.data() + i, products + i);
  for (; i < count; ++i) multiply_some<1>(x, y, rows.data() + i, products + i);
}

/// sum[c] += factor · x[c].
template <typename T>
void add_row(float* sum, float factor, const T* x, int64_t size) {
  simd::for_each_vector(size, [=](int64_t c, auto lanes) {
    simd::store(sum + c, simd::load(sum + c, lanes) + factor * simd::load(x + c, lanes), lanes);
  });
}

/// Scores become exp(scale · score - shift), of which the sum is given back.
float exponentiate(float* scores, int64_t count, float scale, float shift) {
  float sum = 0;
  simd::for_each_vector(count, [&](int64_t i, auto lanes) {
    simd::store(scores + i, simd::exp(simd::load(scores + i, lanes) * scale - shift), lanes);
  });
  for (int64_t i = 0; i < count; ++i) sum += scores[i];
  return sum;
}

/// Threads that have scratch memory.
int threads_with(std::span<const std::byte> workspace, int64_t bytes) {
  const int64_t fitting = std::ssize(workspace) / bytes;
  ensure(fitting >= 1, "sparse_attention: {} bytes of scratch memory, {} needed by a thread",
         workspace.size(), bytes);
  return static_cast<int>(std::min<int64_t>(fitting, omp_get_max_threads()));
}

/// One thread's memory of the forward pass.
struct ForwardLayout {
  ForwardLayout(const AttentionSpec& spec, int64_t most)
      : probs(layout.add<float>(most)), o(layout.add<float>(spec.head_size_v)) {}

  WorkspaceLayout layout;
  int64_t probs;  ///< [K]
  int64_t o;      ///< [Dv]
};

/// One head of one token.
template <typename T>
void attend(const SparseAttention& op, const KernelArgs& args, int64_t token, int64_t head,
            std::byte* scratch) {
  using Op = SparseAttention;
  const AttentionSpec& spec = op.spec();
  const ForwardLayout at(spec, args.in(Op::kChosen).shape[1]);
  auto* probs = reinterpret_cast<float*>(scratch + at.probs);
  auto* sums = reinterpret_cast<float*>(scratch + at.o);
  const Tensor& k = args.in(Op::kK);
  const auto rows = chosen_rows(op, args.in(Op::kChosen), token, k.shape[0]);
  const auto count = std::ssize(rows);
  const int64_t kv_head = head / op.group_size();
  const T* q = head_rows<T>(args.in(Op::kQ), head, spec.head_size).row(token);
  const auto values = head_rows<T>(args.in(Op::kV), kv_head, spec.head_size_v);
  multiply_rows(q, head_rows<T>(k, kv_head, spec.head_size), rows, probs);
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; ++i) max = std::max(max, probs[i]);
  const auto scale = static_cast<float>(spec.scale);
  const float sum = exponentiate(probs, count, scale, max * scale);
  std::fill_n(sums, spec.head_size_v, 0.0F);
  for (int64_t i = 0; i < count; ++i) add_row(sums, probs[i], values.row(rows[i]), values.size);
  const float factor = count > 0 ? 1.0F / sum : 0.0F;
  T* o = head_rows<T>(args.out(attention::kO), head, spec.head_size_v).row(token);
  simd::for_each_vector(spec.head_size_v, [=](int64_t c, auto lanes) {
    simd::store(o + c, simd::load(sums + c, lanes) * factor, lanes);
  });
  const Tensor& lse = args.out(attention::kLse);
  lse.as<float>()[head * lse.shape[1] + token] = count > 0 ? max * scale + std::log(sum) : 0.0F;
}

void sparse_attention(const SparseAttention& op, const KernelArgs& args) {
  using Op = SparseAttention;
  const Tensor& q = args.in(Op::kQ);
  const int64_t heads = op.spec().num_heads;
  const int64_t bytes = ForwardLayout(op.spec(), args.in(Op::kChosen).shape[1]).layout.num_bytes();
  [[maybe_unused]] const int threads = threads_with(args.workspace, bytes);
  for (int64_t token = 0; token < q.shape[0]; ++token)
    chosen_rows(op, args.in(Op::kChosen), token, args.in(Op::kK).shape[0]);
  with_storage(q.dtype, [&](auto storage) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t item = 0; item < q.shape[0] * heads; ++item) {
      attend<decltype(storage)>(op, args, item / heads, item % heads,
                                args.workspace.data() + bytes * omp_get_thread_num());
    }
  });
}

/// One thread's memory of the backward pass: sums of one key-value head's gradients.
struct BackwardLayout {
  BackwardLayout(const AttentionSpec& spec, int64_t num_rows, int64_t most)
      : keys(layout.add<float>(num_rows * spec.head_size)),
        values(layout.add<float>(num_rows * spec.head_size_v)),
        query(layout.add<float>(spec.head_size)),
        probs(layout.add<float>(most)),
        grad_probs(layout.add<float>(most)) {}

  WorkspaceLayout layout;
  int64_t keys;        ///< [R, D]
  int64_t values;      ///< [R, Dv]
  int64_t query;       ///< [D]
  int64_t probs;       ///< [K]
  int64_t grad_probs;  ///< [K]
};

/// Gradients through one key-value head, by one thread, token after token.
template <typename T>
class BackwardWorker {
 public:
  using Op = SparseAttentionBackward;

  BackwardWorker(const Op& op, const KernelArgs& args, std::byte* scratch)
      : op_(op),
        spec_(op.spec()),
        args_(args),
        num_tokens_(args.in(Op::kQ).shape[0]),
        num_rows_(args.in(Op::kK).shape[0]),
        scale_(static_cast<float>(spec_.scale)) {
    const BackwardLayout at(spec_, num_rows_, args.in(Op::kChosen).shape[1]);
    const auto part = [&](int64_t offset) { return reinterpret_cast<float*>(scratch + offset); };
    key_sums_ = part(at.keys);
    value_sums_ = part(at.values);
    query_sum_ = part(at.query);
    probs_ = part(at.probs);
    grad_probs_ = part(at.grad_probs);
  }

  void run(int64_t kv_head) {
    std::fill_n(key_sums_, num_rows_ * spec_.head_size, 0.0F);
    std::fill_n(value_sums_, num_rows_ * spec_.head_size_v, 0.0F);
    for (int64_t token = 0; token < num_tokens_; ++token) {
      const auto rows = chosen_rows(op_, args_.in(Op::kChosen), token, num_rows_);
      for (int64_t i = 0; i < op_.group_size(); ++i)
        add_query(token, kv_head * op_.group_size() + i, kv_head, rows);
    }
    store(args_.out(attention::kGradK), kv_head, spec_.head_size, key_sums_);
    store(args_.out(attention::kGradV), kv_head, spec_.head_size_v, value_sums_);
  }

 private:
  HeadRows<T> rows_of(int input, int64_t head, int64_t size) const {
    return head_rows<T>(args_.in(input), head, size);
  }

  /// What o's and lse's gradients have in common for all rows: delta = o · grad_o - grad_lse.
  float find_delta(int64_t token, int64_t head) const {
    const T* o = rows_of(Op::kSavedO, head, spec_.head_size_v).row(token);
    const T* grad = rows_of(Op::kGradO, head, spec_.head_size_v).row(token);
    Vec sum{};
    simd::for_each_vector(spec_.head_size_v, [&](int64_t c, auto lanes) {
      sum += simd::load(o + c, lanes) * simd::load(grad + c, lanes);
    });
    const bool has_grad_lse = std::ssize(args_.inputs) > Op::kGradLse;
    return simd::sum(sum) -
           (has_grad_lse ? args_.in(Op::kGradLse).as<float>()[head * num_tokens_ + token] : 0.0F);
  }

  void add_query(int64_t token, int64_t head, int64_t kv_head, std::span<const int32_t> rows) {
    const auto keys = rows_of(Op::kK, kv_head, spec_.head_size);
    const T* q = rows_of(Op::kQ, head, spec_.head_size).row(token);
    const T* grad_o = rows_of(Op::kGradO, head, spec_.head_size_v).row(token);
    multiply_rows(q, keys, rows, probs_);
    exponentiate(probs_, std::ssize(rows), scale_,
                 args_.in(Op::kSavedLse).as<float>()[head * num_tokens_ + token]);
    multiply_rows(grad_o, rows_of(Op::kV, kv_head, spec_.head_size_v), rows, grad_probs_);
    const float delta = find_delta(token, head);
    std::fill_n(query_sum_, spec_.head_size, 0.0F);
    for (int64_t i = 0; i < std::ssize(rows); ++i) {
      const float grad_score = probs_[i] * (grad_probs_[i] - delta) * scale_;
      add_row(query_sum_, grad_score, keys.row(rows[i]), spec_.head_size);
      add_row(key_sums_ + rows[i] * spec_.head_size, grad_score, q, spec_.head_size);
      add_row(value_sums_ + rows[i] * spec_.head_size_v, probs_[i], grad_o, spec_.head_size_v);
    }
    simd::convert(head_rows<T>(args_.out(attention::kGradQ), head, spec_.head_size).row(token),
                  query_sum_, spec_.head_size);
  }

  void store(const Tensor& to, int64_t kv_head, int64_t size, const float* sums) const {
    const auto rows = head_rows<T>(to, kv_head, size);
    for (int64_t row = 0; row < num_rows_; ++row)
      simd::convert(rows.row(row), sums + row * size, size);
  }

  const Op& op_;
  AttentionSpec spec_;
  const KernelArgs& args_;
  int64_t num_tokens_;
  int64_t num_rows_;
  float scale_;
  float* key_sums_;
  float* value_sums_;
  float* query_sum_;
  float* probs_;
  float* grad_probs_;
};

void sparse_attention_backward(const SparseAttentionBackward& op, const KernelArgs& args) {
  using Op = SparseAttentionBackward;
  const int64_t num_tokens = args.in(Op::kQ).shape[0];
  const int64_t num_rows = args.in(Op::kK).shape[0];
  const int64_t bytes =
      BackwardLayout(op.spec(), num_rows, args.in(Op::kChosen).shape[1]).layout.num_bytes();
  [[maybe_unused]] const int threads = threads_with(args.workspace, bytes);
  for (int64_t token = 0; token < num_tokens; ++token)
    chosen_rows(op, args.in(Op::kChosen), token, num_rows);
  with_storage(args.in(Op::kQ).dtype, [&](auto storage) {
#pragma omp parallel num_threads(threads)
    {
      BackwardWorker<decltype(storage)> worker(
          op, args, args.workspace.data() + bytes * omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
      for (int64_t head = 0; head < op.spec().num_kv_heads; ++head) worker.run(head);
    }
  });
}

int64_t forward_workspace(const SparseAttention& op, std::span<const ValueType> inputs) {
  const int64_t most = inputs[SparseAttention::kChosen].shape[1];
  return omp_get_max_threads() * ForwardLayout(op.spec(), most).layout.num_bytes();
}

/// Threads beyond the key-value heads have no work.
int64_t backward_workspace(const SparseAttentionBackward& op, std::span<const ValueType> inputs) {
  using Op = SparseAttentionBackward;
  const BackwardLayout one(op.spec(), inputs[Op::kK].shape[0], inputs[Op::kChosen].shape[1]);
  return std::min<int64_t>(omp_get_max_threads(), op.spec().num_kv_heads) * one.layout.num_bytes();
}

}  // namespace

TESSERA_CPU_KERNELS(add_sparse_attention_cpu, table) {
  add_kernel<SparseAttention>(table, sparse_attention, {.workspace = forward_workspace});
  add_kernel<SparseAttentionBackward>(table, sparse_attention_backward,
                                      {.workspace = backward_workspace});
}

}  // namespace tessera
