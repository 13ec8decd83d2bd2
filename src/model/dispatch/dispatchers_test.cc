#include "model/dispatch/dispatchers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/dispatch/dispatch_bounds.h"
#include "model/dispatch/dispatch_testing.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::HasSubstr;
using testing::MoeCase;
using testing::MoeResult;
using testing::MoeValues;

struct Way {
  DispatcherKind kind;
  ExchangeSizes exchange = ExchangeSizes::kExact;
};
constexpr Way kWays[] = {{DispatcherKind::kAllToAll},
                         {DispatcherKind::kAllToAll, ExchangeSizes::kDirect},
                         {DispatcherKind::kAllToAll, ExchangeSizes::kBounded},
                         {DispatcherKind::kAllGather},
                         {DispatcherKind::kDeduplicated},
                         {DispatcherKind::kDeduplicated, ExchangeSizes::kDirect},
                         {DispatcherKind::kDeduplicated, ExchangeSizes::kBounded},
                         {DispatcherKind::kHierarchical},
                         {DispatcherKind::kHierarchical, ExchangeSizes::kDirect},
                         {DispatcherKind::kHierarchical, ExchangeSizes::kBounded}};

struct Degrees {
  int64_t ep;
  int64_t etp;
};
constexpr Degrees kDegrees[] = {{1, 1}, {2, 1}, {4, 1}, {1, 2}, {2, 2}, {3, 1}, {4, 2}};

/// Two nodes where EP divides, or as many as it has ranks.
int64_t nodes_of(const Way& way, int64_t ep) {
  if (way.kind != DispatcherKind::kHierarchical) return 1;
  return ep % 2 == 0 ? 2 : ep;
}

/// Twelve experts divide by all degrees of EP, their sizes by all of ETP.
const std::vector<int64_t> kSizes = {8, 4, 16, 8, 8, 12, 8, 4, 8, 20, 8, 8};

/// The layer over ranks gives what the local dispatcher gives for the same tokens.
MoeResult expect_as_on_one(const MoeCase& c, uint64_t seed) {
  SCOPED_TRACE(c.to_string());
  const MoeValues values(c, seed);
  const MoeResult expected = run_on_one(c, values);
  MoeResult actual = run_on_ranks(c, values);
  const double tolerance = c.dtype == DType::kBF16 ? 2e-2 : 2e-5;
  testing::expect_rows_near(actual.y, expected.y, tolerance, "y");
  testing::expect_rows_near(actual.grad_x, expected.grad_x, tolerance, "dx");
  testing::expect_rows_near(actual.grad_router, expected.grad_router, tolerance, "drouter");
  testing::expect_rows_near(actual.grad_fc1, expected.grad_fc1, tolerance, "dfc1");
  testing::expect_rows_near(actual.grad_fc2, expected.grad_fc2, tolerance, "dfc2");
  EXPECT_EQ(actual.dropped, expected.dropped);
  return actual;
}

/// `variant` for every kind of dispatcher and all degrees.
template <typename Change>
void for_all_layouts(const MoeCase& variant, Change change) {
  uint64_t seed = 0;
  for (const Degrees& degrees : kDegrees) {
    for (const Way& way : kWays) {
      MoeCase c = variant;
      c.ep = degrees.ep;
      c.etp = degrees.etp;
      c.kind = way.kind;
      c.exchange = way.exchange;
      c.nodes = nodes_of(way, c.ep);
      change(c);
      expect_as_on_one(c, ++seed);
    }
  }
}

void for_all_layouts(const MoeCase& variant) {
  for_all_layouts(variant, [](MoeCase&) {});
}

TEST(Dispatchers, DroplessAgreesWithTheLocalOne) {
  for_all_layouts({.sizes = kSizes});
  for_all_layouts({.sizes = kSizes, .early_probs = false});
  for_all_layouts({.tokens_each = 1, .top_k = 1, .sizes = kSizes});
  for_all_layouts({.tokens_each = 33, .top_k = 12, .sizes = kSizes, .early_probs = false});
}

