#include "core/error.h"
#include "tokenizer/tokenizer.h"

namespace tessera {
namespace {

class NoTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "none"; }
  int64_t vocab_size() const override { return 0; }
  int32_t end_of_document() const override { return -1; }
  size_t cut(std::string_view, size_t limit) const override { return limit; }
  void encode(std::string_view, std::vector<int32_t>&) const override {
    user_error(
        "this model came without a tokenizer, so it reads tokens only; give text as a token file");
  }
  std::string decode(std::span<const int32_t>) const override { return ""; }
};

}  // namespace

std::unique_ptr<Tokenizer> make_no_tokenizer() {
  return std::make_unique<NoTokenizer>();
}

}  // namespace tessera
