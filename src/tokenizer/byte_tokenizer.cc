#include "core/error.h"
#include "tokenizer/tokenizer.h"

namespace tessera {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "byte"; }
  int64_t vocab_size() const override { return kEndOfDocument + 1; }
  int32_t end_of_document() const override { return kEndOfDocument; }
  size_t cut(std::string_view, size_t limit) const override { return limit; }

  void encode(std::string_view text, std::vector<int32_t>& ids) const override {
    ids.reserve(ids.size() + text.size());
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      require(id >= 0 && id <= kEndOfDocument, "token id {} is outside the byte vocabulary of {}",
              id, vocab_size());
      if (id != kEndOfDocument) text += static_cast<char>(id);
    }
    return text;
  }

 private:
  static constexpr int32_t kEndOfDocument = 256;
};

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() {
  return std::make_unique<ByteTokenizer>();
}

}  // namespace tessera
