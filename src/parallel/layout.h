#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// The axes along which a model is spread over ranks. The ranks of one pipeline stage are factored
/// twice: as TP · CP · DP for the dense parts, and as ETP · EP · EDP for the experts (Parallel
/// Folding, section 3.2).
enum class Axis : uint8_t {
  kTp,   ///< tensor parallelism of the dense parts
  kCp,   ///< context parallelism: a sequence's tokens
  kDp,   ///< data parallelism of the dense parts
  kEtp,  ///< tensor parallelism of the experts
  kEp,   ///< expert parallelism
  kEdp,  ///< data parallelism of the experts
  kPp,   ///< pipeline stages, common to both
};
inline constexpr int kNumAxes = 7;

/// The most ranks that a layout may have.
inline constexpr int64_t kMaxRanks = 1'000'000;

/// "tp", "cp", ...
std::string_view axis_name(Axis axis);

/// What a user asks for. Degrees left 0 follow from the others: `dp` from the number of ranks, and
/// EDP always.
struct LayoutSpec {
  int64_t tp = 1;
  int64_t cp = 1;
  int64_t dp = 0;
  int64_t etp = 1;
  int64_t ep = 1;
  int64_t pp = 1;
  /// The axes of each factoring from the one whose neighbours are neighbouring ranks outwards.
  std::string dense_order = "tp-cp-dp-pp";
  std::string expert_order = "etp-ep-edp-pp";
};

/// The fewest ranks that the degrees fit: with `dp` open, stages of the least common multiple of
/// TP · CP and ETP · EP. Throws UserError for degrees below 1 and beyond kMaxRanks ranks.
int64_t least_ranks(const LayoutSpec& spec);

/// Which rank does what: an immutable value. Groups are lists of ranks and passed explicitly to
/// whoever communicates in them.
class Layout {
 public:
  /// Throws UserError with the product that fails and the nearest valid choices: for degrees that
  /// do not multiply to the number of ranks, products beyond kMaxRanks, and for orders that would
  /// give a rank another stage among the experts than among the dense parts.
  Layout(const LayoutSpec& spec, int64_t num_ranks);

  int64_t num_ranks() const { return num_ranks_; }
  int64_t degree(Axis axis) const { return axes_[index(axis)].degree; }
  /// Where a rank is along an axis, in [0, degree).
  int64_t coordinate(int64_t rank, Axis axis) const;
  /// The ranks that differ from `rank` along `axes` alone, `rank` among them, the first axis
  /// counting fastest. All axes must be of one factoring (PP is of both).
  std::vector<int64_t> group(int64_t rank, std::span<const Axis> axes) const;
  std::vector<int64_t> group(int64_t rank, Axis axis) const;
  /// All different groups along `axes`, by their first ranks.
  std::vector<std::vector<int64_t>> groups(std::span<const Axis> axes) const;
  std::vector<std::vector<int64_t>> groups(Axis axis) const;

 private:
  struct Extent {
    int64_t degree = 1;
    int64_t stride = 1;  ///< ranks from one coordinate to the next
  };

  static size_t index(Axis axis) { return static_cast<size_t>(axis); }
  void place(std::span<const Axis> order);

  int64_t num_ranks_;
  std::array<Extent, kNumAxes> axes_;
};

/// "8 ranks; dense parts: tp 2 x cp 1 x dp 4 x pp 1; experts: etp 1 x ep 8 x edp 1 x pp 1".
std::string describe_degrees(const Layout& layout);

/// The layout as text for a person: degrees, each rank's coordinates, and each axis's groups.
std::string describe_layout(const Layout& layout);

}  // namespace tessera