TEST(Dispatchers, RowsOfAnExpertStandInTokenOrderBitwise) {
  for (const int64_t ep : {1, 2, 3, 4}) {
    for (const Way& way : kWays) {
      if (way.kind == DispatcherKind::kHierarchical) continue;  // nodes come before ranks
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        const MoeCase c{.ep = ep,
                        .kind = way.kind,
                        .exchange = way.exchange,
                        .tokens_each = 17,
                        .top_k = 3,
                        .sizes = kSizes,
                        .dtype = dtype,
                        .sharing_ranks = ep};  // one micro-batch: the local run has all tokens
        SCOPED_TRACE(c.to_string());
        const MoeValues values(c, 11);
        std::vector<std::byte> rows;
        for (const auto& part : run_on_ranks(c, values).expert_in) {
          rows.insert(rows.end(), part.begin(), part.end());
        }
        EXPECT_TRUE(rows == run_on_one(c, values).expert_in[0]);
      }
    }
  }
}

TEST(Dispatchers, NoTokensAtAll) {
  for_all_layouts({.tokens_each = 0, .sizes = kSizes});
}

TEST(Dispatchers, CapacityOfEachRanksOwnTokens) {
  for (const bool padded : {false, true}) {
    for (const DropPolicy policy : {DropPolicy::kProbs, DropPolicy::kPosition}) {
      for_all_layouts({.tokens_each = 13,
                       .top_k = 3,
                       .sizes = kSizes,
                       .capacity_factor = 0.7,
                       .pad_to_capacity = padded,
                       .drop_policy = policy,
                       .early_probs = padded});
    }
  }
}

TEST(Dispatchers, CapacitySharedByTheRanksOfAMicroBatch) {
  for (const int64_t sharing : {1, 2, 4}) {
    for (const bool padded : {false, true}) {
      if (padded && sharing != 2) continue;
      const MoeCase variant{.tokens_each = 9,
                            .top_k = 3,
                            .sizes = kSizes,
                            .capacity_factor = 0.6,
                            .pad_to_capacity = padded,
                            .drop_policy = padded ? DropPolicy::kProbs : DropPolicy::kPosition,
                            .shuffled = true};
      for_all_layouts(variant, [&](MoeCase& c) {
        c.sharing_ranks = c.num_ranks() % sharing == 0 ? sharing : c.num_ranks();
      });
    }
  }
}

TEST(Dispatchers, CapacityOfGroupsOfExperts) {
  for (const int64_t group : {2, 6}) {  // six are on one rank, and on several
    MoeCase variant{.tokens_each = 11,
                    .top_k = 3,
                    .sizes = kSizes,
                    .capacity_factor = 0.5,
                    .capacity_group_size = group};
    for_all_layouts(variant);
    for_all_layouts(variant, [](MoeCase& c) { c.sharing_ranks = c.num_ranks(); });
  }
}

TEST(Dispatchers, BlockSparseExperts) {
  const std::vector<int64_t> sizes = {16, 32, 16, 16, 48, 16, 16, 16, 32, 16, 16, 16};
  for_all_layouts({.tokens_each = 21, .top_k = 3, .sizes = sizes, .block_size = 8});
  for_all_layouts({.tokens_each = 21,
                   .top_k = 3,
                   .sizes = sizes,
                   .capacity_factor = 0.8,
                   .pad_to_capacity = true,
                   .block_size = 8});
}

TEST(Dispatchers, Bf16StaysWithinItsRounding) {
  for (const bool early : {true, false}) {
    for_all_layouts({.tokens_each = 16,
                     .top_k = 3,
                     .sizes = kSizes,
                     .dtype = DType::kBF16,
                     .early_probs = early});
  }
}

/// Experts whose score is out of reach get no token; those of a whole rank leave it without rows.
TEST(Dispatchers, ExpertsAndRanksWithoutTokens) {
  for (const int64_t block_size : {0, 8}) {
    for (const Way& way : kWays) {
      MoeCase c{.ep = 3,
                .kind = way.kind,
                .exchange = way.exchange,
                .nodes = nodes_of(way, 3),
                .tokens_each = 10,
                .top_k = 2,
                .sizes = {8, 8, 8, 8, 8, 8},
                .block_size = block_size,
                .bias = {0, -9, -9, -9, 0, 0}};
      const MoeResult result = expect_as_on_one(c, 5);
      EXPECT_EQ(result.rows[1], 0);
      EXPECT_GT(result.rows[0], 0);
      c.bias = {9, 8, 0, 0, 0, 0};
      EXPECT_THAT(expect_as_on_one(c, 6).rows, ElementsAre(Gt(0), 0, 0));
    }
  }
}

