#include <omp.h>

#include <algorithm>

#include "ops/cpu_dispatch.h"
#include "ops/float_word.h"
#include "ops/index_topk/index_topk.h"
#include "ops/paged_attention/kept_tokens.h"
#include "ops/paged_attention/pages.h"
#include "ops/sequence_bounds.h"
#include "ops/simd.h"
#include "ops/storage.h"
#include "ops/workspace.h"

namespace tessera {
namespace {

using simd::Vec;

/// The keys that a token sees: those of the positions before `count` of its sequence, whose rows
/// lie from `first_row` on, or in pages.
struct Seen {
  int64_t count = 0;
  int64_t first_row = 0;
  const int32_t* pages = nullptr;

  int64_t row(int64_t position) const {
    if (pages == nullptr) return first_row + position;
    return pages[position / kPageTokens] * kPageTokens + position % kPageTokens;
  }
};

/// Keys and vectors of heads whose products are summed together: their sums stay in registers.
constexpr int kKeysAtOnce = 4;
constexpr int kVectorsAtOnce = 2;
constexpr int64_t kHeadsAtOnce = kVectorsAtOnce * simd::kLanes;

/// A number for each (score, position) in the order of the choice: larger scores are larger, of
/// equal ones later positions. NaN comes out above or below all others, by its sign.
uint64_t rank_of(float score, int64_t position) {
  return static_cast<uint64_t>(ordered_word(score)) << 32 | static_cast<uint64_t>(position);
}

int64_t position_of(uint64_t rank) {
  return static_cast<int64_t>(rank & 0xffffffffU);
}

/// One thread's scratch memory. Heads are rounded up to whole steps, those behind the last being 0.
struct Scratch {
  Scratch(const IndexSpec& spec, int64_t longest, std::byte* base)
      : heads((spec.num_heads + kHeadsAtOnce - 1) / kHeadsAtOnce * kHeadsAtOnce) {
    ranks = take<uint64_t>(longest, base);
    queries = take<float>(spec.head_size * heads, base);
    weights = take<float>(heads, base);
    keys = take<float>(kKeysAtOnce * spec.head_size, base);
  }

  int64_t num_bytes() const { return layout.num_bytes(); }

  int64_t heads;
  WorkspaceLayout layout;
  uint64_t* ranks;
  float* queries;  ///< [head_size, heads]: a step of the sum reads neighbouring heads
  float* weights;  ///< [heads]
  float* keys;     ///< [kKeysAtOnce, head_size]

 private:
  template <typename Element>
  Element* take(int64_t count, std::byte* base) {
    const int64_t offset = layout.add<Element>(count);
    return base == nullptr ? nullptr : reinterpret_cast<Element*>(base + offset);
  }
};

template <typename T>
class Chooser {
 public:
  Chooser(const IndexSpec& spec, const KernelArgs& args, const Scratch& scratch)
      : spec_(spec),
        q_(args.in(IndexTopkOperator::kQ).as<T>()),
        weights_(args.in(IndexTopkOperator::kWeights).as<T>()),
        keys_(args.in(IndexTopkOperator::kKeys).as<T>()),
        chosen_(args.out(IndexTopkOperator::kChosen).as<int32_t>()),
        scratch_(scratch) {
    std::fill_n(scratch_.queries, spec.head_size * scratch.heads, 0.0F);
    std::fill_n(scratch_.weights, scratch.heads, 0.0F);
  }

  void choose(int64_t token, const Seen& seen) const {
    int32_t* to = chosen_ + token * spec_.top_k;
    const int64_t count = std::min(seen.count, spec_.top_k);
    if (seen.count > spec_.top_k) {
      uint64_t* ranks = scratch_.ranks;
      rank_keys(token, seen);
      std::nth_element(ranks, ranks + count - 1, ranks + seen.count, std::greater<>());
      std::sort(ranks, ranks + count,
                [](uint64_t a, uint64_t b) { return position_of(a) < position_of(b); });
      for (int64_t i = 0; i < count; ++i)
        to[i] = static_cast<int32_t>(seen.row(position_of(ranks[i])));
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(seen.row(i));
    }
    std::fill(to + count, to + spec_.top_k, -1);
  }

 private:
  void rank_keys(int64_t token, const Seen& seen) const {
    take_queries(token);
    int64_t position = 0;
    for (; position + kKeysAtOnce <= seen.count; position += kKeysAtOnce)
      rank_some<kKeysAtOnce>(seen, position);
    for (; position < seen.count; ++position) rank_some<1>(seen, position);
  }

  void take_queries(int64_t token) const {
    const T* q = q_ + token * spec_.num_heads * spec_.head_size;
    for (int64_t h = 0; h < spec_.num_heads; ++h) {
      for (int64_t c = 0; c < spec_.head_size; ++c)
        scratch_.queries[c * scratch_.heads + h] = static_cast<float>(*q++);
      scratch_.weights[h] = static_cast<float>(weights_[token * spec_.num_heads + h]);
    }
  }

