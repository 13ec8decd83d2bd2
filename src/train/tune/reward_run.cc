#include <cmath>
#include <numeric>

#include "core/memory.h"
#include "core/process/stopwatch.h"
#include "train/tune/policy.h"
#include "train/tune/rollout.h"
#include "train/tune/tune_loop.h"
#include "train/tune/tune_run.h"
#include "train/tune/tuned_from.h"
#include "train/tune/weight_exports.h"

namespace tessera {
namespace {

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) /
         static_cast<double>(std::max<size_t>(values.size(), 1));
}

double deviation_of(const std::vector<double>& values) {
  const double mean = mean_of(values);
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / static_cast<double>(std::max<size_t>(values.size(), 1)));
}

/// Gives steps of a run: a rollout for each rl.updates of them.
class RewardSteps {
 public:
  /// `exports` may be null.
  RewardSteps(TrainingRun& run, WeightExports* exports)
      : run_(run),
        exports_(exports),
        trainer_(run.trainer()),
        settings_(trainer_.settings()),
        writer_(trainer_),
        scorer_(score_trainer(trainer_)) {
    run_.note(
        fmt::format("note: answers are written over {} of keys and values, beside what is "
                    "predicted",
                    format_bytes(writer_.cache_bytes())));
    if (settings_.rl.kl_coefficient > 0) reference_ = std::make_unique<ReferenceModel>(trainer_);
    note_tuned_from(run_, {.examples = hash_examples(settings_),
                           .reference = reference_ ? hash_checkpoint(reference_->path()) : ""});
  }

  TunedStep next() {
    exported_.clear();
    if (exports_ != nullptr) exported_ = exports_->before_step();
    if (trainer_.position().step % settings_.rl.updates == 0) roll_out();
    trainer_.state().wait_weights();
    const auto now = batches_->score(scorer_);
    std::vector<AnswerScores> scores;
    for (size_t i = 0; i < now.size(); ++i) {
      scores.push_back({.now = now[i],
                        .written = rollout_.written[i],
                        .reference = before_.empty() ? std::vector<double>() : before_[i]});
    }
    const GrpoWeights grpo = weigh_grpo(scores, advantages_, settings_.rl);
    return {batches_->weigh(grpo.weights), list_numbers(grpo)};
  }

 private:
  void roll_out() {
    const auto start = std::chrono::steady_clock::now();
    const int64_t number = trainer_.position().step / settings_.rl.updates;
    rollout_ = writer_.write(number);
    std::vector<WrittenAnswer> written;
    for (size_t i = 0; i < rollout_.texts.size(); ++i) {
      const size_t group = i / static_cast<size_t>(settings_.rl.group_size);
      written.push_back({&rollout_.prompts[group], rollout_.texts[i]});
    }
    rewards_ = find_rewards(settings_.rl, written);
    advantages_ = find_advantages(rewards_, settings_.rl.group_size, settings_.rl.advantage);
    batches_.emplace(settings_, trainer_.fewest_batches(),
                     trainer_.data().tokenizer->end_of_document(), std::move(rollout_.answers));
    if (reference_) before_ = batches_->score(reference_->scorer());
    rollout_seconds_ = seconds_since(start);
    show(number);
  }

  /// A line of the console, as often as those of steps.
  void show(int64_t number) const {
    const int64_t step = trainer_.position().step;
    if (number != 0 && step % settings_.run.log_interval >= settings_.rl.updates) return;
    run_.note(fmt::format("rollout {}: reward {:.4f} +- {:.4f}, {:.1f} tokens an answer, {:.2f} s",
                          number + 1, mean_of(rewards_), deviation_of(rewards_), mean_length(),
                          rollout_seconds_));
  }

  double mean_length() const {
    int64_t tokens = 0;
    for (const Answer& answer : batches_->answers()) tokens += answer.num_tokens();
    return static_cast<double>(tokens) / static_cast<double>(batches_->answers().size());
  }

  std::vector<NamedNumber> list_numbers(const GrpoWeights& grpo) const {
    const auto num_answers = static_cast<double>(rewards_.size());
    const auto silent = std::ranges::count(advantages_, 0.0);
    std::vector<NamedNumber> numbers = {
        {"loss", grpo.loss},
        {"reward_mean", mean_of(rewards_)},
        {"reward_std", deviation_of(rewards_)},
        {"answer_tokens", mean_length()},
        {"ended", static_cast<double>(rollout_.num_ended) / num_answers},
        {"without_advantage", static_cast<double>(silent) / num_answers},
        {"clip_fraction", grpo.statistics.clip_fraction},
        {"generator_kl", grpo.statistics.generator_kl},
        {"generator_error", grpo.statistics.generator_error},
        {"rollout_seconds", rollout_seconds_}};
    if (reference_) numbers.push_back({"reference_kl", grpo.statistics.reference_kl});
    numbers.insert(numbers.end(), exported_.begin(), exported_.end());
    return numbers;
  }

  TrainingRun& run_;
  WeightExports* exports_;
  std::vector<NamedNumber> exported_;  ///< of the weights that the step begins with
  Trainer& trainer_;
  const Settings& settings_;
  RolloutWriter writer_;
  AnswerScorer scorer_;
  std::unique_ptr<ReferenceModel> reference_;  ///< null where nothing is compared with it
  Rollout rollout_;                            ///< its answers are the batches'
  std::vector<double> rewards_, advantages_;
  std::optional<AnswerBatches> batches_;
  std::vector<std::vector<double>> before_;  ///< log p under the reference
  double rollout_seconds_ = 0;
};

}  // namespace

void train_on_rewards(const TrainRequest& request, World& world, std::ostream& out) {
  require_one_rank(world, "rl");
  validate(request.settings);
  // What cannot be used is refused before a run is begun.
  const auto tokenizer = make_tokenizer(request.settings.data.tokenizer_spec());
  check_prompts(request.settings, PromptSource(request.settings.rl, 0), *tokenizer);
  check_version_folder(request.settings);
  const WeightExportSettings& told = request.settings.rl.exports;
  ExportServer server = find_server(told);
  TrainingRun run(request, world, out);
  std::optional<WeightExports> exports;
  if (!told.folder.empty()) exports.emplace(run, std::move(server));
  RewardSteps steps(run, exports ? &*exports : nullptr);
  run_tuned_steps(
      run, run.trainer().settings().rl.updates, [&] { return steps.next(); }, out);
  if (exports) exports->finish(out);
}

}  // namespace tessera
