#include <array>
#include <numeric>
#include <vector>

#include "core/random.h"
#include "ops/round_values/round_math.h"
#include "ops/round_values/round_values.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Blocks beside each other that are rounded together, and so read row by row.
constexpr int64_t kPanelBlocks = 64;

struct Rectangle {
  int64_t first_row = 0;
  int64_t end_row = 0;
  int64_t first_column = 0;
  int64_t end_column = 0;
};

/// Rounds the values of one matrix.
template <typename T, typename Number>
class Rounder {
 public:
  Rounder(const RoundValuesSpec& spec, const Tensor& x, const Tensor& y)
      : cast_(spec.cast),
        sum_dim_(spec.sum_dim),
        x_(x.as<T>()),
        y_(y.as<T>()),
        num_columns_(x.shape[1]),
        largest_(largest_of(spec.cast.number)) {}

  /// The rows of one group.
  void round_group(int64_t first, int64_t end) const {
    if (first == end || num_columns_ == 0) return;
    const int64_t rows = block_rows(end - first);
    const int64_t columns = block_columns();
    const float unit = cast_.nested ? unit_of(first, end) : 1.0F;
    const int64_t panel = columns * kPanelBlocks;
    const int64_t across = (num_columns_ + panel - 1) / panel;
    const int64_t num_panels = (end - first + rows - 1) / rows * across;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < num_panels; ++i) {
      const int64_t row = first + i / across * rows;
      const int64_t column = i % across * panel;
      const Rectangle area{.first_row = row,
                           .end_row = std::min(row + rows, end),
                           .first_column = column,
                           .end_column = std::min(column + panel, num_columns_)};
      cast_.rotated ? round_rotated(area, columns, unit) : round_panel(area, columns, unit);
    }
  }

 private:
  int64_t block_rows(int64_t num_rows) const {
    const int64_t rows = sum_dim_ == 1 ? cast_.width : cast_.length;
    return rows == 0 ? num_rows : rows;
  }
  int64_t block_columns() const {
    const int64_t columns = sum_dim_ == 1 ? cast_.length : cast_.width;
    return columns == 0 ? num_columns_ : columns;
  }

  float value(int64_t row, int64_t column) const {
    return static_cast<float>(x_[row * num_columns_ + column]);
  }
  void store(int64_t row, int64_t column, float value) const {
    y_[row * num_columns_ + column] = T(value);
  }

  /// The largest magnitude of rows, NaN left out.
  float unit_of(int64_t first, int64_t end) const {
    float amax = 0;
#pragma omp parallel for schedule(static) reduction(max : amax)
    for (int64_t i = first * num_columns_; i < end * num_columns_; ++i)
      amax = std::fmax(amax, std::fabs(static_cast<float>(x_[i])));
    return std::isfinite(amax) ? least_scale(amax, largest_ * kLargestE4m3) : 1.0F;
  }

  /// By what a block's rounded values are multiplied; 0 where all of them are too small for it, NaN
  /// where one is infinite.
  float scale_of(float amax, float unit) const {
    if (!std::isfinite(amax)) return NAN;
    if (!cast_.nested) return least_scale(amax, largest_);
    return static_cast<float>(E4m3(amax / largest_ / unit)) * unit;
  }

  float round(float value, float scale, uint64_t place) const {
    if (scale == 0) return std::isnan(value) ? value : std::copysign(0.0F, value);
    const float scaled = value / scale;
    if (!cast_.stochastic) return round_nearest<Number>(scaled) * scale;
    const uint64_t random = mix(std::bit_cast<uint32_t>(value), place);
    return round_up_as_often<Number>(scaled, static_cast<float>(random >> 40) * 0x1p-24F) * scale;
  }
  void round_into(int64_t row, int64_t column, float value, float scale) const {
    store(row, column, round(value, scale, row * num_columns_ + column));
  }

  /// Blocks beside each other.
  void round_panel(const Rectangle& area, int64_t columns, float unit) const {
    std::array<float, kPanelBlocks> factors{};
    const auto for_each_value = [&](const auto& visit) {
      for (int64_t row = area.first_row; row < area.end_row; ++row) {
        int64_t column = area.first_column;
        for (int64_t block = 0; column < area.end_column; ++block) {
          const int64_t end = std::min(column + columns, area.end_column);
          for (; column < end; ++column) visit(row, column, factors[block]);
        }
      }
    };
    for_each_value([&](int64_t row, int64_t column, float& amax) {
      amax = std::fmax(amax, std::fabs(value(row, column)));
    });
    for (float& factor : factors) factor = scale_of(factor, unit);
    for_each_value([&](int64_t row, int64_t column, float scale) {
      round_into(row, column, value(row, column), scale);
    });
  }

  /// The same, of a row or column each, which are rotated first.
  void round_rotated(const Rectangle& area, int64_t columns, float unit) const {
    for (int64_t row = area.first_row; row < area.end_row; row += block_rows(0)) {
      for (int64_t column = area.first_column; column < area.end_column; column += columns) {
        const bool along_row = sum_dim_ == 1;
        const int64_t left = along_row ? area.end_column - column : area.end_row - row;
        round_turned(row, column, std::min(left, kRotatedLength), unit);
      }
    }
  }

  void round_turned(int64_t row, int64_t column, int64_t count, float unit) const {
    std::array<float, kRotatedLength> values{};
    const int64_t down = sum_dim_ == 1 ? 0 : 1;
    for (int64_t i = 0; i < count; ++i) values[i] = value(row + i * down, column + i * (1 - down));
    int64_t done = 0;
    for (int64_t size = kRotatedLength; size > 0; size /= 2) {
      if (done + size > count) continue;
      rotate(values.data() + done, size);
      done += size;
    }
    float amax = 0;
    for (int64_t i = 0; i < count; ++i) amax = std::fmax(amax, std::fabs(values[i]));
    const float scale = scale_of(amax, unit);
    for (int64_t i = 0; i < count; ++i)
      round_into(row + i * down, column + i * (1 - down), values[i], scale);
  }

  const CastSpec cast_;
  const int sum_dim_;
  const T* const x_;
  T* const y_;
  const int64_t num_columns_;
  const float largest_;
};

