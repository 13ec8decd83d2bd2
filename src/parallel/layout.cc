#include "parallel/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/id_vector.h"
#include "core/text/names.h"
#include "core/text/nearest.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, kNumAxes> kAxisNames = {"tp", "cp",  "dp", "etp",
                                                               "ep", "edp", "pp"};
constexpr std::array kDense = {Axis::kTp, Axis::kCp, Axis::kDp, Axis::kPp};
constexpr std::array kExpert = {Axis::kEtp, Axis::kEp, Axis::kEdp, Axis::kPp};
constexpr std::array kAllAxes = {Axis::kTp, Axis::kCp,  Axis::kDp, Axis::kEtp,
                                 Axis::kEp, Axis::kEdp, Axis::kPp};

/// Reads "tp-cp-dp-pp": each axis of the factoring once.
std::vector<Axis> parse_order(std::string_view text, std::span<const Axis> axes,
                              std::string_view key) {
  std::vector<std::string> names;
  for (const Axis axis : axes) names.emplace_back(axis_name(axis));
  std::vector<Axis> order;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = std::min(rest.find('-'), rest.size());
    const std::string name(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
    const auto found = std::ranges::find(names, name);
    require(found != names.end(), "{} \"{}\": '{}' is none of the axes {}{}", key, text, name,
            fmt::join(names, ", "), did_you_mean(name, names));
    order.push_back(axes[found - names.begin()]);
  }
  for (const Axis axis : axes) {
    require(std::ranges::count(order, axis) == 1, "{} \"{}\" must name each of {} once", key, text,
            fmt::join(names, ", "));
  }
  return order;
}

/// A degree with its name, for messages.
struct NamedDegree {
  std::string_view name;
  int64_t degree;
};

void check_degrees(const LayoutSpec& spec) {
  const NamedDegree degrees[] = {
      {"tp", spec.tp}, {"cp", spec.cp}, {"etp", spec.etp}, {"ep", spec.ep}, {"pp", spec.pp}};
  for (const auto& [name, degree] : degrees) {
    require(degree >= 1, "parallel.{} is {}; it must be at least 1", name, degree);
    require(degree <= kMaxRanks, "parallel.{} is {}; it must be at most {}", name, degree,
            kMaxRanks);
  }
  require(spec.dp >= 0, "parallel.dp is {}; it must be at least 1, or 0 for what is left", spec.dp);
  require(spec.dp <= kMaxRanks, "parallel.dp is {}; it must be at most {}", spec.dp, kMaxRanks);
}

/// The product of degrees that are at most kMaxRanks each, refused beyond kMaxRanks.
int64_t multiply(std::initializer_list<NamedDegree> degrees) {
  int64_t product = 1;
  for (const NamedDegree& next : degrees) {
    product *= next.degree;
    if (product <= kMaxRanks) continue;
    std::vector<std::string> parts;
    for (const auto& [name, degree] : degrees) parts.push_back(fmt::format("{} {}", name, degree));
    user_error("{} takes more than {} ranks, the most that a layout may have; lower one of them",
               fmt::join(parts, " x "), kMaxRanks);
  }
  return product;
}

/// DP from the number of ranks.
int64_t resolve_dp(const LayoutSpec& spec, int64_t num_ranks) {
  const int64_t others = multiply({{"tp", spec.tp}, {"cp", spec.cp}, {"pp", spec.pp}});
  if (spec.dp == 0) {
    require(num_ranks >= others, "tp {} x cp {} x pp {} = {} ranks, but there {} {}; start {}",
            spec.tp, spec.cp, spec.pp, others, num_ranks == 1 ? "is" : "are", num_ranks, others);
    require(num_ranks % others == 0,
            "tp {} x cp {} x pp {} = {} does not divide the {} ranks; take {} or {} ranks", spec.tp,
            spec.cp, spec.pp, others, num_ranks, num_ranks / others * others,
            (num_ranks / others + 1) * others);
    return num_ranks / others;
  }
  const int64_t all =
      multiply({{"tp", spec.tp}, {"cp", spec.cp}, {"dp", spec.dp}, {"pp", spec.pp}});
  require(all == num_ranks, "tp {} x cp {} x dp {} x pp {} = {}, but there are {} ranks; {}",
          spec.tp, spec.cp, spec.dp, spec.pp, all, num_ranks,
          num_ranks % others == 0 ? fmt::format("dp {} would fit", num_ranks / others)
                                  : fmt::format("take {} ranks, or other degrees", all));
  return spec.dp;
}

/// EDP from the ranks of a stage.
int64_t resolve_edp(const LayoutSpec& spec, int64_t stage_ranks) {
  const int64_t taken = multiply({{"etp", spec.etp}, {"ep", spec.ep}});
  if (stage_ranks % taken == 0) return stage_ranks / taken;
  const std::string stage =
      fmt::format("the {} ranks of a pipeline stage (tp {} x cp {} x dp {})", stage_ranks, spec.tp,
                  spec.cp, stage_ranks / (spec.tp * spec.cp));
  require(stage_ranks % spec.etp == 0, "etp {} does not divide {}; the nearest etp is {}", spec.etp,
          stage, nearest_divisors(stage_ranks, spec.etp));
  user_error("etp {} x ep {} = {} does not divide {}; with etp {} the nearest ep is {}", spec.etp,
             spec.ep, taken, stage, spec.etp, nearest_divisors(stage_ranks / spec.etp, spec.ep));
}

bool is_in(std::span<const Axis> axes, Axis axis) {
  return std::ranges::find(axes, axis) != axes.end();
}

}  // namespace

std::string_view axis_name(Axis axis) {
  return kAxisNames[number_of(axis)];
}

