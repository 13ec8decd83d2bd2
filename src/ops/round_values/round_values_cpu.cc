#include <algorithm>
#include <array>

#include "ops/cpu_dispatch.h"
#include "ops/round_values/round_math.h"
#include "ops/round_values/round_values.h"
#include "ops/round_values/tally.h"
#include "ops/simd.h"
#include "ops/storage.h"

namespace tessera {
namespace {

/// Columns that are rounded together.
constexpr int64_t kChunk = 1024;
/// The same where values are rotated, of which 16 rows are held.
constexpr int64_t kRotatedChunk = 64;

/// Values of a group that are not worth a second thread.
constexpr int64_t kRoundedAlone = 8192;

using Chunk = std::array<float, kChunk>;

/// Rows of a group, and columns.
struct Area {
  int64_t first_row = 0;
  int64_t end_row = 0;
  int64_t first_column = 0;
  int64_t end_column = 0;
};

/// Turns `count` rows, a power of two up to 16, of `width` values: by signs and a Hadamard matrix
/// (Sylvester's construction), over the root of its size.
void rotate_rows(float (*rows)[kRotatedChunk], int64_t count, int64_t width) {
  const float factor = 1 / std::sqrt(static_cast<float>(count));
  for (int64_t i = 0; i < count; ++i) {
    const float sign = (kRotationSigns >> i & 1U) != 0 ? -factor : factor;
    for (int64_t c = 0; c < width; ++c) rows[i][c] *= sign;
  }
  for (int64_t half = 1; half < count; half *= 2) {
    for (int64_t i = 0; i < count; ++i) {
      if ((i & half) != 0) continue;
      for (int64_t c = 0; c < width; ++c) {
        const float sum = rows[i][c] + rows[i + half][c];
        rows[i + half][c] = rows[i][c] - rows[i + half][c];
        rows[i][c] = sum;
      }
    }
  }
}

/// Rounds the values of one matrix.
template <typename T, typename Number>
class Rounder {
 public:
  Rounder(const RoundValuesSpec& spec, const Tensor& x, const Tensor& y)
      : cast_(spec.cast),
        sum_dim_(spec.sum_dim),
        x_(x.as<T>()),
        y_(y.as<T>()),
        num_columns_(x.shape[1]) {}

