// Any bytes are either refused with a UserError or name files that lie in the folder of the index.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "hf/hf_record.h"
#include "hf/tensors/hf_tensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    for (const auto& [name, file] : tessera::parse_hf_index(text, "fuzz")) {
      if (file.find('/') != std::string::npos || !file.ends_with(".safetensors")) std::abort();
    }
  } catch (const tessera::UserError&) {
  }
  try {
    const tessera::HfRecord record = tessera::parse_hf_record(text, "fuzz");
    const tessera::HfRecord again =
        tessera::parse_hf_record(tessera::hf_record_text(record), "written");
    if (again.other_dtypes != record.other_dtypes || again.dtype != record.dtype) std::abort();
  } catch (const tessera::UserError&) {
  }
  return 0;
}