int64_t least_ranks(const LayoutSpec& spec) {
  check_degrees(spec);
  if (spec.dp > 0)
    return multiply({{"tp", spec.tp}, {"cp", spec.cp}, {"dp", spec.dp}, {"pp", spec.pp}});
  const int64_t stage = std::lcm(multiply({{"tp", spec.tp}, {"cp", spec.cp}}),
                                 multiply({{"etp", spec.etp}, {"ep", spec.ep}}));
  require(stage <= kMaxRanks / spec.pp,
          "tp {} x cp {} and etp {} x ep {} fit stages of {} ranks, and pp {} of these are more "
          "than the {} ranks that a layout may have",
          spec.tp, spec.cp, spec.etp, spec.ep, stage, spec.pp, kMaxRanks);
  return stage * spec.pp;
}

Layout::Layout(const LayoutSpec& spec, int64_t num_ranks) : num_ranks_(num_ranks) {
  require(num_ranks >= 1, "a layout of {} ranks: there must be at least 1", num_ranks);
  require(num_ranks <= kMaxRanks, "a layout of {} ranks: there may be at most {}", num_ranks,
          kMaxRanks);
  check_degrees(spec);
  const auto dense = parse_order(spec.dense_order, kDense, "parallel.dense_order");
  const auto expert = parse_order(spec.expert_order, kExpert, "parallel.expert_order");
  const int64_t dp = resolve_dp(spec, num_ranks);
  const int64_t edp = resolve_edp(spec, spec.tp * spec.cp * dp);
  for (const auto& [axis, degree] : {std::pair{Axis::kTp, spec.tp},
                                     {Axis::kCp, spec.cp},
                                     {Axis::kDp, dp},
                                     {Axis::kEtp, spec.etp},
                                     {Axis::kEp, spec.ep},
                                     {Axis::kEdp, edp},
                                     {Axis::kPp, spec.pp}})
    axes_[index(axis)].degree = degree;
  place(dense);
  const int64_t dense_stride = axes_[index(Axis::kPp)].stride;
  place(expert);
  const int64_t expert_stride = axes_[index(Axis::kPp)].stride;
  require(
      spec.pp == 1 || dense_stride == expert_stride,
      "stages are {} ranks apart by parallel.dense_order \"{}\" and {} by "
      "parallel.expert_order \"{}\", so that a rank would be in two stages; put pp last in both",
      dense_stride, spec.dense_order, expert_stride, spec.expert_order);
}

void Layout::place(std::span<const Axis> order) {
  int64_t stride = 1;
  for (const Axis axis : order) {
    axes_[index(axis)].stride = stride;
    stride *= axes_[index(axis)].degree;
  }
}

int64_t Layout::coordinate(int64_t rank, Axis axis) const {
  const Extent& extent = axes_[index(axis)];
  return rank / extent.stride % extent.degree;
}

std::vector<int64_t> Layout::group(int64_t rank, std::span<const Axis> axes) const {
  ensure(std::ranges::all_of(axes, [](Axis a) { return is_in(kDense, a); }) ||
             std::ranges::all_of(axes, [](Axis a) { return is_in(kExpert, a); }),
         "a group along axes of both factorings");
  std::vector<int64_t> ranks = {rank};
  for (const Axis axis : axes) ranks[0] -= coordinate(rank, axis) * axes_[index(axis)].stride;
  for (const Axis axis : axes) {
    const Extent& extent = axes_[index(axis)];
    const size_t count = ranks.size();
    for (int64_t i = 1; i < extent.degree; ++i) {
      for (size_t k = 0; k < count; ++k) ranks.push_back(ranks[k] + i * extent.stride);
    }
  }
  return ranks;
}

std::vector<int64_t> Layout::group(int64_t rank, Axis axis) const {
  return group(rank, std::span(&axis, 1));
}

std::vector<std::vector<int64_t>> Layout::groups(std::span<const Axis> axes) const {
  std::vector<std::vector<int64_t>> result;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    const bool is_first =
        std::ranges::all_of(axes, [&](Axis a) { return coordinate(rank, a) == 0; });
    if (is_first) result.push_back(group(rank, axes));
  }
  return result;
}

std::vector<std::vector<int64_t>> Layout::groups(Axis axis) const {
  return groups(std::span(&axis, 1));
}

std::string describe_degrees(const Layout& layout) {
  const auto degrees = [&](std::span<const Axis> axes) {
    std::vector<std::string> parts;
    for (const Axis axis : axes)
      parts.push_back(fmt::format("{} {}", axis_name(axis), layout.degree(axis)));
    return fmt::format("{}", fmt::join(parts, " x "));
  };
  return fmt::format("{} ranks; dense parts: {}; experts: {}", layout.num_ranks(), degrees(kDense),
                     degrees(kExpert));
}

std::string describe_layout(const Layout& layout) {
  std::string text = describe_degrees(layout) + "\n\n";
  text += "  rank";
  for (const Axis axis : kAllAxes) text += fmt::format("{:>5}", axis_name(axis));
  for (int64_t rank = 0; rank < layout.num_ranks(); ++rank) {
    text += fmt::format("\n{:>6}", rank);
    for (const Axis axis : kAllAxes) text += fmt::format("{:>5}", layout.coordinate(rank, axis));
  }
  text += "\n\n";
  for (const Axis axis : kAllAxes) {
    if (layout.degree(axis) == 1) continue;
    std::vector<std::string> parts;
    for (const auto& ranks : layout.groups(axis))
      parts.push_back(fmt::format("[{}]", fmt::join(ranks, " ")));
    text += fmt::format("{:>4} groups: {}\n", axis_name(axis), fmt::join(parts, " "));
  }
  return text;
}

}  // namespace tessera
