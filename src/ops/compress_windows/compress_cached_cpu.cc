#include <cmath>
#include <cstring>
#include <limits>

#include "ops/compress_windows/compress_cached.h"
#include "ops/paged_attention/kept_tokens.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Rows of kv and gate of one token, in hand or kept.
template <typename T>
struct TokenParts {
  const T* kv;
  const T* gate;
};

template <typename T>
class CachedCompressor {
 public:
  using Op = CompressWindowsCached;

  CachedCompressor(const Op& op, const KeptTokens& tokens, const KernelArgs& args)
      : spec_(op.spec()),
        tokens_(tokens),
        rate_(spec_.windows.rate),
        width_(args.in(Op::kKv).shape[1]),
        size_(width_ / spec_.windows.parts()),
        kv_(args.in(Op::kKv).as<T>()),
        gate_(args.in(Op::kGate).as<T>()),
        bias_(args.in(Op::kBias).as<float>()),
        slots_(spec_.kept == KeptRows::kPaged ? args.in(Op::kSlots).as<int32_t>() : nullptr),
        state_(args.out(Op::kState).as<T>()) {}

  bool ends_window(int64_t token) const {
    return tokens_.sequence(token) >= 0 && tokens_.position(token) % rate_ == rate_ - 1;
  }

  void compress(int64_t token, T* entry) const {
    for (int64_t c = 0; c < size_; ++c) {
      float max = -std::numeric_limits<float>::infinity();
      for_each_term(token, c, [&](float logit, float /*value*/) { max = std::max(max, logit); });
      float weights = 0;
      float values = 0;
      for_each_term(token, c, [&](float logit, float value) {
        const float weight = std::exp(logit - max);
        weights += weight;
        values += weight * value;
      });
      entry[c] = T(values / weights);
    }
  }

  void keep(int64_t token) const {
    if (tokens_.sequence(token) < 0) return;
    T* const to = state_row(token, tokens_.position(token));
    std::memcpy(static_cast<void*>(to), kv_ + token * width_, width_ * sizeof(T));
    std::memcpy(static_cast<void*>(to + width_), gate_ + token * width_, width_ * sizeof(T));
  }

 private:
  T* state_row(int64_t token, int64_t position) const {
    const int64_t slot = slots_ == nullptr ? 0 : slots_[tokens_.sequence(token)];
    return state_ + (slot * 2 * rate_ + position % (2 * rate_)) * 2 * width_;
  }

  TokenParts<T> parts_of(int64_t token, int64_t position) const {
    const int64_t row = token - (tokens_.position(token) - position);
    if (row >= tokens_.first_in_hand(token)) return {kv_ + row * width_, gate_ + row * width_};
    const T* const kept = state_row(token, position);
    return {kept, kept + width_};
  }

  template <typename Visit>
  void for_each_term(int64_t token, int64_t c, const Visit& visit) const {
    const int64_t first = tokens_.position(token) - rate_ + 1;
    const auto add = [&](int64_t begin, int64_t at) {
      for (int64_t j = 0; j < rate_; ++j) {
        const TokenParts<T> parts = parts_of(token, begin + j);
        visit(static_cast<float>(parts.gate[at]) + bias_[j * width_ + at],
              static_cast<float>(parts.kv[at]));
      }
    };
    if (spec_.windows.overlaps && first > 0) add(first - rate_, c);
    add(first, width_ - size_ + c);
  }

  const CompressCacheSpec& spec_;
  const KeptTokens& tokens_;
  int64_t rate_;
  int64_t width_;
  int64_t size_;
  const T* kv_;
  const T* gate_;
  const float* bias_;
  const int32_t* slots_;
  T* state_;
};

void compress_windows_cached(const CompressWindowsCached& op, const KernelArgs& args) {
  using Op = CompressWindowsCached;
  const CompressCacheSpec& spec = op.spec();
  const int64_t rate = spec.windows.rate;
  const KeptTokens tokens(spec.kept, args, Op::kPositions, Op::kFirstKept);
  tokens.check(op);
  if (spec.kept == KeptRows::kPaged) {
    for (const int32_t slot : args.in(Op::kSlots).span<int32_t>())
      check_shape(op, slot >= 0 && slot < spec.num_slots, "slot {} of {}", slot, spec.num_slots);
  }
  const Tensor& entries = args.out(Op::kEntries);
  auto* const positions = args.out(Op::kEntryPositions).as<int32_t>();
  auto* const rows = args.out(Op::kEntryRows).as<int32_t>();
  if (entries.num_bytes() > 0) std::memset(entries.data, 0, entries.num_bytes());
  with_storage(entries.dtype, [&](auto storage) {
    using T = decltype(storage);
    const CachedCompressor<T> compressor(op, tokens, args);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t token = 0; token < tokens.count(); ++token) {
      const bool ends = compressor.ends_window(token);
      const int64_t entry = tokens.position(token) / rate;
      positions[token] = ends ? static_cast<int32_t>(entry * rate) : 0;
      rows[token] = ends ? static_cast<int32_t>(spec.first_entry + tokens.row(token, entry)) : -1;
      if (ends) compressor.compress(token, entries.as<T>() + token * entries.shape[1]);
    }
    // What was kept is read no more.
    for (int64_t token = 0; token < tokens.count(); ++token) compressor.keep(token);
  });
}

}  // namespace

void add_compress_windows_cached_cpu(KernelTable& table) {
  for (const KeptRows kept : {KeptRows::kCached, KeptRows::kPaged}) {
    add_kernel<CompressWindowsCached>(table, CompressWindowsCached::name_of(kept),
                                      compress_windows_cached);
  }
}

}  // namespace tessera
