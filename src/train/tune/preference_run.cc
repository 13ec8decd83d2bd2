#include <nlohmann/json.hpp>
#include <sstream>

#include "core/file/file.h"
#include "core/random.h"
#include "data/permutation.h"
#include "train/tune/policy.h"
#include "train/tune/tune_loop.h"
#include "train/tune/tune_run.h"
#include "train/tune/tuned_from.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

struct Pair {
  Answer chosen, rejected;
};

/// The pairs of a file, as tokens; in each epoch in an order of its own.
class PairSource {
 public:
  PairSource(const Settings& settings, const Tokenizer& tokenizer)
      : settings_(settings), tokenizer_(tokenizer) {
    std::istringstream lines(read_text_file(settings.dpo.pairs));
    int64_t number = 0;
    for (std::string line; std::getline(lines, line);) {
      ++number;
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      pairs_.push_back(read(line, fmt::format("{}, line {}", settings.dpo.pairs, number)));
    }
    require(!pairs_.empty(), "{}: there is no pair in it", settings.dpo.pairs);
  }

  /// Answers of a step, each pair's chosen one first: a function of the settings and the step.
  std::vector<Answer> of_step(int64_t step) const {
    const int64_t num_pairs = settings_.train.global_batch / 2;
    std::vector<Answer> answers;
    for (int64_t place = 0; place < num_pairs; ++place) {
      const auto number = static_cast<uint64_t>(step * num_pairs + place);
      const Permutation order(pairs_.size(), mix(mix(static_cast<uint64_t>(settings_.run.seed),
                                                     hash_text("dpo order", 9)),
                                                 number / pairs_.size()));
      const Pair& pair = pairs_[order(number % pairs_.size())];
      answers.push_back(pair.chosen);
      answers.push_back(pair.rejected);
    }
    return answers;
  }

 private:
  Pair read(const std::string& line, const std::string& place) const {
    const Json json = Json::parse(line, nullptr, false);
    require(json.is_object(), "{}: expected a JSON object", place);
    return {make_answer(json, "chosen", place), make_answer(json, "rejected", place)};
  }

  static std::string text_of(const Json& json, const char* key, const std::string& place) {
    require(json.contains(key) && json[key].is_string(), "{}: there is no text \"{}\"", place, key);
    return json[key].get<std::string>();
  }

  Answer make_answer(const Json& json, const char* key, const std::string& place) const {
    Answer answer =
        encode_answer(tokenizer_, text_of(json, "prompt", place), text_of(json, key, place));
    const int64_t room = settings_.data.sequence_length + 1;
    require(std::ssize(answer.tokens) <= room,
            "{}: \"prompt\" and \"{}\" have {} tokens with the end of the document, above the {} "
            "that data.sequence_length has room for",
            place, key, answer.tokens.size(), room);
    return answer;
  }

  const Settings& settings_;
  const Tokenizer& tokenizer_;
  std::vector<Pair> pairs_;
};

}  // namespace

void train_on_preferences(const TrainRequest& request, World& world, std::ostream& out) {
  require_one_rank(world, "dpo");
  validate(request.settings);
  const auto own_tokenizer = make_tokenizer(request.settings.data.tokenizer_spec());
  const Tokenizer& tokenizer = *own_tokenizer;
  const PairSource pairs(request.settings, tokenizer);  // refused before a run is begun
  TrainingRun run(request, world, out);
  Trainer& trainer = run.trainer();
  const Settings& settings = trainer.settings();
  ReferenceModel reference(trainer);
  note_tuned_from(
      run, {.examples = hash_examples(settings), .reference = hash_checkpoint(reference.path())});
  AnswerScorer scorer = score_trainer(trainer);
  run_tuned_steps(
      run, 1,
      [&] {
        AnswerBatches batches(settings, trainer.fewest_batches(), tokenizer.end_of_document(),
                              pairs.of_step(trainer.position().step));
        trainer.state().wait_weights();
        const auto now = batches.score(scorer);
        const auto before = batches.score(reference.scorer());
        std::vector<AnswerScores> scores;
        for (size_t i = 0; i < now.size(); ++i)
          scores.push_back({.now = now[i], .written = {}, .reference = before[i]});
        const DpoWeights dpo = weigh_dpo(scores, settings.dpo.beta);
        return TunedStep{batches.weigh(dpo.weights),
                         {{"loss", dpo.loss}, {"margin", dpo.margin}, {"accuracy", dpo.accuracy}}};
      },
      out);
}

}  // namespace tessera
