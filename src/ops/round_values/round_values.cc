#include "ops/round_values/round_values.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/fp8.h"
#include "ops/round_values/tally.h"

namespace tessera {
namespace {

std::string count_name(int64_t count) {
  return count == 0 ? "all" : fmt::format("{}", count);
}

}  // namespace

std::string_view narrow_name(NarrowNumber number) {
  switch (number) {
    case NarrowNumber::kE4M3:
      return "e4m3";
    case NarrowNumber::kE5M2:
      return "e5m2";
    case NarrowNumber::kE2M1:
      return "e2m1";
  }
  throw InternalError("unknown kind of number");
}

float largest_of(NarrowNumber number) {
  switch (number) {
    case NarrowNumber::kE4M3:
      return kLargestE4m3;
    case NarrowNumber::kE5M2:
      return kLargestE5m2;
    case NarrowNumber::kE2M1:
      return kLargestE2m1;
  }
  throw InternalError("unknown kind of number");
}

std::string CastSpec::to_string() const {
  if (delayed) return fmt::format("{} delayed", narrow_name(number));
  return fmt::format("{} {}x{}{}{}{}", narrow_name(number), count_name(width), count_name(length),
                     nested ? " nested" : "", rotated ? " rotated" : "",
                     stochastic ? " stochastic" : "");
}

RoundValues::RoundValues(const RoundValuesSpec& spec) : spec_(spec) {
  const CastSpec& cast = spec_.cast;
  require(cast.length >= 0 && cast.width >= 0, "{}: a scale for {} x {} values", kName, cast.width,
          cast.length);
  require(!cast.rotated || (cast.length == kRotatedLength && cast.width == 1),
          "{}: rotated are {} neighbours of a row or column, found blocks of {} x {}", kName,
          kRotatedLength, cast.width, cast.length);
  require(spec_.sum_dim == 0 || spec_.sum_dim == 1, "{}: a sum along dim {} of a matrix", kName,
          spec_.sum_dim);
  require(!spec_.offsets || spec_.group_rows.empty(),
          "{}: groups are known before the run or come with it, not both", kName);
  check_delayed();
}

void RoundValues::check_delayed() const {
  const CastSpec& cast = spec_.cast;
  if (!cast.delayed) {
    require(spec_.places.empty() && !spec_.tallies && !spec_.overflows,
            "{}: only delayed scales have places, are tallied or overflow", kName);
    return;
  }
  require(cast.length == 0 && cast.width == 0 && !cast.nested && !cast.stochastic &&
              !cast.rotated && cast.number != NarrowNumber::kE2M1,
          "{}: a delayed scale is of all values, which are rounded to the nearest of FP8", kName);
  require(!spec_.places.empty() && spec_.places.size() <= kMostPlaces &&
              std::ranges::min(spec_.places) >= 0,
          "{}: a delayed scale has 1 to {} places, found {}", kName, kMostPlaces,
          fmt::join(spec_.places, " "));
}

OperandSet<RoundValues::Input> RoundValues::input_set() const {
  return OperandSet<Input>{kX}.add(kOffsets, spec_.offsets).add(kScales, spec_.cast.delayed);
}

OperandSet<RoundValues::Output> RoundValues::output_set() const {
  return OperandSet<Output>{kY}.add(kTally, spec_.tallies);
}

OperatorPtr RoundValues::without_tally() const {
  RoundValuesSpec spec = spec_;
  spec.tallies = false;
  return make_round_values(spec);
}

std::string RoundValues::attributes() const {
  if (spec_.cast.delayed) {
    return fmt::format("{} {}{}{}", spec_.cast.to_string(), fmt::join(spec_.places, " "),
                       spec_.overflows ? ", overflows" : "", spec_.tallies ? ", tallied" : "");
  }
  return fmt::format("{} {}", spec_.cast.to_string(),
                     spec_.sum_dim == 1 ? "along rows" : "down columns");
}

std::vector<ValueType> RoundValues::infer(std::span<const ValueType> inputs) const {
  const OperandSet<Input> set = input_set();
  check_shape(*this, std::cmp_equal(inputs.size(), set.size()), "takes {} inputs, got {}",
              set.size(), inputs.size());
  const ValueType& x = inputs[kX];
  check_shape(*this, is_storage(x.dtype) && x.shape.rank() == 2 && x.ragged_dim <= 0,
              "takes f32 or bf16 [R, C], got {}", x.to_string());
  if (!spec_.group_rows.empty()) {
    const int64_t rows =
        std::accumulate(spec_.group_rows.begin(), spec_.group_rows.end(), int64_t{0});
    check_shape(*this, !x.ragged() && x.shape[0] == rows, "groups of {} rows in all, got {}", rows,
                x.to_string());
  }
  if (spec_.offsets) {
    check_shape(*this, inputs[kOffsets].dtype == DType::kI64 && inputs[kOffsets].shape.rank() == 1,
                "offsets must be i64 [E + 1], got {}", inputs[kOffsets].to_string());
  }
  if (!spec_.cast.delayed) return {x};
  const ValueType& scales = inputs[set.position(kScales)];
  check_shape(*this,
              scales.dtype == DType::kF32 && scales.shape.rank() == 1 &&
                  std::ranges::max(spec_.places) < scales.shape[0],
              "scales must be f32 [N] with places {}, got {}", fmt::join(spec_.places, " "),
              scales.to_string());
  if (!spec_.tallies) return {x};
  return {x, {.dtype = DType::kI64, .shape = {scales.shape[0], kTallyColumns}}};
}

OperatorPtr make_round_values(const RoundValuesSpec& spec) {
  return std::make_shared<RoundValues>(spec);
}

}  // namespace tessera