template <typename T, typename Number>
void round_matrix(const RoundValues& op, const Args<RoundValues>& args) {
  const RoundValuesSpec& spec = op.spec();
  const Tensor& x = args.in(RoundValues::kX);
  const Rounder<T, Number> rounder(spec, x, args.out(RoundValues::kY));
  if (spec.offsets) {
    const auto offsets = args.in(RoundValues::kOffsets).span<int64_t>();
    for (size_t e = 0; e + 1 < offsets.size(); ++e) rounder.round_group(offsets[e], offsets[e + 1]);
    return;
  }
  int64_t first = 0;
  for (const int64_t rows : spec.group_rows) {
    rounder.round_group(first, first + rows);
    first += rows;
  }
  if (spec.group_rows.empty()) rounder.round_group(0, x.shape[0]);
}

void round_values(const RoundValues& op, const Args<RoundValues>& args) {
  with_storage(args.in(RoundValues::kX).dtype, [&](auto storage) {
    using T = decltype(storage);
    switch (op.spec().cast.number) {
      case NarrowNumber::kE4M3:
        return round_matrix<T, E4m3>(op, args);
      case NarrowNumber::kE5M2:
        return round_matrix<T, E5m2>(op, args);
      case NarrowNumber::kE2M1:
        return round_matrix<T, E2m1>(op, args);
    }
    throw InternalError("unknown kind of number");
  });
}

}  // namespace

void add_round_values_cpu(KernelTable& table) {
  add_kernel<RoundValues>(table, round_values);
}

}  // namespace tessera
