#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "comm/thread/thread_world.h"
#include "core/slice.h"
#include "model/dispatch/dispatchers.h"
#include "ops/block_sparse/block_sparse.h"
#include "ops/expert_activation/expert_activation.h"
#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/registry/cpu_kernels.h"
#include "ops/router/router.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"

/// One MoE layer over the ranks of EP x ETP, and on one rank, for tests of the dispatchers.
namespace tessera::testing {

struct MoeCase {
  int64_t ep = 1;
  int64_t etp = 1;
  DispatcherKind kind = DispatcherKind::kAllToAll;
  ExchangeSizes exchange = ExchangeSizes::kExact;
  int64_t nodes = 1;        ///< that EP spans, of the hierarchical kind
  int64_t tokens_each = 7;  ///< of every rank
  int64_t hidden = 12;
  int64_t top_k = 2;
  std::vector<int64_t> sizes = {8, 8, 8, 8};  ///< whole inner sizes of the experts
  DType dtype = DType::kF32;
  double capacity_factor = 0;
  bool pad_to_capacity = false;
  DropPolicy drop_policy = DropPolicy::kProbs;
  int64_t capacity_group_size = 1;
  /// Neighbouring ranks that share a micro-batch and its capacity; 0: every rank limits its own
  /// tokens.
  int64_t sharing_ranks = 0;
  bool shuffled = false;   ///< a micro-batch's tokens lie on its ranks in another order
  int64_t block_size = 0;  ///< block-sparse experts; 0: grouped
  bool early_probs = true;
  std::vector<float> bias = {};  ///< added to the scores when choosing; empty: none
  bool force_balanced = false;

  int64_t num_ranks() const { return ep * etp; }
  int64_t num_experts() const { return std::ssize(sizes); }
  int64_t num_tokens() const { return num_ranks() * tokens_each; }
  int64_t total_size() const { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }
  int64_t micro_batch_tokens() const { return tokens_each * std::max<int64_t>(sharing_ranks, 1); }

  RouterSpec router() const {
    return {.num_experts = num_experts(),
            .top_k = top_k,
            .expert_bias = !bias.empty(),
            .force_balanced = force_balanced};
  }
  DispatchSpec dispatch() const {
    return {.kind = DispatcherKind::kLocal,
            .exchange = exchange,
            .num_experts = num_experts(),
            .top_k = top_k,
            .capacity_factor = capacity_factor,
            .pad_to_capacity = pad_to_capacity,
            .drop_policy = drop_policy,
            .capacity_group_size = capacity_group_size,
            .alignment = std::max<int64_t>(block_size, 1),
            .early_probs = early_probs};
  }
  std::string to_string() const {
    return fmt::format(
        "EP {} on {} nodes x ETP {} {}{}, {} tokens each, K {} of {}, {}capacity {}{}{} group {} "
        "shared by {}, "
        "block {}, probabilities {}",
        ep, nodes, etp, dispatcher_name(kind),
        exchange == ExchangeSizes::kBounded  ? " bounded"
        : exchange == ExchangeSizes::kDirect ? " direct"
                                             : "",
        tokens_each, top_k, num_experts(), dtype == DType::kBF16 ? "bf16, " : "", capacity_factor,
        pad_to_capacity ? " padded" : "",
        drop_policy == DropPolicy::kPosition ? " by position" : "", capacity_group_size,
        sharing_ranks, block_size, early_probs ? "early" : "late");
  }
};

/// Some experts of the layer, and of each one of `parts` equal parts of its inner columns.
struct ExpertPart {
  IndexRange experts;
  int64_t part = 0;
  int64_t parts = 1;

  std::vector<int64_t> sizes(const MoeCase& c, int64_t blocks) const {
    std::vector<int64_t> result;
    for (int64_t e = experts.begin; e < experts.end(); ++e) {
      result.push_back(blocks * c.sizes[e] / parts);
    }
    return result;
  }
  /// Of a whole weight whose experts have `blocks` (gate and up: 2) times their size of rows.
  Slice slice(const MoeCase& c, int64_t blocks) const {
    std::vector<IndexRange> rows;
    int64_t at = 0;
    for (int64_t e = 0; e < c.num_experts(); ++e) {
      const int64_t size = c.sizes[e];
      for (int64_t block = 0; block < blocks; ++block, at += size) {
        if (e < experts.begin || e >= experts.end()) continue;
        rows.push_back({at + part * (size / parts), size / parts});
      }
    }
    return Slice::of_rows({at, c.hidden}, std::move(rows));
  }
};

/// The values of the whole layer: tokens in their own order, whole weights.
struct MoeValues {
  OwnedTensor x, grad_y, router, fc1, fc2;
  /// The token at each place of the ranks, one rank after the other.
  std::vector<int64_t> token_at;

