#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "core/error.h"
#include "core/file/file.h"
#include "core/file/output_path.h"
#include "train/infer/logits.h"
#include "train/infer/multiple_choice.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

/// Text that may hold part of a character becomes valid UTF-8, so that JSON can hold it.
std::string to_json_text(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

Json tokens_to_json(const std::vector<GeneratedToken>& tokens) {
  Json list = Json::array();
  for (const GeneratedToken& token : tokens) {
    list.push_back({{"id", token.id}, {"logprob", token.log_probability}});
  }
  return list;
}

void print_log_probabilities(const Tokenizer& tokenizer, const Generated& result) {
  const auto print = [&](const GeneratedToken& token) {
    const std::string text = tokenizer.decode_continuation(std::span(&token.id, 1));
    std::cout << fmt::format("{:>8}  {:>10.5f}  {}\n", token.id, token.log_probability,
                             Json(text).dump(-1, ' ', false, Json::error_handler_t::replace));
  };
  std::cout << "      id     logprob  text\n";
  for (const GeneratedToken& token : result.prompt) print(token);
  for (const GeneratedToken& token : result.tokens) print(token);
}

Json scores_to_json(const ChoiceScores& scores) {
  return {{"log_likelihoods", scores.log_likelihoods},
          {"bytes", scores.num_bytes},
          {"answer", scores.answer},
          {"best", scores.best()},
          {"best_per_byte", scores.best_per_byte()}};
}

void check_finite(const ChoiceEvaluation& result, bool allowed) {
  for (const ChoiceScores& scores : result.questions) {
    for (const double likelihood : scores.log_likelihoods) {
      require(allowed || std::isfinite(likelihood),
              "question {}: the log-likelihood of a choice is {}; --allow-nonfinite takes it as it "
              "is",
              &scores - result.questions.data() + 1, likelihood);
    }
  }
}

int run_choices(LoadedModel& model, const EvalArguments& arguments) {
  const EvaluationRequest& request = arguments.request;
  require(request.text.empty() && request.tokens.empty(),
          "--choices goes with neither --text nor --tokens");
  const auto questions =
      parse_choice_questions(read_text_file(arguments.choices), arguments.choices);
  const ChoiceEvaluation result = evaluate_choices(model, questions);
  check_finite(result, request.allow_nonfinite);
  if (arguments.json) {
    Json list = Json::array();
    for (const ChoiceScores& scores : result.questions) list.push_back(scores_to_json(scores));
    std::cout << to_json_text({{"checkpoint", model.path().string()},
                               {"accuracy", result.accuracy()},
                               {"accuracy_per_byte", result.accuracy_per_byte()},
                               {"tokens", result.num_tokens},
                               {"seconds", result.seconds},
                               {"questions", list}})
              << "\n";
    return 0;
  }
  std::cout << fmt::format(
      "{} questions: accuracy {:.2f} %, {:.2f} % by likelihood per byte; {} tokens in {:.1f} s\n",
      result.questions.size(), 100 * result.accuracy(), 100 * result.accuracy_per_byte(),
      result.num_tokens, result.seconds);
  return 0;
}

NonFiniteWeights judge(bool allow_nonfinite) {
  return allow_nonfinite ? NonFiniteWeights::kAllow : NonFiniteWeights::kRefuse;
}

}  // namespace

void print_notes(const std::vector<std::string>& notes) {
  for (const std::string& note : notes) std::cerr << "tessera: note: " << note << "\n";
}

void print_skipped(const OpenedCheckpoint& opened) {
  if (!opened.skipped.empty())
    print_notes({describe_skipped(opened.skipped, opened.reader.path())});
}

int run_generate(const GenerateArguments& arguments) {
  validate(arguments.options);
  if (!arguments.prompts.empty() || arguments.samples > 1) return run_generate_batch(arguments);
  LoadedModel model(arguments.checkpoint, arguments.device, judge(arguments.allow_nonfinite));
  print_notes(model.notes());
  Generator generator(model.settings().model, model.settings().train.dtype(), model.backend(),
                      model.parameters(), model.experts());
  std::vector<int32_t> ids;  // what cannot be encoded is refused before anything is printed
  model.tokenizer().encode(arguments.prompt, ids);
  const bool stream = !arguments.json && !arguments.log_probabilities;
  if (stream) std::cout << arguments.prompt << std::flush;
  const auto show = [&](const GeneratedToken& token) {
    if (stream)
      std::cout << model.tokenizer().decode_continuation(std::span(&token.id, 1)) << std::flush;
  };
  const Generated result =
      generator.generate_text(model.tokenizer(), arguments.prompt, arguments.options, show);
  if (stream) std::cout << "\n";
  if (arguments.log_probabilities && !arguments.json)
    print_log_probabilities(model.tokenizer(), result);
  if (arguments.json) {
    std::cout << to_json_text({{"checkpoint", model.path().string()},
                               {"prompt", arguments.prompt},
                               {"text", result.text},
                               {"ended", result.ended},
                               {"prompt_tokens", tokens_to_json(result.prompt)},
                               {"tokens", tokens_to_json(result.tokens)}})
              << "\n";
  }
  return 0;
}

int run_eval(const EvalArguments& arguments) {
  if (!arguments.input_ids.empty()) check_output_path("--logits", arguments.logits);
  LoadedModel model(arguments.checkpoint, arguments.device,
                    judge(arguments.request.allow_nonfinite));
  print_notes(model.notes());
  if (!arguments.input_ids.empty()) {
    write_logits(model, arguments.input_ids, arguments.logits, arguments.request.allow_nonfinite);
    return 0;
  }
  if (!arguments.choices.empty()) return run_choices(model, arguments);
  const Evaluation result = evaluate(model, arguments.request);
  if (arguments.json) {
    std::cout << to_json_text({{"checkpoint", model.path().string()},
                               {"loss", result.loss},
                               {"perplexity", result.perplexity()},
                               {"bits_per_byte", result.bits_per_byte()},
                               {"tokens", result.num_tokens},
                               {"nonfinite_tokens", result.nonfinite_tokens},
                               {"bytes", result.num_bytes},
                               {"seconds", result.seconds}})
              << "\n";
    return 0;
  }
  const std::string per_byte =  // of tokens without a tokenizer nobody knows the bytes
      result.num_bytes > 0 ? fmt::format(", {:.4f} bits per byte", result.bits_per_byte()) : "";
  std::cout << fmt::format(
      "loss {:.4f} nats per token, perplexity {:.3f}{}; {} tokens in {:.1f} s\n", result.loss,
      result.perplexity(), per_byte, result.num_tokens, result.seconds);
  if (result.nonfinite_tokens > 0)
    std::cout << fmt::format("the loss of {} tokens is NaN or infinite\n", result.nonfinite_tokens);
  return 0;
}

}  // namespace tessera
