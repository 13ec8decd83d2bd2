#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/commands.h"
#include "core/error.h"
#include "core/file/file.h"
#include "train/infer/decoding_batch.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

/// The prompt of one line: a string, or an object with nothing but "prompt".
std::string parse_prompt(const std::string& line, const std::string& place) {
  const Json json = Json::parse(line, nullptr, false);
  require(!json.is_discarded(), "{}: the line is not valid JSON", place);
  const bool wrapped = json.is_object() && json.size() == 1 && json.contains("prompt");
  const Json& prompt = wrapped ? json["prompt"] : json;
  require(prompt.is_string(), "{}: expected a string, or an object with \"prompt\" alone", place);
  return prompt.get<std::string>();
}

std::vector<std::string> read_prompts(const GenerateArguments& arguments) {
  if (arguments.prompts.empty()) return {arguments.prompt};
  std::istringstream lines(read_text_file(arguments.prompts));
  std::vector<std::string> prompts;
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    prompts.push_back(parse_prompt(line, fmt::format("{}, line {}", arguments.prompts, number)));
  }
  require(!prompts.empty(), "{}: there is no prompt in it", arguments.prompts);
  return prompts;
}

/// One text that is written.
struct BatchText {
  size_t prompt_idx = 0;
  int64_t sample = 0;
  uint64_t seed = 0;
  Generated generated = {};
  bool is_over = false;
};

Json tokens_json(const std::vector<GeneratedToken>& tokens) {
  Json list = Json::array();
  for (const GeneratedToken& token : tokens)
    list.push_back({{"id", token.id}, {"logprob", token.log_probability}});
  return list;
}

/// Prints texts in the order of prompts and samples, each once all before it are there.
class OrderedPrinter {
 public:
  OrderedPrinter(const Tokenizer& tokenizer, const std::vector<std::string>& prompts,
                 bool log_probabilities)
      : tokenizer_(tokenizer), prompts_(prompts), log_probabilities_(log_probabilities) {}

  void print_ready(const std::vector<BatchText>& texts) {
    for (; next_ < texts.size() && texts[next_].is_over; ++next_) print(texts[next_]);
  }

 private:
  void print(const BatchText& text) const {
    std::vector<int32_t> ids;
    for (const GeneratedToken& token : text.generated.tokens) ids.push_back(token.id);
    Json json = {{"prompt_idx", text.prompt_idx},
                 {"sample", text.sample},
                 {"seed", text.seed},
                 {"prompt", prompts_[text.prompt_idx]},
                 {"text", tokenizer_.decode_continuation(ids)},
                 {"ended", text.generated.ended}};
    if (log_probabilities_) {
      json["prompt_tokens"] = tokens_json(text.generated.prompt);
      json["tokens"] = tokens_json(text.generated.tokens);
    }
    std::cout << json.dump(-1, ' ', false, Json::error_handler_t::replace) << "\n" << std::flush;
  }

  const Tokenizer& tokenizer_;
  const std::vector<std::string>& prompts_;
  bool log_probabilities_;
  size_t next_ = 0;
};

void take_event(const DecodingEvent& event, BatchText& text) {
  for (const DecodedToken& token : event.prompt) text.generated.prompt.push_back(token.token);
  if (event.token) text.generated.tokens.push_back(event.token->token);
  text.is_over = event.end != DecodingEnd::kNot;
  text.generated.ended = event.end == DecodingEnd::kDocument;
}

std::vector<DecodingRequest> make_requests(const GenerateArguments& arguments,
                                           const Tokenizer& tokenizer,
                                           const std::vector<std::string>& prompts) {
  std::vector<DecodingRequest> requests;
  for (const std::string& prompt : prompts) {
    DecodingRequest request{.end_of_document = tokenizer.end_of_document(),
                            .options = arguments.options,
                            .scores_prompt = arguments.log_probabilities};
    request.options.vocab_size = tokenizer.vocab_size();
    tokenizer.encode(prompt, request.prompt);
    if (request.prompt.empty()) request.prompt.push_back(tokenizer.end_of_document());
    requests.push_back(std::move(request));
  }
  return requests;
}

/// Room for all texts, as far as so many are written at the same time.
DecodingLimits limits_for(const GenerateArguments& arguments,
                          const std::vector<DecodingRequest>& requests) {
  const auto num_texts = std::ssize(requests) * arguments.samples;
  DecodingLimits limits{.max_sequences = std::min(arguments.max_sequences, num_texts),
                        .context = 1};
  for (const DecodingRequest& request : requests)
    limits.context =
        std::max(limits.context, std::ssize(request.prompt) + request.options.max_tokens);
  return limits;
}

}  // namespace

int run_generate_batch(const GenerateArguments& arguments) {
  const std::vector<std::string> prompts = read_prompts(arguments);
  LoadedModel model(
      arguments.checkpoint, arguments.device,
      arguments.allow_nonfinite ? NonFiniteWeights::kAllow : NonFiniteWeights::kRefuse);
  print_notes(model.notes());
  const auto requests = make_requests(arguments, model.tokenizer(), prompts);
  DecodingBatch batch(model.settings().model, model.settings().train.dtype(), model.backend(),
                      model.parameters(), model.experts(), limits_for(arguments, requests));
  std::vector<BatchText> texts;  // at the batch's numbers of the sequences
  for (size_t i = 0; i < requests.size(); ++i) {
    for (int64_t sample = 0; sample < arguments.samples; ++sample) {
      DecodingRequest request = requests[i];
      request.options.seed += static_cast<uint64_t>(sample);
      texts.push_back({i, sample, request.options.seed});
      batch.add(std::move(request));
    }
  }
  OrderedPrinter printer(model.tokenizer(), prompts, arguments.log_probabilities);
  while (!batch.is_idle()) {
    for (const DecodingEvent& event : batch.step()) take_event(event, texts.at(event.sequence));
    printer.print_ready(texts);
  }
  return 0;
}

}  // namespace tessera
