#include "ops/compress_windows/compress_cached.h"

#include <memory>

namespace tessera {

CompressWindowsCached::CompressWindowsCached(const CompressCacheSpec& spec) : spec_(spec) {
  require(
      spec.windows.rate >= 1 && spec.num_slots >= 1 && spec.first_entry >= 0 &&
          spec.kept != KeptRows::kPacked,
      "compress_windows_cached: windows of {} tokens, {} slots, entries from row {} on: expected "
      "kept rows, and at least 1, 1 and 0",
      spec.windows.rate, spec.num_slots, spec.first_entry);
}

std::string_view CompressWindowsCached::name_of(KeptRows kept) {
  return kept == KeptRows::kPaged ? "compress_windows_paged" : "compress_windows_cached";
}

std::string CompressWindowsCached::attributes() const {
  return fmt::format("{} slots={} first_entry={}", CompressWindows(spec_.windows).attributes(),
                     spec_.num_slots, spec_.first_entry);
}

std::vector<ValueType> CompressWindowsCached::infer(std::span<const ValueType> inputs) const {
  const bool paged = spec_.kept == KeptRows::kPaged;
  const int expected = paged ? kSlots + 1 : int{kFirstKept};
  check_shape(*this, std::ssize(inputs) == expected, "takes {} inputs, got {}", expected,
              inputs.size());
  const ValueType entries =
      CompressWindows(spec_.windows).infer(inputs.first(kFirstKept))[CompressWindows::kEntries];
  check_kept_inputs(*this, spec_.kept, inputs, kFirstKept);
  if (paged) {
    const ValueType slots{DType::kI32, {inputs[kFirstKept + 1].shape[0]}};
    check_shape(*this, inputs[kSlots] == slots, "slots are {}, expected {}",
                inputs[kSlots].to_string(), slots.to_string());
  }
  const ValueType& kv = inputs[kKv];
  const int64_t num_tokens = kv.shape[0];
  return {{kv.dtype, {num_tokens, entries.shape[1]}},
          {DType::kI32, {num_tokens}},
          {DType::kI32, {num_tokens}},
          {kv.dtype, {spec_.num_slots * 2 * spec_.windows.rate, 2 * kv.shape[1]}}};
}

OperatorPtr make_compress_windows_cached(const CompressCacheSpec& spec) {
  return std::make_shared<CompressWindowsCached>(spec);
}

}  // namespace tessera