TEST(Dispatchers, AllTokensAtOneRankFillTheBoundExactly) {
  for (const Way& way : kWays) {
    MoeCase c{.ep = 2,
              .etp = 2,
              .kind = way.kind,
              .exchange = way.exchange,
              .nodes = nodes_of(way, 2),
              .tokens_each = 5,
              .top_k = 3,
              .sizes = {8, 8, 8, 8, 8, 8, 8, 8},
              .bias = {9, 8, 7, 6, 0, 0, 0, 0}};
    const MoeResult result = expect_as_on_one(c, 7);
    EXPECT_THAT(result.max_rows, Each(4 * 5 * 3));
    EXPECT_THAT(result.rows, ElementsAre(60, 60, 0, 0));
    // Only two experts a rank: a token has no more rows there, whatever its top-k.
    c.sizes = {8, 8, 8, 8};
    c.bias = {9, 8, 0, 0};
    const MoeResult fewer = expect_as_on_one(c, 8);
    EXPECT_THAT(fewer.max_rows, Each(4 * 5 * 2));
    EXPECT_THAT(fewer.rows, ElementsAre(40, 40, 20, 20));
    c.capacity_factor = 0.5;  // ceil(5 · 3 / 4 · 0.5) = 2 rows of each rank for each expert
    EXPECT_THAT(expect_as_on_one(c, 9).max_rows, Each(4 * 2 * 2));
    c.sharing_ranks = 4;  // ceil(20 · 3 / 4 · 0.5) = 8 rows of all
    EXPECT_THAT(expect_as_on_one(c, 9).max_rows, Each(8 * 2));
  }
}

TEST(Dispatchers, PaddingGivesEveryExpertTheCapacitiesOfAllRanks) {
  for (const Way& way : kWays) {
    MoeCase c{.ep = 2,
              .etp = 2,
              .kind = way.kind,
              .exchange = way.exchange,
              .nodes = nodes_of(way, 2),
              .tokens_each = 5,
              .capacity_factor = 2,
              .pad_to_capacity = true};
    // ceil(5 · 2 / 4 · 2) = 5 rows of each of 4 ranks for each of 2 experts.
    EXPECT_THAT(expect_as_on_one(c, 1).rows, Each(40));
    c.sharing_ranks = 2;  // ceil(10 · 2 / 4 · 2) = 10 rows of each of two micro-batches, or three
    EXPECT_THAT(expect_as_on_one(c, 2).rows, Each(60)) << "the ranks of another are not known";
  }
}

/// What leaves a rank is what the choice of a dispatcher counts with, when routing is even.
TEST(Dispatchers, MoveTheVolumesThatTheChoiceCountsWith) {
  for (const Degrees& degrees : kDegrees) {
    for (const DispatcherKind kind : {DispatcherKind::kAllToAll, DispatcherKind::kAllGather}) {
      const MoeCase c{.ep = degrees.ep,
                      .etp = degrees.etp,
                      .kind = kind,
                      .tokens_each = 24,
                      .top_k = 2,
                      .sizes = kSizes,
                      .early_probs = false,
                      .force_balanced = true};
      SCOPED_TRACE(c.to_string());
      const MoeResult result = run_on_ranks(c, MoeValues(c, 3));
      int64_t bytes = 0;
      for (const auto& [group, count] : result.forward_bytes) bytes += count;
      // Beside the rows: counts of the experts, or indices and probabilities of the tokens.
      const int64_t extra = kind == DispatcherKind::kAllToAll ? c.num_experts() * 8
                                                              : c.tokens_each * c.top_k * (4 + 4);
      const DispatchVolumes volumes =
          dispatch_volumes({.top_k = c.top_k, .ep = c.ep, .etp = c.etp});
      const double rows =
          kind == DispatcherKind::kAllToAll ? volumes.all_to_all : volumes.all_gather;
      EXPECT_DOUBLE_EQ(static_cast<double>(bytes - (c.num_ranks() - 1) * extra),
                       rows * static_cast<double>(c.tokens_each * c.hidden * 4));
    }
  }
}

/// A row and its choices for each rank with experts of the token: of twelve experts on three ranks
/// four are chosen, on the two others, and none on the first, which has nothing to give back.
TEST(Dispatchers, DeduplicatedOnesMoveATokenOnceToARank) {
  MoeCase c{.ep = 3,
            .kind = DispatcherKind::kDeduplicated,
            .tokens_each = 24,
            .top_k = 4,
            .sizes = kSizes,
            .bias = {0, 0, 0, 0, 9, 8, 7, 0, 6, 0, 0, 0}};
  const int64_t sent_bytes = c.hidden * 4 + c.top_k * (4 + 4);
  const MoeResult result = run_on_ranks(c, MoeValues(c, 3));
  EXPECT_EQ(result.forward_bytes.at("ep"), c.tokens_each * 2 * sent_bytes);
  EXPECT_EQ(result.forward_bytes.at("experts"), 2 * 3 * 8) << "a count for each rank";
  c.exchange = ExchangeSizes::kBounded;
  EXPECT_EQ(run_on_ranks(c, MoeValues(c, 3)).forward_bytes.at("ep"),
            c.tokens_each * 2 * (sent_bytes + c.hidden * 4))
      << "a slot for each token";
}

