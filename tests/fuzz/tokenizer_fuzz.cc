// Any text is either refused with a UserError or gives a tokenizer that encodes and decodes: ids
// lie in the vocabulary, and a text cut in two has the ids of the whole.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/error.h"
#include "tokenizer/bpe_tokenizer.h"

namespace {

constexpr std::string_view kText =
    "<s>The quick  brown fox's 12345 caf\xC3\xA9 \xE6\x97\xA5\n\n\tJumped over\nthe lazy dog.\xFF "
    "a b c d</s>";

void check(bool ok) {
  if (!ok) std::abort();
}

void check_tokenizer(const tessera::Tokenizer& tokenizer) {
  std::vector<int32_t> whole;
  tokenizer.encode(kText, whole);
  for (const int32_t id : whole) check(id >= 0 && id < tokenizer.vocab_size());
  tokenizer.decode(whole);
  const size_t at = tokenizer.cut(kText, kText.size() / 2);
  std::vector<int32_t> parts;
  tokenizer.encode(kText.substr(0, at), parts);
  if (at < kText.size()) tokenizer.encode_continuation(kText.substr(at), parts);
  check(parts == whole);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    check_tokenizer(*tessera::make_bpe_tokenizer(tessera::parse_tokenizer_json(text, "fuzz"), 0));
  } catch (const tessera::UserError&) {
  }
  return 0;
}
