#include <unistd.h>

#include <iostream>

#include "cli/commands.h"
#include "core/file/file.h"
#include "core/process/progress.h"

namespace tessera {

void train_tokenizer(const TokenizerTraining& training, const TextSource& source, bool quiet) {
  validate(training.options);
  ProgressBar bar(std::cout, quiet ? Terminal{} : detect_terminal(STDOUT_FILENO),
                  "training the tokenizer");
  int64_t num_bytes = 0;
  const auto documents = [&](const std::function<void(std::string_view)>& use) {
    for_each_document(source, [&](std::string_view text, bool) {
      num_bytes += static_cast<int64_t>(text.size());
      bar.update(0, fmt::format("{}B counted", format_count(static_cast<double>(num_bytes))));
      use(text);
    });
  };
  const std::string text =
      train_bpe(training.options, documents, [&bar](int64_t done, int64_t total) {
        bar.update(static_cast<double>(done) / static_cast<double>(total),
                   fmt::format("{} of {} merges", done, total));
      });
  replace_file(training.path, text);
  bar.clear();
  if (quiet) return;
  const int64_t learnt = make_tokenizer({.path = training.path})->vocab_size();
  std::cout << fmt::format("wrote the tokenizer {}: {} tokens", training.path, learnt);
  if (learnt < training.options.vocab_size) {
    std::cout << fmt::format("; {} were asked for, but no other pair occurs {} times",
                             training.options.vocab_size, training.options.min_frequency);
  }
  std::cout << "\n";
}

}  // namespace tessera