/// Of four ranks on two nodes the first sends a token once to the other node, for two experts on
/// both of its ranks, and passes on what came: to its neighbour, who has the third expert.
TEST(Dispatchers, HierarchicalOnesMoveATokenOnceToANode) {
  const MoeCase c{.ep = 4,
                  .kind = DispatcherKind::kHierarchical,
                  .nodes = 2,
                  .tokens_each = 24,
                  .top_k = 3,
                  .sizes = kSizes,
                  .bias = {0, 0, 0, 9, 0, 0, 8, 0, 0, 7, 0, 0}};
  const int64_t sent_bytes = c.hidden * 4 + c.top_k * (4 + 4);
  const MoeResult result = run_on_ranks(c, MoeValues(c, 3));
  EXPECT_EQ(result.forward_bytes.at("ep_nodes"),
            c.tokens_each * (sent_bytes + c.hidden * 4) + 2 * 8)
      << "and one row back of each that came, and a count for each node";
  EXPECT_EQ(result.forward_bytes.at("ep_inner"), 2 * c.tokens_each * sent_bytes)
      << "its own tokens and those that came";
  EXPECT_EQ(result.forward_bytes.at("experts_inner"), 2 * 8);
  EXPECT_FALSE(result.forward_bytes.contains("ep"));
}

std::vector<MoeCase> cases_of_exchanges() {
  const MoeCase plain{.ep = 2, .etp = 2, .tokens_each = 13, .top_k = 3, .sizes = kSizes};
  std::vector<MoeCase> cases(8, plain);
  cases[1].early_probs = false;
  cases[2].dtype = DType::kBF16;
  cases[2].ep = 4;
  cases[2].etp = 1;
  cases[3].capacity_factor = 0.7;
  cases[4].capacity_factor = 0.7;
  cases[4].sharing_ranks = 2;
  cases[4].shuffled = true;
  cases[5].capacity_factor = 0.5;
  cases[5].capacity_group_size = 6;  // the experts of a rank
  cases[6].ep = 1;
  cases[7].capacity_factor = 1.2;
  cases[7].pad_to_capacity = true;
  return cases;
}

/// Neither padding on the way nor counts that stay on the device change a bit of what is computed.
TEST(Dispatchers, OtherExchangesGiveTheBitsOfExactOnes) {
  const auto expect_equal = [](const Tensor& a, const Tensor& b, const char* what) {
    EXPECT_EQ(std::memcmp(a.data, b.data, static_cast<size_t>(a.num_bytes())), 0) << what;
  };
  std::vector<MoeCase> cases = cases_of_exchanges();
  for (MoeCase c : cases_of_exchanges()) {
    c.kind = DispatcherKind::kDeduplicated;
    cases.push_back(c);
    c.kind = DispatcherKind::kHierarchical;
    c.nodes = nodes_of({c.kind}, c.ep);
    cases.push_back(c);
  }
  for (MoeCase c : cases) {
    SCOPED_TRACE(c.to_string());
    const MoeValues values(c, 21);
    const MoeResult exact = run_on_ranks(c, values);
    for (const ExchangeSizes exchange : {ExchangeSizes::kBounded, ExchangeSizes::kDirect}) {
      c.exchange = exchange;
      const MoeResult other = run_on_ranks(c, values);
      expect_equal(other.y, exact.y, "y");
      expect_equal(other.grad_x, exact.grad_x, "dx");
      EXPECT_TRUE(other.expert_in == exact.expert_in);
      EXPECT_EQ(other.dropped, exact.dropped);
      // Gradients of weights are added up by the test in whatever order ranks end.
      testing::expect_rows_near(other.grad_fc1, exact.grad_fc1, 1e-6, "dfc1");
      testing::expect_rows_near(other.grad_fc2, exact.grad_fc2, 1e-6, "dfc2");
    }
  }
}

