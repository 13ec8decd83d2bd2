#pragma once

#include <array>
#include <bit>
#include <vector>

#include "ops/adamw/state_rounding.h"
#include "ops/scale_rows/scale_rows.h"
#include "ops/testing/op_test.h"

namespace tessera::testing {

struct RowsFormat {
  DType weight;
  MasterKind beside;
};
inline constexpr std::array kRowsFormats = {
    RowsFormat{DType::kF32, MasterKind::kNone}, RowsFormat{DType::kBF16, MasterKind::kNone},
    RowsFormat{DType::kBF16, MasterKind::kF32}, RowsFormat{DType::kBF16, MasterKind::kRemainder},
    RowsFormat{DType::kBF16, MasterKind::kRemainder8}};

/// A weight as the optimizer keeps it, and factors of which some are 1.
struct RowsCase {
  OwnedTensor factors;
  std::vector<OwnedTensor> kept;  ///< the outputs of ScaleRows

  std::vector<Tensor> outputs() const { return {kept.begin(), kept.end()}; }
  /// The numbers that are kept.
  std::vector<float> masters() const {
    const Tensor master = kept[ScaleRows::kMaster];
    const int64_t count = master.num_elements();
    std::vector<float> result(count);
    const auto join = [&]<typename Remainder>(Remainder /*type*/) {
      join_masters<Remainder>(kept[ScaleRows::kWeight].get().span<Bf16>(), master.span<Remainder>(),
                              result);
    };
    if (master.dtype == DType::kU16) join(uint16_t{});
    if (master.dtype == DType::kU8) join(uint8_t{});
    if (is_float(master.dtype)) {
      const auto values = to_doubles(master);
      for (int64_t i = 0; i < count; ++i) result[i] = static_cast<float>(values[i]);
    }
    return result;
  }

 private:
  static bool is_float(DType dtype) { return dtype == DType::kF32 || dtype == DType::kBF16; }
};

inline RowsCase make_rows(const RowsFormat& format, int64_t rows, int64_t columns, uint64_t seed) {
  Random random(seed, 1);
  RowsCase result{.factors = OwnedTensor(DType::kF32, {rows}), .kept = {}};
  for (int64_t row = 0; row < rows; ++row)
    result.factors.get().as<float>()[row] =
        row % 3 == 1 ? 1.0F : 0.5F + 0.5F * static_cast<float>(random.next_uniform());
  const OwnedTensor values = random_tensor(DType::kF32, {rows, columns}, random);
  if (format.weight == DType::kF32) {
    result.kept.push_back(random_tensor(DType::kF32, {rows, columns}, random));
    return result;
  }
  OwnedTensor weight(DType::kBF16, {rows, columns});
  const auto rounded = weight.get().span<Bf16>();
  const auto exact = values.get().span<float>();
  for (size_t i = 0; i < exact.size(); ++i) rounded[i] = Bf16(exact[i]);
  if (format.beside != MasterKind::kNone) {
    OwnedTensor master(master_dtype(format.beside), {rows, columns});
    if (format.beside == MasterKind::kF32) std::ranges::copy(exact, master.get().as<float>());
    if (format.beside == MasterKind::kRemainder)
      split_masters<uint16_t>(exact, rounded, master.get().span<uint16_t>());
    if (format.beside == MasterKind::kRemainder8)
      split_masters<uint8_t>(exact, rounded, master.get().span<uint8_t>());
    result.kept.push_back(std::move(master));
  }
  result.kept.push_back(std::move(weight));
  return result;
}

}  // namespace tessera::testing