  MoeValues(const MoeCase& c, uint64_t seed) {
    Random random(seed, 0);
    x = random_tensor(c.dtype, {c.num_tokens(), c.hidden}, random);
    grad_y = random_tensor(c.dtype, {c.num_tokens(), c.hidden}, random);
    router = random_tensor(DType::kF32, {c.num_experts(), c.hidden}, random, 0.4);
    fc1 = random_tensor(c.dtype, {2 * c.total_size(), c.hidden}, random, 0.3);
    fc2 = random_tensor(c.dtype, {c.total_size(), c.hidden}, random, 0.3);
    token_at.resize(c.num_tokens());
    std::iota(token_at.begin(), token_at.end(), 0);
    const size_t size = c.micro_batch_tokens();
    for (size_t first = 0; c.shuffled && first < token_at.size(); first += size) {
      for (size_t i = size; i > 1; --i) {
        std::swap(token_at[first + i - 1], token_at[first + random.next_below(i)]);
      }
    }
  }

  /// Tokens at some places, counted from token `from`.
  std::vector<int64_t> tokens_at(int64_t first, int64_t count, int64_t from) const {
    std::vector<int64_t> tokens(token_at.begin() + first, token_at.begin() + first + count);
    for (int64_t& token : tokens) token -= from;
    return tokens;
  }
  /// The places in the micro-batch of all its tokens, as its ranks hold them.
  std::vector<int64_t> micro_batch_positions(const MoeCase& c, int64_t rank) const {
    const int64_t size = c.micro_batch_tokens();
    const int64_t first = size == 0 ? 0 : rank * c.tokens_each / size * size;
    return tokens_at(first, size, first);
  }
};

/// Outputs and gradients of the whole layer, gradients of weights summed over ranks.
struct MoeResult {
  OwnedTensor y, grad_x, grad_router, grad_fc1, grad_fc2;
  int64_t dropped = 0;
  std::vector<int64_t> rows, max_rows;            ///< of the local experts, by rank
  std::vector<std::vector<std::byte>> expert_in;  ///< the rows themselves
  std::map<std::string, int64_t> forward_bytes;   ///< that left the first rank, by group

  explicit MoeResult(const MoeCase& c)
      : y(c.dtype, {c.num_tokens(), c.hidden}),
        grad_x(c.dtype, {c.num_tokens(), c.hidden}),
        grad_router(DType::kF32, {c.num_experts(), c.hidden}),
        grad_fc1(DType::kF32, {2 * c.total_size(), c.hidden}),
        grad_fc2(DType::kF32, {c.total_size(), c.hidden}),
        rows(static_cast<size_t>(c.num_ranks())),
        max_rows(static_cast<size_t>(c.num_ranks())),
        expert_in(static_cast<size_t>(c.num_ranks())) {}
};

/// The program of one rank.
struct MoeProgram {
  Program program{"moe"};
  ValueId x, router, fc1, fc2, y;
  ValueId bias = -1;
  ValueId positions = -1;
  DispatchedRows dispatched;

  MoeProgram(const MoeCase& c, DispatchSpec spec, const ExpertPart& part, int64_t num_tokens) {
    x = program.add_input("x", {c.dtype, {num_tokens, c.hidden}});
    router = program.add_weight("router", {DType::kF32, {c.num_experts(), c.hidden}});
    fc1 = program.add_weight("fc1", {c.dtype, part.slice(c, 2).shape()});
    fc2 = program.add_weight("fc2", {c.dtype, part.slice(c, 1).shape()});
    std::vector<ValueId> inputs = {x, router};
    if (!c.bias.empty()) {
      bias = program.add_input("bias", {DType::kF32, {c.num_experts()}});
      inputs.push_back(bias);
    }
    if (spec.shared_capacity && c.shuffled) {
      positions = program.add_input("positions", {DType::kI32, {c.micro_batch_tokens()}});
      spec.shared_capacity->positions = positions;
    }
    const auto routed = program.add(make_router(c.router()), inputs);
    dispatched = tessera::dispatch(program, spec, x, routed[RouterOutput::kProbs],
                                   routed[RouterOutput::kExpertIdx]);
    const ValueId out = c.block_size > 0 ? add_sparse_experts(c, part) : add_experts(c, part);
    y = tessera::combine(program, spec, dispatched, out);
    program.set_outputs({y, dispatched.dropped, dispatched.offsets, dispatched.rows_RH});
  }

