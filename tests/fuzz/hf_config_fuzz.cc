// Any bytes are either refused with a UserError or give a model whose configuration, written again,
// reads as the same model.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "hf/config/hf_config.h"
#include "hf/config/write_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const tessera::ImportedConfig read = tessera::parse_hf_config(text, "fuzz");
    constexpr int64_t kMostLayers = 64;  // more only take time
    if (read.model.num_layers > kMostLayers) return 0;
    const std::string again =
        tessera::write_hf_config(*read.family, read.model, tessera::DType::kF32, read.max_length);
    const tessera::ImportedConfig same = tessera::parse_hf_config(again, "written");
    if (!tessera::find_differences(read.model, same.model).empty()) std::abort();
  } catch (const tessera::UserError&) {
  }
  return 0;
}
