#pragma once

#include <fmt/ranges.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "ops/grouped_matmul/grouped_matmul.h"
#include "ops/permute/permute.h"
#include "ops/route_map/route_map.h"
#include "ops/testing/op_test.h"
#include "ops/testing/program_run.h"

namespace tessera::testing {

/// Tokens that are routed at random, some nowhere, to the experts of one product.
struct GatherCase {
  int64_t num_tokens = 0;
  int64_t slack = 0;  ///< tokens at the bound beyond those there are
  std::vector<int64_t> sizes = {};
  int64_t top_k = 2;
  int64_t width = 8;
  int64_t alignment = 1;  ///< rows without a token fill each expert's up to a multiple
  /// Every expert but this one gets no token; -1: all may get some.
  int64_t only_expert = -1;

  int64_t bound() const { return num_tokens + slack; }
  int64_t num_experts() const { return std::ssize(sizes); }
  int64_t total() const {
    int64_t sum = 0;
    for (const int64_t size : sizes) sum += size;
    return sum;
  }
  std::string to_string() const {
    return fmt::format("T={} of {} K={} H={} experts of {} rows aligned to {}, only {}", num_tokens,
                       bound(), top_k, width, sizes, alignment, only_expert);
  }
};

/// The routing of a case: inputs "idx" and "tokens" of its program.
inline std::map<std::string, OwnedTensor> make_routing(const GatherCase& c, uint64_t seed) {
  Random random(seed, 1);
  std::vector<int32_t> idx;
  for (int64_t t = 0; t < c.bound(); ++t) {
    const uint64_t first = random.next_below(static_cast<uint64_t>(c.num_experts()));
    for (int64_t k = 0; k < c.top_k; ++k) {
      const auto expert = (static_cast<int64_t>(first) + k) % c.num_experts();
      const bool is_out = c.only_expert >= 0 && expert != c.only_expert;
      idx.push_back(is_out || random.next_below(8) == 0 ? -1 : static_cast<int32_t>(expert));
    }
  }
  std::map<std::string, OwnedTensor> routing;
  routing.emplace("idx", tensor_of_i32({c.bound(), c.top_k}, idx));
  routing.emplace("tokens", tensor_of_i64({1}, {c.num_tokens}));
  return routing;
}

/// The first product of experts, whose gradient has both kinds of product, on rows that it gathers
/// or on those that permute makes, with the gradients of x and of the weight.
struct GatherProgram {
  Program program{"gathered"};
  DifferentiateRequest request;
  ValueId x = -1, weight = -1, y = -1;

  GatherProgram(const GatherCase& c, bool fused, DType dtype) {
    ValueType idx{DType::kI32, {c.bound(), c.top_k}};
    ValueType tokens{dtype, {c.bound(), c.width}};
    if (c.slack > 0) idx.extent = tokens.extent = program.add_input("tokens", {DType::kI64, {1}});
    if (c.slack > 0) idx.ragged_dim = tokens.ragged_dim = 0;
    const auto map = program.add(
        make_route_map(
            {.num_experts = c.num_experts(), .top_k = c.top_k, .alignment = c.alignment}),
        {program.add_input("idx", idx)});
    x = program.add_input("x", tokens);
    weight = program.add_weight("w", {dtype, {c.total(), c.width}});
    const ValueId source = map[RouteMapOutput::kSourceR];
    const ValueId row_of = map[RouteMapOutput::kRowOfTK];
    const ValueId offsets = map[RouteMapOutput::kOffsets];
    if (fused) {
      y = program.add1(make_grouped_matmul({.group_sizes = c.sizes, .gather = true}),
                       {x, weight, offsets, source, row_of}, "y");
    } else {
      const ValueId rows = program.add1(make_permute(), {x, source, row_of}, "rows");
      y = program.add1(make_grouped_matmul({.group_sizes = c.sizes}), {rows, weight, offsets}, "y");
    }
    program.set_outputs({y});
    request = {.outputs = {y}, .inputs = {x}};
  }
};

inline void copy_to(const Tensor& to, const Tensor& from) {
  if (to.num_bytes() > 0) std::memcpy(to.data, from.data, to.num_bytes());
}

/// y, the gradient of x and that of the weight, which held something before, on random numbers.
inline std::vector<OwnedTensor> run_gather(const GatherCase& c, bool fused, DType dtype,
                                           uint64_t seed, const Backend& backend) {
  const GatherProgram built(c, fused, dtype);
  const ProgramRun run(built.program, built.request, backend);
  for (const auto& [name, tensor] : make_routing(c, seed)) {
    if (name != "tokens" || c.slack > 0) copy_to(run.value(built.program.find(name)), tensor);
  }
  Random random(seed, 2);
  for (const Tensor& to :
       {run.value(built.x), run.value(built.weight), run.grad(built.y), run.grad(built.weight)})
    copy_to(to, random_tensor(to.dtype, to.shape, random));
  run.run_forward();
  run.run_backward();
  std::vector<OwnedTensor> results;
  for (const Tensor& tensor : {run.value(built.y), run.grad(built.x), run.grad(built.weight)})
    copy_to(results.emplace_back(tensor.dtype, tensor.shape), tensor);
  return results;
}

/// Expects the same bits of both programs.
inline void expect_bits_of_permute(const GatherCase& c, DType dtype, uint64_t seed,
                                   const Backend& backend) {
  const auto expected = run_gather(c, false, dtype, seed, backend);
  const auto found = run_gather(c, true, dtype, seed, backend);
  size_t result = 0;
  for (const char* const name : {"y", "grad of x", "grad of the weight"}) {
    expect_bitwise_equal(found[result], expected[result],
                         fmt::format("{} {}: {}", dtype_name(dtype), c.to_string(), name));
    ++result;
  }
}

}  // namespace tessera::testing
