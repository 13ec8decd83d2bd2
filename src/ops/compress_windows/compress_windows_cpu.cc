#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/compress_windows/compress_windows.h"
#include "ops/cpu_dispatch.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

using simd::Vec;

/// Neighbouring elements of entries that a thread takes, of all windows one after another, so that
/// sums over the windows have one order.
constexpr int64_t kChannels = 64;

/// The tokens of which entries are made.
template <typename T>
struct WindowRows {
  template <typename Op>
  WindowRows(const CompressSpec& own_spec, const Args<Op>& args)
      : spec(own_spec),
        num_tokens(args.in(Op::kKv).shape[0]),
        width(args.in(Op::kKv).shape[1]),
        kv(args.in(Op::kKv).template as<T>()),
        gate(args.in(Op::kGate).template as<T>()),
        bias(args.in(Op::kBias).template as<float>()),
        positions(args.in(Op::kPositions).template as<int32_t>()) {}

  int64_t size() const { return width / spec.parts(); }

  /// Calls visit(token) for the last token of each window.
  template <typename Visit>
  void for_each_window(const Visit& visit) const {
    for (int64_t token = 0; token < num_tokens; ++token) {
      if (positions[token] % spec.rate == spec.rate - 1) visit(token);
    }
  }

  /// The row of the entry of the window that ends with a token.
  int64_t entry_row(int64_t last) const {
    return (last - positions[last]) / spec.rate + positions[last] / spec.rate;
  }

  /// Calls visit(row of kv and gate, row of the bias, first element) for each term of the sums of
  /// the window that ends with a token.
  template <typename Visit>
  void for_each_term(int64_t last, const Visit& visit) const {
    const int64_t first = last - spec.rate + 1;
    if (spec.overlaps && positions[last] >= spec.rate) {
      for (int64_t j = 0; j < spec.rate; ++j) visit(first - spec.rate + j, j, 0);
    }
    for (int64_t j = 0; j < spec.rate; ++j) visit(first + j, j, width - size());
  }

  CompressSpec spec;
  int64_t num_tokens;
  int64_t width;
  const T* kv;
  const T* gate;
  const float* bias;
  const int32_t* positions;
};

/// Sums of a vector of a window's elements: exponentials over exp(max), and these times kv.
struct WindowSums {
  Vec max;
  Vec weights;
  Vec values;
};

template <typename T, typename Lanes>
WindowSums sum_window(const WindowRows<T>& rows, int64_t last, int64_t c, Lanes lanes) {
  WindowSums sums{simd::broadcast(-std::numeric_limits<float>::infinity()), {}, {}};
  const auto logit = [&](int64_t row, int64_t slot, int64_t at) {
    return simd::load(rows.gate + row * rows.width + at, lanes) +
           simd::load(rows.bias + slot * rows.width + at, lanes);
  };
  rows.for_each_term(last, [&](int64_t row, int64_t slot, int64_t first) {
    sums.max = simd::max(sums.max, logit(row, slot, first + c));
  });
  rows.for_each_term(last, [&](int64_t row, int64_t slot, int64_t first) {
    const Vec weight = simd::exp(logit(row, slot, first + c) - sums.max);
    sums.weights += weight;
    sums.values += weight * simd::load(rows.kv + row * rows.width + first + c, lanes);
  });
  return sums;
}

void check_window_positions(const Operator& op, std::span<const int32_t> positions) {
  for (int64_t token = 0; token < std::ssize(positions); ++token) {
    check_shape(op, positions[token] >= 0 && positions[token] <= token,
                "token {} has position {}; sequences begin with position 0", token,
                positions[token]);
  }
}

/// Calls run(first, count) for parts of the elements of entries, on all threads.
template <typename Run>
void for_channels(int64_t size, const Run& run) {
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < size; first += kChannels)
    run(first, std::min(kChannels, size - first));
}

void clear(const Tensor& tensor) {
  if (tensor.num_bytes() > 0) std::memset(tensor.data, 0, tensor.num_bytes());
}