/// The bound of each pair of ranks, whatever is routed: counts and probabilities go along.
TEST(Dispatchers, BoundedExchangesMoveTheirBounds) {
  for (const auto& [capacity, rows_to_peer] :
       {std::pair(0.0, 24 * 3), std::pair(0.5, 3 * 4), std::pair(1.0, 6 * 4)}) {
    const MoeCase c{.ep = 3,
                    .exchange = ExchangeSizes::kBounded,
                    .tokens_each = 24,
                    .top_k = 3,
                    .sizes = kSizes,
                    .capacity_factor = capacity,
                    .early_probs = true,
                    .bias = {9, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0}};
    SCOPED_TRACE(c.to_string());
    const MoeResult result = run_on_ranks(c, MoeValues(c, 3));
    // Two matrices there and back, and once a probability; a count for each of four experts.
    const int64_t expected = 2 * (rows_to_peer * (2 * c.hidden + 1) * 4 + 4 * 8);
    EXPECT_EQ(result.forward_bytes.at("ep"), expected);
    EXPECT_FALSE(result.forward_bytes.contains("experts"));
  }
}

/// Nothing in a bounded dispatch needs numbers on the host, forward or backward: all its exchanges
/// are of fixed sizes.
TEST(Dispatchers, BoundedExchangesNeedNoCountsOnTheHost) {
  MoeCase c{.ep = 2, .etp = 2};
  for (const auto& [kind, bounded] :
       {std::pair(DispatcherKind::kAllToAll, false), std::pair(DispatcherKind::kAllToAll, true),
        std::pair(DispatcherKind::kDeduplicated, false),
        std::pair(DispatcherKind::kDeduplicated, true)}) {
    c.kind = kind;
    c.exchange = bounded ? ExchangeSizes::kBounded : ExchangeSizes::kExact;
    run_thread_world(c.num_ranks(), [&](World& world) {
      const DispatchSpec spec = testing::spec_of_rank(c, world);
      const testing::ExpertPart part{
          .experts = spec.local_experts(), .part = spec.etp->rank(), .parts = c.etp};
      const testing::MoeProgram moe(c, spec, part, c.tokens_each);
      const Backward backward = differentiate(moe.program, {{moe.y}, {moe.x}});
      int64_t num_counted = 0;
      for (const Program* program : {&moe.program, &backward.program}) {
        num_counted += std::ranges::count_if(program->nodes(), [](const Node& node) {
          return node.op->name().ends_with("_v") || node.op->name() == "dispatch_plan";
        });
      }
      EXPECT_EQ(num_counted > 0, c.exchange == ExchangeSizes::kExact);
    });
  }
}

TEST(Dispatchers, TheLocalOneIsRouteMapAndPermutation) {
  const MoeCase c{.tokens_each = 6};
  const testing::MoeProgram moe(c, c.dispatch(), {.experts = {0, 4}}, 6);
  std::vector<std::string_view> names;
  for (const Node& node : moe.program.nodes()) names.push_back(node.op->name());
  EXPECT_EQ(names, (std::vector<std::string_view>{"router", "route_map", "permute", "permute_probs",
                                                  "grouped_matmul", "expert_activation",
                                                  "grouped_matmul", "unpermute"}));
}

TEST(Dispatchers, RefusesWhatCannotWork) {
  const auto message_of = [](const DispatchSpec& spec) -> std::string {
    Program program("refused");
    const ValueId x = program.add_input("x", {DType::kF32, {4, 8}});
    const ValueId probs = program.add_input("probs", {DType::kF32, {4, spec.top_k}});
    const ValueId idx = program.add_input("idx", {DType::kI32, {4, spec.top_k}});
    try {
      dispatch(program, spec, x, probs, idx);
    } catch (const UserError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message_of({.num_experts = 4, .pad_to_capacity = true}),
              HasSubstr("needs a capacity factor"));
  EXPECT_THAT(message_of({.num_experts = 4,
                          .capacity_factor = 1,
                          .pad_to_capacity = true,
                          .capacity_group_size = 2}),
              HasSubstr("switch padding to the capacity off"));
  run_thread_world(2, [&](World& world) {
    const CommunicatorPtr all = world.make_world_group();
    const CommunicatorPtr one = make_single_communicator("etp");
    EXPECT_THAT(message_of({.kind = DispatcherKind::kAllToAll,
                            .num_experts = 3,
                            .ep = all,
                            .etp = one,
                            .experts = all}),
                HasSubstr("3 experts do not spread evenly over 2"));
  });
}

}  // namespace
}  // namespace tessera
