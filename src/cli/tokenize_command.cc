#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "core/error.h"
#include "core/file/file.h"
#include "core/file/output_path.h"
#include "core/memory.h"
#include "core/process/progress.h"
#include "core/process/stopwatch.h"

namespace tessera {
namespace {

double per_second(int64_t bytes, double seconds) {
  return static_cast<double>(bytes) / 1e6 / std::max(seconds, 1e-9);
}

std::function<void(const TokenizeProgress&)> show_progress(ProgressBar& bar) {
  return [&bar, started = std::chrono::steady_clock::now()](const TokenizeProgress& progress) {
    const auto total = static_cast<double>(std::max<int64_t>(progress.bytes_total, 1));
    bar.update(static_cast<double>(progress.bytes_done) / total,
               fmt::format("{} tokens, {:.1f} MB/s",
                           format_count(static_cast<double>(progress.num_tokens)),
                           per_second(progress.text_bytes, seconds_since(started))));
  };
}

void print_json(const TokenizeSummary& summary, const Tokenizer& tokenizer) {
  const nlohmann::json json = {
      {"output", summary.prefix},
      {"tokenizer", tokenizer.name()},
      {"reused", summary.reused},
      {"resumed_at_token", summary.resumed_at},
      {"documents", summary.num_documents},
      {"tokens", summary.num_tokens},
      {"tokens_without_loss", summary.silent_tokens},
      {"bytes", summary.text_bytes},
      {"blank_documents", summary.blank_documents},
      {"skipped_lines", summary.skipped_lines},
      {"seconds", summary.seconds},
      {"megabytes_per_second", per_second(summary.new_text_bytes, summary.seconds)}};
  std::cout << json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
}

void print_text(const TokenizeSummary& summary, const Tokenizer& tokenizer) {
  std::cout << fmt::format(
      "{}.bin and .idx: {} documents, {} tokens, {} of text, {:.3f} bytes per token; tokenizer "
      "{}\n",
      summary.prefix, summary.num_documents, summary.num_tokens, format_bytes(summary.text_bytes),
      static_cast<double>(summary.text_bytes) / static_cast<double>(summary.num_tokens),
      tokenizer.name());
  if (summary.silent_tokens > 0) {
    std::cout << fmt::format("{} of the tokens carry no loss\n", summary.silent_tokens);
  }
  if (summary.blank_documents > 0) {
    std::cout << fmt::format("left out {} documents without text\n", summary.blank_documents);
  }
  if (summary.skipped_lines > 0) {
    std::cout << fmt::format("skipped {} lines; the first: {}\n", summary.skipped_lines,
                             summary.first_skipped);
  }
  if (summary.reused) {
    std::cout << "nothing to do: made of the same text in the same way before\n";
    return;
  }
  if (summary.resumed_at > 0) {
    std::cout << fmt::format("went on from {} tokens of a run that was cut short\n",
                             summary.resumed_at);
  }
  std::cout << fmt::format("{} in {}: {:.1f} MB/s\n", format_bytes(summary.new_text_bytes),
                           format_duration(summary.seconds),
                           per_second(summary.new_text_bytes, summary.seconds));
}

/// The tokenizer to use: the one named, or the one that was learned just now.
TokenizerSpec used_tokenizer(const TokenizeArguments& arguments) {
  TokenizerSpec spec = arguments.tokenizer;
  const TokenizerTraining& training = arguments.training;
  if (training.path.empty()) return spec;
  spec.path = training.path;
  if (spec.end_of_document.empty() && !training.options.special_tokens.empty()) {
    spec.end_of_document = training.options.special_tokens.front();
  }
  return spec;
}

void validate(const TokenizeArguments& arguments) {
  require(!arguments.request.prefix.empty() || !arguments.training.path.empty(),
          "--output is required: the prefix of the .bin and .idx files to write");
  require(!arguments.tokenizer.path.empty() || !arguments.training.path.empty(),
          "--tokenizer is required, or --train to learn one");
  require(arguments.training.path != arguments.request.prefix + ".json",
          "--train {} is also where --output describes its tokens; choose another name",
          arguments.training.path);
  const TextSource& source = arguments.request.source;
  if (!arguments.request.prefix.empty())
    refuse_output_within(source, arguments.request.prefix + ".bin", "--output");
  if (!arguments.training.path.empty())
    refuse_output_within(source, arguments.training.path, "--train");
}

}  // namespace

int run_tokenize(const TokenizeArguments& arguments) {
  validate(arguments);
  if (!arguments.training.path.empty()) {
    check_output_path("--train", arguments.training.path);
    if (!arguments.request.prefix.empty()) {
      const std::filesystem::path tokens = arguments.request.prefix + ".bin";
      if (tokens.has_parent_path()) make_folder(tokens.parent_path());
      check_output_path("--output", tokens);
    }
    train_tokenizer(arguments.training, arguments.request.source, arguments.json);
    if (arguments.request.prefix.empty()) return 0;
  }
  const auto tokenizer = make_tokenizer(used_tokenizer(arguments));
  TokenizeRequest request = arguments.request;
  ProgressBar bar(std::cout, arguments.json ? Terminal{} : detect_terminal(STDOUT_FILENO),
                  "tokenizing");
  request.progress = show_progress(bar);
  const TokenizeSummary summary = tokenize_text(request, *tokenizer);
  bar.clear();
  if (arguments.json) {
    print_json(summary, *tokenizer);
  } else {
    print_text(summary, *tokenizer);
  }
  return 0;
}

}  // namespace tessera