void compress_windows(const CompressWindows& op, const Args<CompressWindows>& args) {
  using Op = CompressWindows;
  check_window_positions(op, args.in(Op::kPositions).span<int32_t>());
  const Tensor& entries = args.out(Op::kEntries);
  clear(entries);
  clear(args.out(Op::kEntryPositions));
  with_storage(entries.dtype, [&](auto storage) {
    using T = decltype(storage);
    const WindowRows<T> rows(op.spec(), args);
    auto* const positions = args.out(Op::kEntryPositions).as<int32_t>();
    rows.for_each_window([&](int64_t last) {
      positions[rows.entry_row(last)] =
          rows.positions[last] + 1 - static_cast<int32_t>(op.spec().rate);
    });
    T* const to = entries.as<T>();
    for_channels(rows.size(), [&](int64_t begin, int64_t count) {
      rows.for_each_window([&](int64_t last) {
        T* const entry = to + rows.entry_row(last) * rows.size() + begin;
        simd::for_each_vector(count, [&](int64_t c, auto lanes) {
          const WindowSums sums = sum_window(rows, last, begin + c, lanes);
          simd::store(entry + c, sums.values / sums.weights, lanes);
        });
      });
    });
  });
}

/// Gradients through one vector of a window's elements.
template <typename T, typename Lanes>
void add_window_grads(const WindowRows<T>& rows, int64_t last, int64_t c, const T* grad, T* grad_kv,
                      T* grad_gate, float* grad_bias, Lanes lanes) {
  const WindowSums sums = sum_window(rows, last, c, lanes);
  const Vec own = simd::load(grad + rows.entry_row(last) * rows.size() + c, lanes) / sums.weights;
  const Vec mean = sums.values / sums.weights;
  rows.for_each_term(last, [&](int64_t row, int64_t slot, int64_t first) {
    const int64_t at = row * rows.width + first + c;
    const int64_t bias_at = slot * rows.width + first + c;
    const Vec logit = simd::load(rows.gate + at, lanes) + simd::load(rows.bias + bias_at, lanes);
    const Vec of_kv = simd::exp(logit - sums.max) * own;
    const Vec of_gate = of_kv * (simd::load(rows.kv + at, lanes) - mean);
    simd::store(grad_kv + at, of_kv, lanes);
    simd::store(grad_gate + at, of_gate, lanes);
    if (grad_bias != nullptr)
      simd::store(grad_bias + bias_at, simd::load(grad_bias + bias_at, lanes) + of_gate, lanes);
  });
}

void compress_windows_backward(const CompressWindowsBackward& op,
                               const Args<CompressWindowsBackward>& args) {
  using Op = CompressWindowsBackward;
  check_window_positions(op, args.in(Op::kPositions).span<int32_t>());
  clear(args.out(Op::kGradKv));
  clear(args.out(Op::kGradGate));
  with_storage(args.in(Op::kKv).dtype, [&](auto storage) {
    using T = decltype(storage);
    const WindowRows<T> rows(op.spec(), args);
    const T* const grad = args.in(Op::kGrad).as<T>();
    T* const grad_kv = args.out(Op::kGradKv).as<T>();
    T* const grad_gate = args.out(Op::kGradGate).as<T>();
    const Tensor& bias = args.out(Op::kGradBias);
    float* const grad_bias = bias ? bias.as<float>() : nullptr;
    for_channels(rows.size(), [&](int64_t begin, int64_t count) {
      rows.for_each_window([&](int64_t last) {
        simd::for_each_vector(count, [&](int64_t c, auto lanes) {
          add_window_grads(rows, last, begin + c, grad, grad_kv, grad_gate, grad_bias, lanes);
        });
      });
    });
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_compress_windows_cpu, table) {
  add_kernel<CompressWindows>(table, compress_windows);
  add_kernel<CompressWindowsBackward>(table, compress_windows_backward);
}

}  // namespace tessera
