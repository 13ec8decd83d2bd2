// Speed of encoding on one thread: tokenizer_bench TOKENIZER TEXT [IDS]. The text is cut into
// documents of about 16 KB at line ends. IDS is a file for the ids as int32, each document followed
// by -1, for tools/compare_tokenizers.py.

#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/file/file.h"
#include "tokenizer/tokenizer.h"

namespace {

using namespace tessera;

constexpr size_t kDocumentBytes = 16384;

std::vector<std::string_view> documents(std::string_view text) {
  std::vector<std::string_view> list;
  while (!text.empty()) {
    const size_t line_end = text.find('\n', std::min(kDocumentBytes, text.size()));
    const size_t size = line_end == text.npos ? text.size() : line_end + 1;
    list.push_back(text.substr(0, size));
    text.remove_prefix(size);
  }
  return list;
}

double best_seconds(const Tokenizer& tokenizer, const std::vector<std::string_view>& texts,
                    std::vector<int32_t>& ids) {
  double best = 1e30;
  for (int repetition = 0; repetition < 5; ++repetition) {
    ids.clear();
    const auto start = std::chrono::steady_clock::now();
    for (const std::string_view text : texts) {
      tokenizer.encode(text, ids);
      ids.push_back(-1);
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    best = std::min(best, elapsed.count());
  }
  return best;
}

int run(int num_arguments, char** arguments) {
  require(num_arguments == 3 || num_arguments == 4, "usage: tokenizer_bench TOKENIZER TEXT [IDS]");
  const auto tokenizer = make_tokenizer({.path = arguments[1], .end_of_document = ""});
  const std::string text = read_text_file(arguments[2]);
  const std::vector<std::string_view> texts = documents(text);
  std::vector<int32_t> ids;
  const double seconds = best_seconds(*tokenizer, texts, ids);
  std::printf("%.2f MB/s, %zu ids, %s\n", static_cast<double>(text.size()) / 1e6 / seconds,
              ids.size() - texts.size(), tokenizer->name().c_str());
  if (num_arguments == 4) {
    OutputFile file(arguments[3]);
    file.write(std::as_bytes(std::span(ids)));
    file.close();
  }
  return 0;
}

}  // namespace

int main(int num_arguments, char** arguments) {
  try {
    return run(num_arguments, arguments);
  } catch (const UserError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
