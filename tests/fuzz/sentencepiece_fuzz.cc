// Any bytes are either refused with a UserError or give a SentencePiece tokenizer that encodes and
// decodes.

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "tokenizer/sentencepiece_tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr std::string_view kText =
      "The quick  brown fox's 12345 caf\xC3\xA9 \xE6\x97\xA5\n\tJumped \xEF\xAC\x81\xFF over";
  std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    const auto tokenizer = tessera::make_sentencepiece_tokenizer(
        tessera::SentencePieceModel(std::move(bytes), "fuzz"), 0);
    std::vector<int32_t> ids;
    tokenizer->encode(kText, ids);
    for (const int32_t id : ids) {
      if (id < 0 || id >= tokenizer->vocab_size()) std::abort();
    }
    tokenizer->decode(ids);
  } catch (const tessera::UserError&) {
  }
  return 0;
}
