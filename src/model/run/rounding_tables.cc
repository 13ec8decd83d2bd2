#include "model/run/rounding_tables.h"

#include <algorithm>

#include "ops/round_values/tally.h"

namespace tessera {
namespace {

constexpr std::string_view kPurpose = "scales and tallies of rounded operands";

/// Of the first of these that a program has.
int64_t count_rows(const Program& program) {
  for (const Value& value : program.values()) {
    if (value.name == kScalesName || value.name == kGradScalesName) return value.type.shape[0];
  }
  return 0;
}

int64_t column(const int64_t* row, TallyColumn of) {
  return row[static_cast<int64_t>(of)];
}

}  // namespace

RoundingTables::Sizes RoundingTables::lay_out(const StagePrograms& programs) {
  Sizes sizes;
  for (const auto& [layer, kind] : programs.of_layers) {
    const int64_t num_rows = count_rows(kind->derived.forward.program());
    if (num_rows == 0) continue;
    sizes.places[layer] = {num_rows, sizes.scales, sizes.tallies};
    sizes.scales += align_up(num_rows * dtype_size(DType::kF32));
    sizes.tallies += align_up(num_rows * kTallyColumns * dtype_size(DType::kI64));
  }
  return sizes;
}

int64_t RoundingTables::count_bytes(const StagePrograms& programs) {
  const Sizes sizes = lay_out(programs);
  return sizes.scales + sizes.tallies;
}

RoundingTables::RoundingTables(const StagePrograms& programs)
    : device_(programs.backend.device()),
      sizes_(lay_out(programs)),
      scales_(sizes_.scales, kPurpose, device_),
      tallies_(sizes_.tallies, kPurpose, device_),
      host_scales_(sizes_.scales, kPurpose, device_, MemoryKind::kShared),
      host_tallies_(sizes_.tallies, kPurpose, device_, MemoryKind::kShared) {}

CopyTensors RoundingTables::of_layer(int64_t layer) const {
  const auto found = sizes_.places.find(layer);
  if (found == sizes_.places.end()) return {};
  const Place& place = found->second;
  const Tensor scales = scales_.tensor(place.scales, DType::kF32, {place.num_rows});
  const Tensor tally = tallies_.tensor(place.tally, DType::kI64, {place.num_rows, kTallyColumns});
  return {{std::string(kScalesName), scales},
          {std::string(kGradScalesName), scales},
          {std::string(kTallyName), tally}};
}

void RoundingTables::set_scales(int64_t layer, std::span<const float> scales) {
  const auto found = sizes_.places.find(layer);
  if (found == sizes_.places.end()) return;
  const Tensor own =
      host_scales_.tensor(found->second.scales, DType::kF32, {found->second.num_rows});
  ensure(own.num_elements() == std::ssize(scales), "{} scales for {} operands", scales.size(),
         own.num_elements());
  std::ranges::copy(scales, own.as<float>());
}

void RoundingTables::begin_step() {
  if (sizes_.places.empty()) return;
  device_.copy(scales_.data(), host_scales_.data(), sizes_.scales);
  device_.zero(tallies_.data(), sizes_.tallies);
}

void RoundingTables::publish() {
  if (sizes_.places.empty()) return;
  device_.copy(host_tallies_.data(), tallies_.data(), sizes_.tallies);
}

void RoundingTables::read(int64_t layer, LayerTally& tally) const {
  const auto found = sizes_.places.find(layer);
  if (found == sizes_.places.end()) return;
  const Place& place = found->second;
  const Tensor own =
      host_tallies_.tensor(place.tally, DType::kI64, {place.num_rows, kTallyColumns});
  for (int64_t row = 0; row < place.num_rows; ++row) {
    const int64_t* const counts = own.as<int64_t>() + row * kTallyColumns;
    tally.amax[row] = std::max(tally.amax[row], column(counts, TallyColumn::kAmax));
    tally.values[row] += column(counts, TallyColumn::kValues);
    tally.saturated[row] += column(counts, TallyColumn::kSaturated);
    tally.nonfinite[row] += column(counts, TallyColumn::kNonFinite);
  }
}

}  // namespace tessera
