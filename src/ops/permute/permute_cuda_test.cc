#include "ops/permute/permute.h"
#include "ops/route_map/route_map.h"
#include "ops/testing/gpu_test.h"
#include "ops/testing/op_test.h"
#include "ops/testing/owning_check.h"

namespace tessera {
namespace {

using testing::GpuTest;
using testing::OwningCheck;

struct Case {
  int64_t num_tokens = 0;
  int64_t bound = 0;  ///< of tokens; the extent is num_tokens where it is above
  int64_t width = 8;
  RouteMapSpec map = {};
};

OwningCheck check_of(const Case& c, uint64_t seed) {
  OwningCheck check;
  check.seed = seed;
  Random random(seed, 1);
  const auto num_experts = static_cast<uint64_t>(c.map.num_experts);
  std::vector<int32_t> idx;
  for (int64_t t = 0; t < c.bound; ++t) {
    const uint64_t first = random.next_below(num_experts);
    for (int64_t k = 0; k < c.map.top_k; ++k) {
      const auto expert = static_cast<int32_t>((first + static_cast<uint64_t>(k)) % num_experts);
      idx.push_back(random.next_below(8) == 0 ? -1 : expert);
    }
  }
  check.give("idx", testing::tensor_of_i32({c.bound, c.map.top_k}, idx));
  check.give("tokens", testing::tensor_of_i64({1}, {c.num_tokens}));
  return check;
}

/// What a program does with its tokens: one chain each, so that no gradients are added up.
enum class Way { kRows, kProbs, kSum, kWeighted, kProbsBack, kSumWithAddend, kWeightedWithAddend };
constexpr Way kWays[] = {Way::kRows,
                         Way::kProbs,
                         Way::kSum,
                         Way::kWeighted,
                         Way::kProbsBack,
                         Way::kSumWithAddend,
                         Way::kWeightedWithAddend};

bool is_weighted(Way way) {
  return way == Way::kWeighted || way == Way::kWeightedWithAddend;
}
bool has_addend(Way way) {
  return way == Way::kSumWithAddend || way == Way::kWeightedWithAddend;
}

class PermuteCuda : public GpuTest {
 protected:
  static testing::CheckedProgram build(const Case& c, Way way, DType dtype) {
    testing::CheckedProgram checked{Program("permute"), {}};
    Program& program = checked.program;
    ValueType tokens{DType::kI32, {c.bound, c.map.top_k}};
    if (c.bound > c.num_tokens) {
      tokens.ragged_dim = 0;
      tokens.extent = program.add_input("tokens", {DType::kI64, {1}});
    }
    const ValueId idx = program.add_input("idx", tokens);
    const auto map = program.add(make_route_map(c.map), {idx});
    const ValueId row_of = map[RouteMapOutput::kRowOfTK];
    const ValueId source = map[RouteMapOutput::kSourceR];
    std::vector<ValueId> results;
    if (way == Way::kProbs || way == Way::kProbsBack || is_weighted(way)) {
      const ValueId probs = program.add_input("probs", with_dtype(tokens, DType::kF32));
      checked.request.inputs.push_back(probs);
      if (!is_weighted(way))
        results = {program.add1(make_permute_probs(), {probs, source, row_of}, "probs_R")};
    }
    if (results.empty()) {
      const ValueId x = program.add_input("x", with_last_dim(with_dtype(tokens, dtype), c.width));
      checked.request.inputs.push_back(x);
      results = {program.add1(make_permute(), {x, source, row_of}, "rows")};
    }
    const ValueId rows = results[0];
    const auto add_sum = [&](const OperatorPtr& op, std::vector<ValueId> inputs, const char* name) {
      if (has_addend(way)) {
        inputs.push_back(
            program.add_input("addend", with_last_dim(with_dtype(tokens, dtype), c.width)));
        checked.request.inputs.push_back(inputs.back());
      }
      results.push_back(program.add1(op, inputs, name));
    };
    if (way == Way::kSum || way == Way::kSumWithAddend)
      add_sum(std::make_shared<Unpermute>(has_addend(way)), {rows, row_of, source}, "sum");
    if (is_weighted(way))
      add_sum(std::make_shared<UnpermuteWeighted>(has_addend(way)),
              {rows, checked.request.inputs[0], row_of, source}, "weighted");
    if (way == Way::kProbsBack)
      results.push_back(program.add1(make_unpermute_probs(), {rows, row_of, source}, "back"));
    program.set_outputs(results);
    checked.request.outputs = {results.back()};
    return checked;
  }

  void check(const Case& c, uint64_t seed) {
    for (const Way way : kWays) {
      SCOPED_TRACE(fmt::format("way {}, T={} of {}, H={}, {}", static_cast<int>(way), c.num_tokens,
                               c.bound, c.width, make_route_map(c.map)->attributes()));
      testing::check_on_gpu([&](DType dtype) { return build(c, way, dtype); }, cpu(), gpu(),
                            check_of(c, seed));
    }
  }
  void check_way(Way way, DType dtype) const {
    const Case c{13, 17, 72, {.num_experts = 8, .top_k = 2, .alignment = 4}};
    OwningCheck how = check_of(c, 9);
    how.dtypes = {dtype};
    how.once = true;
    testing::check_on_gpu([&](DType type) { return build(c, way, type); }, cpu(), gpu(), how);
  }
};

TEST_F(PermuteCuda, AnyShape) {
  uint64_t seed = 1;
  for (const int64_t num_tokens : {0, 1, 77}) {
    for (const int64_t slack : {0, 9}) {
      for (const int64_t width : {1, 4, 6, 8, 130, 264, 1032}) {
        check({.num_tokens = num_tokens,
               .bound = num_tokens + slack,
               .width = width,
               .map = {.num_experts = 6, .top_k = 3, .alignment = 4}},
              ++seed);
      }
    }
  }
}

TEST_F(PermuteCuda, TinyRows) {
  check_way(Way::kSumWithAddend, DType::kF32);
}

TEST_F(PermuteCuda, TinyWeightedRows) {
  check_way(Way::kWeighted, DType::kBF16);
}

TEST_F(PermuteCuda, TinyProbs) {
  check_way(Way::kProbsBack, DType::kF32);
}

TEST_F(PermuteCuda, OneExpertAndMany) {
  check({100, 100, 64, {.num_experts = 5, .top_k = 1}}, 1);
  check({300, 333, 2048, {.num_experts = 64, .top_k = 8, .alignment = 16}}, 2);
  check({300, 300, 72, {.num_experts = 64, .top_k = 9, .alignment = 128}}, 3);
  check({64, 64, 40, {.num_experts = 8, .top_k = 4, .local_experts = {2, 3}}}, 4);
  check({64, 70, 40, {.num_experts = 8, .top_k = 4, .pad_to_capacity = true, .rows_limit = 80}}, 5);
}

}  // namespace
}  // namespace tessera