  /// The rows of one group.
  void round_group(int64_t first, int64_t end) const {
    if (first == end || num_columns_ == 0) return;
    const int64_t rows = block_rows(end - first);
    const int64_t columns = block_columns();
    const float unit = cast_.nested ? unit_of(first, end) : 1.0F;
    // Whole blocks, as many as a chunk takes.
    const int64_t chunk = cast_.rotated ? kRotatedChunk : kChunk;
    const int64_t panel = std::max(columns, chunk / columns * columns);
    const int64_t across = (num_columns_ + panel - 1) / panel;
    const int64_t num_panels = (end - first + rows - 1) / rows * across;
#pragma omp parallel for schedule(static) if ((end - first) * num_columns_ > kRoundedAlone)
    for (int64_t i = 0; i < num_panels; ++i) {
      const int64_t row = first + i / across * rows;
      const int64_t column = i % across * panel;
      const Area area{.first_row = row,
                      .end_row = std::min(row + rows, end),
                      .first_column = column,
                      .end_column = std::min(column + panel, num_columns_)};
      if (cast_.rotated) {
        sum_dim_ == 0 ? round_turned_rows(area, unit) : round_turned_columns(area, unit);
      } else {
        columns > kChunk ? round_wide(area, unit) : round_panel(area, columns, unit);
      }
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

  int64_t place(int64_t row, int64_t column) const {
    return row * num_columns_ + column;
  }
  void load(Chunk& values, int64_t row, int64_t column, int64_t count) const {
    simd::convert(values.data(), x_ + place(row, column), count);
  }

  static float greater(float value, float amax) {
    return value > amax ? value : amax;
  }

  /// The largest magnitude of an area, NaN left out.
  float largest_of_area(const Area& area) const {
    Chunk values;
    float amax = 0;
    for (int64_t row = area.first_row; row < area.end_row; ++row) {
      for (int64_t column = area.first_column; column < area.end_column; column += kChunk) {
        const int64_t count = std::min(kChunk, area.end_column - column);
        load(values, row, column, count);
        for (int64_t c = 0; c < count; ++c) amax = greater(std::abs(values[c]), amax);
      }
    }
    return amax;
  }

  float unit_of(int64_t first, int64_t end) const {
    return unit_of_group<Number>(largest_of_area({first, end, 0, num_columns_}));
  }

  float scale_of(float amax, float unit) const {
    return scale_of_block<Number>(amax, unit, cast_.nested);
  }

  /// Rounds `values`, of a row from a place on, each with the scale of its column.
  void round_row(Chunk& values, const Chunk& scales, int64_t first, int64_t count) const {
    if (cast_.stochastic) {
      for (int64_t c = 0; c < count; ++c) {
        const float uniform =
            uniform_of(values[c], static_cast<uint32_t>(first) + static_cast<uint32_t>(c));
        values[c] =
            round_up_as_often<Number>(divide_by_scale(values[c], scales[c]), uniform) * scales[c];
      }
    } else {
      for (int64_t c = 0; c < count; ++c)
        values[c] = round_nearest<Number>(divide_by_scale(values[c], scales[c])) * scales[c];
    }
    simd::convert(y_ + first, values.data(), count);
  }

  /// Blocks beside each other, all in one chunk.
  void round_panel(const Area& area, int64_t columns, float unit) const {
    const int64_t count = area.end_column - area.first_column;
    Chunk values;
    Chunk scales;
    std::fill_n(scales.data(), count, 0.0F);
    for (int64_t row = area.first_row; row < area.end_row; ++row) {
      load(values, row, area.first_column, count);
      for (int64_t c = 0; c < count; ++c) scales[c] = greater(std::abs(values[c]), scales[c]);
    }
    spread_scales(scales, columns, count, unit);
    for (int64_t row = area.first_row; row < area.end_row; ++row) {
      load(values, row, area.first_column, count);
      round_row(values, scales, place(row, area.first_column), count);
    }
  }

  /// The scale of each block for each of its columns, of which there are the largest values.
  void spread_scales(Chunk& scales, int64_t columns, int64_t count, float unit) const {
    for (int64_t first = 0; first < count; first += columns) {
      const int64_t end = std::min(first + columns, count);
      float amax = 0;
      for (int64_t c = first; c < end; ++c) amax = greater(scales[c], amax);
      std::fill(scales.data() + first, scales.data() + end, scale_of(amax, unit));
    }
  }

  /// One block of more columns than a chunk has.
  void round_wide(const Area& area, float unit) const {
    Chunk values;
    Chunk scales;
    scales.fill(scale_of(largest_of_area(area), unit));
    for (int64_t row = area.first_row; row < area.end_row; ++row) {
      for (int64_t column = area.first_column; column < area.end_column; column += kChunk) {
        const int64_t count = std::min(kChunk, area.end_column - column);
        load(values, row, column, count);
        round_row(values, scales, place(row, column), count);
      }
    }
  }

  using Turned = float[kRotatedLength][kRotatedChunk];

  /// Up to 16 rows, of as many columns as are turned together.
  void round_turned_rows(const Area& area, float unit) const {
    const int64_t count = area.end_row - area.first_row;
    const int64_t width = area.end_column - area.first_column;
    Turned rows;
    for (int64_t i = 0; i < count; ++i)
      simd::convert(rows[i], x_ + place(area.first_row + i, area.first_column), width);
    rotate_all(rows, count, width);
    Chunk values;
    Chunk scales;
    std::fill_n(scales.data(), width, 0.0F);
    for (int64_t i = 0; i < count; ++i)
      for (int64_t c = 0; c < width; ++c) scales[c] = greater(std::abs(rows[i][c]), scales[c]);
    spread_scales(scales, 1, width, unit);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(rows[i], width, values.data());
      round_row(values, scales, place(area.first_row + i, area.first_column), width);
    }
  }

  /// Columns of one row, by 16.
  void round_turned_columns(const Area& area, float unit) const {
    for (int64_t first = area.first_column; first < area.end_column; first += kRotatedLength) {
      const int64_t count = std::min(kRotatedLength, area.end_column - first);
      Chunk values;
      load(values, area.first_row, first, count);
      Turned rows;
      for (int64_t i = 0; i < count; ++i) rows[i][0] = values[i];
      rotate_all(rows, count, 1);
      for (int64_t i = 0; i < count; ++i) values[i] = rows[i][0];
      Chunk scales;
      for (int64_t i = 0; i < count; ++i) scales[i] = std::abs(values[i]);
      spread_scales(scales, count, count, unit);
      round_row(values, scales, place(area.first_row, first), count);
    }
  }

  /// Where there are fewer than 16, the largest powers of two of them.
  static void rotate_all(Turned& rows, int64_t count, int64_t width) {
    int64_t done = 0;
    for (int64_t size = kRotatedLength; size > 0; size /= 2) {
      if (done + size > count) continue;
      rotate_rows(rows + done, size, width);
      done += size;
    }
  }

  const CastSpec cast_;
  const int sum_dim_;
  const T* const x_;
  T* const y_;
  const int64_t num_columns_;
};

/// What was seen of values that a delayed scale rounds.
struct Seen {
  float amax = 0;
  int64_t saturated = 0;
  int64_t nonfinite = 0;
};

/// Rounds the values of a chunk where they are.
template <typename Number>
Seen round_chunk(Chunk& values, int64_t count, const DelayedScale& by) {
  float amax = 0;
  int32_t saturated = 0;
  int32_t nonfinite = 0;
  for (int64_t c = 0; c < count; ++c) {
    const float value = values[c];
    const float size = std::abs(value);
    const bool is_finite = size < INFINITY;
    const float known = is_finite ? size : 0.0F;
    amax = known > amax ? known : amax;
    saturated += static_cast<int32_t>(known > by.beyond);
    nonfinite += static_cast<int32_t>(!is_finite);
    values[c] = is_finite ? round_delayed<Number>(value, by) : NAN;
  }
  return {amax, saturated, nonfinite};
}

void add_to_tally(const RoundValuesSpec& spec, const Tensor& tally, const Seen& seen,
                  int64_t num_values) {
  for (const int place : spec.places) {
    int64_t* const row = tally.as<int64_t>() + place * kTallyColumns;
    const auto column = [row](TallyColumn of) -> int64_t& { return row[static_cast<int64_t>(of)]; };
    int64_t& amax = column(TallyColumn::kAmax);
    // Bits of numbers that are not negative are in their order.
    amax = std::max<int64_t>(amax, word_of_float(seen.amax));
    column(TallyColumn::kValues) += num_values;
    column(TallyColumn::kSaturated) += seen.saturated;
    column(TallyColumn::kNonFinite) += seen.nonfinite;
  }
}

/// Rows of all groups, which follow one another.
template <typename T, typename Number>
void round_by_given_scale(const RoundValues& op, const Args<RoundValues>& args) {
  const RoundValuesSpec& spec = op.spec();
  const Tensor& x = args.in(RoundValues::kX);
  int64_t first = 0;
  int64_t end = x.num_elements();
  if (spec.offsets) {
    const auto offsets = args.in(RoundValues::kOffsets).span<int64_t>();
    first = offsets.front() * x.shape[1];
    end = offsets.back() * x.shape[1];
  }
  const float scale = args.in(RoundValues::kScales).as<float>()[spec.places.front()];
  const DelayedScale by = delayed_scale<Number>(scale, spec.overflows);
  const T* const from = x.as<T>();
  T* const to = args.out(RoundValues::kY).as<T>();
  float amax = 0;
  int64_t saturated = 0;
  int64_t nonfinite = 0;
#pragma omp parallel for schedule(static) reduction(max : amax) reduction(+ : saturated, nonfinite) \
    if (end - first > kRoundedAlone)
  for (int64_t i = first; i < end; i += kChunk) {
    const int64_t count = std::min(kChunk, end - i);
    Chunk values;
    simd::convert(values.data(), from + i, count);
    const Seen seen = round_chunk<Number>(values, count, by);
    simd::convert(to + i, values.data(), count);
    amax = std::max(amax, seen.amax);
    saturated += seen.saturated;
    nonfinite += seen.nonfinite;
  }
  if (const Tensor* tally = args.find_out(RoundValues::kTally))
    add_to_tally(spec, *tally, {amax, saturated, nonfinite}, end - first);
}

template <typename T, typename Number>
void round_matrix(const RoundValues& op, const Args<RoundValues>& args) {
  const RoundValuesSpec& spec = op.spec();
  if (spec.cast.delayed) return round_by_given_scale<T, Number>(op, args);
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
    internal_error("unknown kind of number");
  });
}

}  // namespace

TESSERA_CPU_KERNELS(add_round_values_cpu, table) {
  add_kernel<RoundValues>(table, round_values);
}

}  // namespace tessera