  template <int kCount>
  void rank_some(const Seen& seen, int64_t position) const {
    for (int i = 0; i < kCount; ++i) {
      simd::convert(scratch_.keys + i * spec_.head_size,
                    keys_ + seen.row(position + i) * spec_.head_size, spec_.head_size);
    }
    Vec scores[kCount] = {};
    for (int64_t h = 0; h < scratch_.heads; h += kHeadsAtOnce) add_heads<kCount>(h, scores);
    for (int i = 0; i < kCount; ++i)
      scratch_.ranks[position + i] = rank_of(simd::sum(scores[i]), position + i);
  }

  template <int kCount>
  void add_heads(int64_t first, Vec* scores) const {
    Vec dots[kCount][kVectorsAtOnce] = {};
    const float* q = scratch_.queries + first;
    for (int64_t c = 0; c < spec_.head_size; ++c, q += scratch_.heads) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectorsAtOnce; ++v) {
        const Vec own = simd::load(q + v * simd::kLanes);
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) dots[i][v] += own * scratch_.keys[i * spec_.head_size + c];
      }
    }
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      const Vec weight = simd::load(scratch_.weights + first + v * simd::kLanes);
      // NaN fails the comparison, and goes on.
      for (int i = 0; i < kCount; ++i) scores[i] += weight * (dots[i][v] <= 0 ? Vec{} : dots[i][v]);
    }
  }

  IndexSpec spec_;
  const T* q_;
  const T* weights_;
  const T* keys_;
  int32_t* chosen_;
  Scratch scratch_;
};

/// Chooses for every token, `seen_by(token)` being what it sees, at most `longest` keys.
template <typename SeenBy>
void choose_keys(const IndexTopkOperator& op, const KernelArgs& args, int64_t longest,
                 const SeenBy& seen_by) {
  const Tensor& q = args.in(IndexTopkOperator::kQ);
  const int64_t bytes = Scratch(op.spec(), longest, nullptr).num_bytes();
  const int64_t fitting = std::ssize(args.workspace) / bytes;
  ensure(fitting >= 1, "index_topk: {} bytes of scratch memory, {} needed by a thread",
         args.workspace.size(), bytes);
  const auto threads = static_cast<int>(std::min<int64_t>(fitting, omp_get_max_threads()));
  with_storage(q.dtype, [&](auto storage) {
#pragma omp parallel num_threads(threads) if (q.shape[0] > 1)
    {
      const Scratch scratch(op.spec(), longest,
                            args.workspace.data() + bytes * omp_get_thread_num());
      const Chooser<decltype(storage)> chooser(op.spec(), args, scratch);
#pragma omp for schedule(dynamic, 1)
      for (int64_t token = 0; token < q.shape[0]; ++token) chooser.choose(token, seen_by(token));
    }
  });
}

void index_topk(const IndexTopk& op, const KernelArgs& args) {
  const auto bounds = args.in(IndexTopk::kCuSeqlens).span<int32_t>();
  const int64_t num_tokens = args.in(IndexTopk::kQ).shape[0];
  check_cu_seqlens(op, bounds, num_tokens);
  choose_keys(op, args, num_tokens, [&](int64_t token) {
    const int64_t begin = *(std::ranges::upper_bound(bounds, token) - 1);
    return Seen{.count = token - begin + 1, .first_row = begin};
  });
}

/// The entries that a token sees, whose rows neighbour but in pages.
Seen seen_entries(const IndexTopkEntries& op, const KeptTokens& tokens, int64_t token) {
  if (tokens.sequence(token) < 0) return {};
  return {.count = (tokens.position(token) + 1) / op.rate(),
          .first_row = op.kept() == KeptRows::kPaged ? 0 : tokens.entry_row(token, 0, op.rate()),
          .pages = tokens.pages(token)};
}

/// Entries of a sequence at most, of so many rows of keys.
int64_t longest_entries(KeptRows kept, int64_t num_rows, int64_t pages_per_sequence) {
  return kept == KeptRows::kPaged ? pages_per_sequence * kPageTokens : num_rows;
}

void index_topk_entries(const IndexTopkEntries& op, const KernelArgs& args) {
  using Op = IndexTopkEntries;
  const KeptTokens tokens(op.kept(), args, Op::kPositions, Op::kFirstKept);
  tokens.check(op);
  const int64_t rows = args.in(Op::kKeys).shape[0];
  for (int64_t token = 0; token < tokens.count(); ++token) {
    const Seen seen = seen_entries(op, tokens, token);
    // Rows rise, but from page to page.
    for (int64_t i = seen.count - 1; i >= 0;
         i -= op.kept() == KeptRows::kPaged ? kPageTokens : rows) {
      check_shape(op, seen.row(i) >= 0 && seen.row(i) < rows,
                  "token {} sees entries up to row {} of {}", token, seen.row(i), rows);
    }
  }
  const int64_t pages = op.kept() == KeptRows::kPaged ? args.in(Op::kFirstKept + 1).shape[1] : 0;
  choose_keys(op, args, longest_entries(op.kept(), rows, pages),
              [&](int64_t token) { return seen_entries(op, tokens, token); });
}