 private:
  ValueId add_experts(const MoeCase& c, const ExpertPart& part) {
    const ValueId pre = program.add1(make_grouped_matmul({part.sizes(c, 2), GroupedSide::kOut}),
                                     {dispatched.rows_RH, fc1, dispatched.offsets}, "pre");
    std::vector<ValueId> inputs = {pre};
    if (c.early_probs) inputs.push_back(dispatched.probs_R);
    inputs.push_back(dispatched.offsets);
    const ValueId act =
        program.add1(make_expert_activation({Activation::kSwiGLU, part.sizes(c, 1), c.early_probs}),
                     inputs, "act");
    return program.add1(make_grouped_matmul({part.sizes(c, 1), GroupedSide::kIn}),
                        {act, fc2, dispatched.offsets}, "out");
  }

  ValueId add_sparse_experts(const MoeCase& c, const ExpertPart& part) {
    const int64_t size = c.block_size;
    const int64_t max_rows = program.type(dispatched.rows_RH).shape[0];
    const auto topology = [&](int64_t blocks) {
      return program.add(make_block_topology({size, part.sizes(c, blocks), max_rows}),
                         {dispatched.offsets});
    };
    const auto t1 = topology(2);
    const auto t2 = topology(1);
    const ValueId pre =
        program.add1(make_block_sparse_fc1(size, part.sizes(c, 2)),
                     {dispatched.rows_RH, fc1, t1[0], t1[1], t1[2], t1[3], t1[4]}, "pre");
    const ValueId act = program.add1(make_block_sparse_activation({Activation::kSwiGLU, size}),
                                     {pre, dispatched.probs_R, t2[0], t2[1]}, "act");
    return program.add1(make_block_sparse_fc2(size, part.sizes(c, 1)),
                        {act, fc2, t2[0], t2[1], t2[2], t2[3], t2[4], dispatched.probs_R}, "out");
  }
};

/// The tokens and the experts of one run.
struct MoeShare {
  DispatchSpec spec;
  ExpertPart part;
  std::vector<int64_t> tokens;     ///< in the order in which they stand here
  std::vector<int64_t> positions;  ///< of those with whom it shares a capacity; may be empty
};

inline Tensor row_of(const Tensor& matrix, int64_t row) {
  Tensor result{matrix.data, matrix.dtype, {1, matrix.shape[1]}};
  result.data = static_cast<std::byte*>(matrix.data) + row * result.num_bytes();
  return result;
}

/// Copies tokens' rows between the whole layer's tensor and a rank's places.
inline void copy_tokens(const MoeShare& share, const Tensor& whole, const Tensor& local,
                        bool into_whole) {
  for (size_t i = 0; i < share.tokens.size(); ++i) {
    const Tensor token = row_of(whole, share.tokens[i]);
    const Tensor place = row_of(local, static_cast<int64_t>(i));
    std::memcpy(into_whole ? token.data : place.data, into_whole ? place.data : token.data,
                token.num_bytes());
  }
}

inline void add_into(const Tensor& from, const Tensor& to) {
  for (size_t i = 0; i < to.span<float>().size(); ++i) to.span<float>()[i] += from.span<float>()[i];
}

/// Adds a slice's gradient into the whole one.
inline void add_slice_into(const Slice& slice, const Tensor& local, const Tensor& whole) {
  OwnedTensor expanded(whole.dtype, whole.shape);
  copy_slice_into(slice, local, expanded);
  add_into(expanded, whole);
}

inline void fill(const MoeCase& c, const MoeValues& values, const MoeShare& share,
                 const MoeProgram& moe, const ProgramRun& run) {
  copy_tokens(share, values.x, run.value(moe.x), false);
  copy_tokens(share, values.grad_y, run.grad(moe.y), false);
  std::ranges::copy(values.router.get().span<float>(), run.value(moe.router).as<float>());
  copy_slice_from(share.part.slice(c, 2), values.fc1, run.value(moe.fc1));
  copy_slice_from(share.part.slice(c, 1), values.fc2, run.value(moe.fc2));
  if (moe.bias >= 0) std::ranges::copy(c.bias, run.value(moe.bias).as<float>());
  if (moe.positions >= 0)
    std::ranges::copy(share.positions, run.value(moe.positions).as<int32_t>());
}

inline void collect(const MoeCase& c, const MoeShare& share, const MoeProgram& moe,
                    const ProgramRun& run, int64_t rank, MoeResult& result) {
  copy_tokens(share, result.y, run.value(moe.y), true);
  copy_tokens(share, result.grad_x, run.grad(moe.x), true);
  add_into(run.grad(moe.router), result.grad_router);
  add_slice_into(share.part.slice(c, 2), run.grad(moe.fc1), result.grad_fc1);
  add_slice_into(share.part.slice(c, 1), run.grad(moe.fc2), result.grad_fc2);
  result.dropped += *run.value(moe.dispatched.dropped).as<int64_t>();
  Tensor rows = run.value(moe.dispatched.rows_RH);
  result.max_rows[rank] = rows.shape[0];
  rows.shape[0] = run.value(moe.dispatched.offsets).span<int64_t>().back();
  result.rows[rank] = rows.shape[0];
  const auto* bytes = static_cast<const std::byte*>(rows.data);
  result.expert_in[rank].assign(bytes, bytes + rows.num_bytes());
}

inline DispatchSpec spec_of_rank(const MoeCase& c, World& world) {
  DispatchSpec spec = c.dispatch();
  spec.kind = c.kind;
  const int64_t rank = world.rank();
  const auto range = [](int64_t first, int64_t count, int64_t stride) {
    std::vector<int64_t> ranks;
    for (int64_t i = 0; i < count; ++i) ranks.push_back(first + i * stride);
    return ranks;
  };
  spec.ep = world.make_group("ep", range(rank % c.etp, c.ep, c.etp));
  spec.etp = world.make_group("etp", range(rank / c.etp * c.etp, c.etp, 1));
  spec.experts = world.make_group("experts", range(0, c.num_ranks(), 1));
  if (c.nodes > 1) {
    const int64_t inner = c.ep / c.nodes * c.etp;  // ranks of a node
    spec.by_node = {
        .nodes = world.make_group("ep_nodes", range(rank % inner, c.nodes, inner)),
        .ep = world.make_group("ep_inner",
                               range(rank / inner * inner + rank % c.etp, c.ep / c.nodes, c.etp)),
        .experts = world.make_group("experts_inner", range(rank / inner * inner, inner, 1))};
  }
  if (c.sharing_ranks == 0) return spec;
  const int64_t first = rank / c.sharing_ranks * c.sharing_ranks;
  spec.shared_capacity = {.micro_batch =
                              world.make_group("micro_batch", range(first, c.sharing_ranks, 1))};
  return spec;
}

/// Calls a function with each rank's world and where its programs run.
using RunRanks =
    std::function<void(int64_t num_ranks, const std::function<void(World&, const Backend&)>& body)>;

inline void run_host_ranks(int64_t num_ranks,
                           const std::function<void(World&, const Backend&)>& body) {
  run_thread_world(num_ranks, [&](World& world) { body(world, make_cpu_kernels()); });
}

/// On threads, one a rank.
inline MoeResult run_on_ranks(const MoeCase& c, const MoeValues& values,
                              const RunRanks& run_ranks = run_host_ranks) {
  MoeResult result(c);
  std::mutex mutex;
  run_ranks(c.num_ranks(), [&](World& world, const Backend& backend) {
    const int64_t rank = world.rank();
    const MoeShare share{
        .spec = spec_of_rank(c, world),
        .part = {.experts = {rank / c.etp * (c.num_experts() / c.ep), c.num_experts() / c.ep},
                 .part = rank % c.etp,
                 .parts = c.etp},
        .tokens = values.tokens_at(rank * c.tokens_each, c.tokens_each, 0),
        .positions = values.micro_batch_positions(c, rank)};
    const MoeProgram moe(c, share.spec, share.part, c.tokens_each);
    const ProgramRun run(moe.program, {{moe.y}, {moe.x}}, backend);
    fill(c, values, share, moe, run);
    world.statistics().clear();
    run.run_forward();
    std::map<std::string, int64_t> bytes;
    for (const auto& [key, count] : world.statistics().counts()) bytes[key.first] += count.bytes;
    run.run_backward();
    const std::scoped_lock lock(mutex);
    collect(c, share, moe, run, rank, result);
    if (rank == 0) result.forward_bytes = bytes;
  });
  return result;
}

/// By the local dispatcher, micro-batch after micro-batch on one rank.
inline MoeResult run_on_one(const MoeCase& c, const MoeValues& values) {
  MoeResult result(c);
  const int64_t size = c.micro_batch_tokens();
  for (int64_t first = 0; first < c.num_tokens(); first += std::max<int64_t>(size, 1)) {
    MoeShare share{.spec = c.dispatch(),
                   .part = {.experts = {0, c.num_experts()}},
                   .tokens = std::vector<int64_t>(size),
                   .positions = {}};
    std::iota(share.tokens.begin(), share.tokens.end(), first);
    const MoeProgram moe(c, share.spec, share.part, size);
    const ProgramRun run(moe.program, {{moe.y}, {moe.x}}, make_cpu_kernels());
    fill(c, values, share, moe, run);
    run.run_forward();
    run.run_backward();
    collect(c, share, moe, run, 0, result);
  }
  return result;
}

}  // namespace tessera::testing
