// Any text is either refused with a UserError or gives a manifest whose pieces cover their tensors
// and that is the same after being written and read again.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/format/manifest.h"
#include "core/error.h"

namespace {

void check(bool ok) {
  if (!ok) std::abort();
}

void check_cover(const tessera::TensorRecord& record) {
  int64_t covered = 0;
  for (const tessera::TensorPiece& piece : record.pieces) {
    check(tessera::contains(tessera::whole(record.shape), piece.rectangle));
    covered += piece.rectangle.shape.num_elements();
  }
  check(covered == record.shape.num_elements());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const tessera::Manifest manifest = tessera::parse_manifest(text, "fuzz");
    for (const auto& [name, record] : manifest.tensors) check_cover(record);
    const std::string written = tessera::manifest_text(manifest);
    check(tessera::manifest_text(tessera::parse_manifest(written, "again")) == written);
  } catch (const tessera::UserError&) {
  }
  return 0;
}