void index_topk_cached(const IndexTopkCached& op, const KernelArgs& args) {
  const int64_t queries = args.in(IndexTopkCached::kQ).shape[0];
  const int64_t capacity = args.in(IndexTopkCached::kKeys).shape[0];
  const int64_t length = *args.in(IndexTopkCached::kCacheLength).as<int32_t>();
  check_shape(op, queries <= length && length <= capacity,
              "cache_length = {} must be at least the {} new tokens and at most the capacity {}",
              length, queries, capacity);
  choose_keys(op, args, capacity,
              [&](int64_t token) { return Seen{.count = length - queries + token + 1}; });
}

/// Refuses what would be read outside the pages.
void check_pages(const IndexTopkPaged& op, const KernelArgs& args) {
  using Op = IndexTopkPaged;
  const auto bounds = args.in(Op::kCuSeqlens).span<int32_t>();
  const auto lengths = args.in(Op::kLengths).span<int32_t>();
  const auto table = args.in(Op::kPageTable).span<int32_t>();
  const int64_t width = args.in(Op::kPageTable).shape[1];
  const int64_t num_pages = args.in(Op::kKeys).shape[0] / kPageTokens;
  check_shape(op, bounds.back() <= args.in(Op::kQ).shape[0],
              "cu_seqlens ends at {}, after the {} rows", bounds.back(), args.in(Op::kQ).shape[0]);
  check_cu_seqlens(op, bounds, bounds.back());
  for (int64_t s = 0; s < std::ssize(lengths); ++s) {
    const int64_t count = bounds[s + 1] - bounds[s];
    if (count == 0) continue;
    check_shape(op, count <= lengths[s] && lengths[s] <= width * kPageTokens,
                "sequence {} has {} tokens; expected at least the {} new ones and at most {} pages "
                "of {}",
                s, lengths[s], count, width, kPageTokens);
    for (int64_t i = 0; i < pages_of(lengths[s]); ++i) {
      const int32_t page = table[s * width + i];
      check_shape(op, page >= 0 && page < num_pages, "page {} of sequence {}; there are {}", page,
                  s, num_pages);
    }
  }
}

void index_topk_paged(const IndexTopkPaged& op, const KernelArgs& args) {
  using Op = IndexTopkPaged;
  check_pages(op, args);
  const auto bounds = args.in(Op::kCuSeqlens).span<int32_t>();
  const auto lengths = args.in(Op::kLengths).span<int32_t>();
  const int32_t* table = args.in(Op::kPageTable).as<int32_t>();
  const int64_t width = args.in(Op::kPageTable).shape[1];
  choose_keys(op, args, width * kPageTokens, [&](int64_t token) {
    if (token >= bounds.back()) return Seen{};
    const int64_t sequence = std::ranges::upper_bound(bounds, token) - bounds.begin() - 1;
    return Seen{.count = lengths[sequence] - (bounds[sequence + 1] - token) + 1,
                .pages = table + sequence * width};
  });
}

int64_t scratch_bytes(const IndexTopkOperator& op, int64_t longest) {
  return omp_get_max_threads() * Scratch(op.spec(), longest, nullptr).num_bytes();
}

template <typename Op>
int64_t workspace_of_keys(const Op& op, std::span<const ValueType> inputs) {
  return scratch_bytes(op, inputs[Op::kKeys].shape[0]);
}

int64_t entries_workspace(const IndexTopkEntries& op, std::span<const ValueType> inputs) {
  using Op = IndexTopkEntries;
  const int64_t pages = op.kept() == KeptRows::kPaged ? inputs[Op::kFirstKept + 1].shape[1] : 0;
  return scratch_bytes(op, longest_entries(op.kept(), inputs[Op::kKeys].shape[0], pages));
}

int64_t paged_workspace(const IndexTopkPaged& op, std::span<const ValueType> inputs) {
  return scratch_bytes(op, inputs[IndexTopkPaged::kPageTable].shape[1] * kPageTokens);
}

}  // namespace

TESSERA_CPU_KERNELS(add_index_topk_cpu, table) {
  add_kernel<IndexTopk>(table, index_topk, {.workspace = workspace_of_keys<IndexTopk>});
  for (const KeptRows kept : {KeptRows::kPacked, KeptRows::kCached, KeptRows::kPaged}) {
    add_kernel<IndexTopkEntries>(table, IndexTopkEntries::name_of(kept), index_topk_entries,
                                 {.workspace = entries_workspace});
  }
  add_kernel<IndexTopkCached>(table, index_topk_cached,
                              {.workspace = workspace_of_keys<IndexTopkCached>});
  add_kernel<IndexTopkPaged>(table, index_topk_paged, {.workspace = paged_workspace});
}

}  // namespace tessera
