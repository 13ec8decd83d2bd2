#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "data/token_file.h"

namespace {

using namespace tessera;

std::string_view text(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void write(const std::string& path, std::span<const uint8_t> bytes) {
  OutputFile file(path);
  file.write(text(bytes));
  file.close();
}

/// Everything a reader may do with a file that was accepted.
void use(const TokenFile& file) {
  std::vector<int32_t> ids(static_cast<size_t>(file.num_tokens()));
  file.read(0, ids);
  for (int64_t offset = 0; offset < file.num_tokens(); ++offset) {
    const int64_t document = file.document_at(offset);
    const auto offsets = file.document_offsets();
    ensure(offsets[document] <= offset && offset < offsets[document + 1], "document_at({})",
           offset);
  }
}

}  // namespace

/// The input's first byte is how many of the next ones are the .bin file; the rest is the .idx file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string prefix = "/tmp/token_file_fuzz_" + std::to_string(::getpid());
  if (size == 0) return 0;
  const std::span<const uint8_t> input(data + 1, size - 1);
  const size_t bin_size = std::min<size_t>(data[0], input.size());
  write(token_bin_path(prefix), input.first(bin_size));
  write(token_idx_path(prefix), input.subspan(bin_size));
  try {
    use(TokenFile(prefix, 300));
  } catch (const UserError&) {
  }
  return 0;
}
