#include <cstddef>
#include <cstdint>
#include <span>

#include "core/error.h"
#include "data/token_file.h"

namespace {

using namespace tessera;

/// What the rest of TokenFile relies on.
void check(const TokenIndex& index, int64_t bin_bytes) {
  const auto& offsets = index.document_offsets;
  ensure(index.num_tokens * dtype_size(index.dtype) == bin_bytes, "tokens do not fill the file");
  ensure(!offsets.empty() && offsets.front() <= offsets.back() && offsets.front() >= 0 &&
             offsets.back() == index.num_tokens,
         "documents do not end with the tokens");
  for (size_t i = 1; i < offsets.size(); ++i) {
    ensure(offsets[i - 1] <= offsets[i], "document {} begins before the one before it", i);
  }
  int64_t end = -1;
  for (const TokenRange& range : index.silent_ranges) {
    ensure(end < range.begin && range.begin < range.end, "ranges without loss overlap or touch");
    end = range.end;
  }
  ensure(end <= index.num_tokens, "a range without loss leaves the file");
}

}  // namespace

/// The input's first byte is the size of the .bin file in bytes; the rest is the .idx file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  try {
    check(parse_token_index(std::as_bytes(std::span(data + 1, size - 1)), data[0], "fuzz.idx"),
          data[0]);
  } catch (const UserError&) {
  }
  return 0;
}
