#include "train/state/load_moments.h"

#include <algorithm>
#include <iterator>

#include "core/host_tensor.h"

namespace tessera {
namespace {

std::string scales_name(const std::string& moment) {
  return moment + "_scale";
}

/// What the checkpoint has, as F32.
OwnedTensor read_wide(const CheckpointReader& reader, const MomentSlice& moment) {
  const Slice& slice = moment.kept.slice;
  const std::string& name = moment.kept.name;
  OwnedTensor values(DType::kF32, slice.shape());
  if (!has_scales(moment.found)) {
    reader.load_slice(name, slice, values, Conversion::kFloats);
    return values;
  }
  const Slice scale_slice = slice_of_scales(slice);
  const OwnedTensor codes(moment_dtype(moment.found), slice.shape());
  const OwnedTensor scales(DType::kU8, scale_slice.shape());
  reader.load_slice(name, slice, codes);
  reader.load_slice(scales_name(name), scale_slice, scales);
  decode_moments({moment.moment, moment.found, codes, scales, slice.columns.begin}, values);
  return values;
}

}  // namespace

MomentKind find_moment(const CheckpointReader& reader, std::string_view suffix) {
  const std::string scales = scales_name(std::string(suffix));
  bool is_bf16 = false;
  for (const auto& [name, record] : reader.manifest().tensors) {
    if (record.group != TensorGroup::kOptimizer) continue;
    if (name.ends_with(scales)) {
      const auto moment = reader.manifest().tensors.find(name.substr(0, name.size() - 6));
      const bool is_f16 =
          moment != reader.manifest().tensors.end() && moment->second.dtype == DType::kF16;
      return is_f16 ? MomentKind::kF16 : MomentKind::kFp8;
    }
    is_bf16 = is_bf16 || (name.ends_with(suffix) && record.dtype == DType::kBF16);
  }
  return is_bf16 ? MomentKind::kBF16 : MomentKind::kF32;
}

void append_moment(const std::string& name, const Shape& shape, MomentKind kind,
                   std::vector<GlobalTensor>& all) {
  all.push_back({name, shape});
  if (has_scales(kind)) all.push_back({scales_name(name), shape_of_scales(shape)});
}

std::vector<MomentSlice> take_converted(const StateFormats& found, const StateFormats& own,
                                        std::vector<NamedSlice>& state) {
  std::vector<MomentSlice> converted;
  std::vector<NamedSlice> others;
  for (NamedSlice& slice : state) {
    const int rank = slice.slice.global.rank();
    const bool first = slice.name.ends_with(".m") || slice.name.ends_with(".m_scale");
    const bool second = slice.name.ends_with(".v") || slice.name.ends_with(".v_scale");
    const auto kind_in = [&](const StateFormats& formats) {
      const StateFormats kept = formats.of_rank(rank);
      return first ? kept.first_moment : kept.second_moment;
    };
    const MomentKind from = kind_in(found);
    const MomentKind to = kind_in(own);
    if ((!first && !second) || from == to || (!has_scales(from) && !has_scales(to))) {
      others.push_back(std::move(slice));
    } else if (names_scales(slice.name)) {
      // They come right behind their moment.
      converted.back().scales = slice.tensor;
    } else {
      converted.push_back({first ? Moment::kFirst : Moment::kSecond, from, to, std::move(slice)});
    }
  }
  state = std::move(others);
  return converted;
}

void convert_moment(const CheckpointReader& reader, const MomentSlice& moment) {
  const OwnedTensor values = read_wide(reader, moment);
  const HostTensor kept(moment.kept.tensor, HostTensor::Access::kWrite);
  if (has_scales(moment.own)) {
    const HostTensor scales(moment.scales, HostTensor::Access::kWrite);
    encode_moments(values, {moment.moment, moment.own, kept.get(), scales.get()});
    scales.store();
  } else if (moment.own == MomentKind::kF32) {
    std::ranges::copy(values.get().span<float>(), kept.get().as<float>());
  } else {
    std::ranges::transform(values.get().span<float>(), kept.get().as<Bf16>(),
                           [](float value) { return Bf16(value); });
  }
  kept.store();
}

}  // namespace tessera
