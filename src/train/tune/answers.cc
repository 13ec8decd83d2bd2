#include "train/tune/answers.h"

#include <algorithm>

#include "train/setup/training_data.h"

namespace tessera {
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const std::string& prompt) {
  std::vector<int32_t> ids;
  tokenizer.encode(prompt, ids);
  if (ids.empty()) ids.push_back(tokenizer.end_of_document());
  return ids;
}

std::vector<float> AnswerScorer::score(Batch& batch) {
  const auto losses = model_.run_loss(view_batch(batch)).span<float>();
  std::vector<float> scores(losses.size());
  std::ranges::transform(losses, scores.begin(), [](float loss) { return -loss; });
  return scores;
}

AnswerBatches::AnswerBatches(const Settings& settings, int32_t padding, std::vector<Answer> answers)
    : length_(settings.data.sequence_length),
      rows_(settings.train.micro_batch),
      moe_layers_(settings.model.num_moe_layers()),
      top_k_(settings.model.moe.top_k),
      answers_(std::move(answers)) {
  ensure(std::ssize(answers_) == settings.train.global_batch, "a step of {} answers",
         answers_.size());
  batches_.resize(settings.train.num_micro_batches());
  for (size_t idx = 0; idx < answers_.size(); ++idx) add_row(idx, padding);
  const bool replays =
      std::ranges::any_of(answers_, [](const Answer& answer) { return !answer.experts.empty(); });
  for (int64_t i = 0; replays && i < std::ssize(batches_); ++i) add_experts(i);
}

void AnswerBatches::add_row(size_t idx, int32_t padding) {
  const Answer& answer = answers_[idx];
  const auto num_read = std::ssize(answer.tokens) - 1;  // nothing follows the last
  require(num_read <= length_,
          "a prompt and its answer have {} tokens; data.sequence_length {} has room for {}",
          answer.tokens.size(), length_, length_ + 1);
  ensure(answer.first >= 1 && answer.num_tokens() >= 1, "an answer of {} tokens to {}",
         answer.num_tokens(), answer.first);
  Batch& batch = batches_[static_cast<int64_t>(idx) / rows_];
  if (batch.cu_seqlens.empty()) batch.cu_seqlens.push_back(0);
  for (int64_t i = 0; i < length_; ++i) {
    const bool is_read = i < num_read;
    batch.tokens.push_back(is_read ? answer.tokens[i] : padding);
    batch.labels.push_back(is_read && i + 1 >= answer.first ? answer.tokens[i + 1] : kNoLabel);
    batch.positions.push_back(static_cast<int32_t>(i));
  }
  batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
  batch.num_valid += answer.num_tokens();
}

void AnswerBatches::add_experts(int64_t micro_batch) {
  Batch& batch = batches_[micro_batch];
  const int64_t num_tokens = rows_ * length_;
  batch.experts.assign(moe_layers_ * num_tokens * top_k_, -1);
  for (int64_t row = 0; row < rows_; ++row) {
    const std::vector<int32_t>& from = answers_[micro_batch * rows_ + row].experts;
    const int64_t num_read = std::ssize(from) / (moe_layers_ * top_k_);
    for (int64_t i = 0; i < num_read; ++i) {
      for (int64_t layer = 0; layer < moe_layers_; ++layer) {
        const int64_t token = row * length_ + i;
        std::copy_n(from.begin() + (i * moe_layers_ + layer) * top_k_, top_k_,
                    batch.experts.begin() + (layer * num_tokens + token) * top_k_);
      }
    }
  }
}

std::pair<int64_t, int64_t> AnswerBatches::place_of(size_t idx) const {
  const auto row = static_cast<int64_t>(idx);
  return {row / rows_, row % rows_ * length_ + answers_[idx].first - 1};
}

std::vector<std::vector<double>> AnswerBatches::score(AnswerScorer& scorer) {
  std::vector<std::vector<float>> all;
  for (Batch& batch : batches_) all.push_back(scorer.score(batch));
  std::vector<std::vector<double>> scores;
  for (size_t idx = 0; idx < answers_.size(); ++idx) {
    const auto [micro_batch, place] = place_of(idx);
    const auto begin = all[micro_batch].begin() + place;
    scores.emplace_back(begin, begin + answers_[idx].num_tokens());
  }
  return scores;
}

std::vector<Batch> AnswerBatches::weigh(const std::vector<std::vector<float>>& weights) const {
  std::vector<Batch> batches = batches_;
  for (Batch& batch : batches) batch.weights.assign(batch.tokens.size(), 0.0F);
  for (size_t idx = 0; idx < answers_.size(); ++idx) {
    const auto [micro_batch, place] = place_of(idx);
    ensure(std::ssize(weights[idx]) == answers_[idx].num_tokens(), "{} weights for {} tokens",
           weights[idx].size(), answers_[idx].num_tokens());
    std::ranges::copy(weights[idx], batches[micro_batch].weights.begin() + place);
  }
  return batches;
}

ReferenceModel::ReferenceModel(const Trainer& trainer) {
  const Settings& settings = trainer.settings();
  model_ = settings.run.init_from.empty()
               ? std::make_unique<LoadedModel>(settings)
               : std::make_unique<LoadedModel>(settings.run.init_from, settings.run.device);
  require(model_->settings().model.vocab_size == settings.model.vocab_size,
          "run.init_from {} has a vocabulary of {} ids, the run one of {}", settings.run.init_from,
          model_->settings().model.vocab_size, settings.model.vocab_size);
  BatchShape shape = trainer.model().batch_shape();
  shape.dtype = model_->settings().train.dtype();
  shape.products = model_->products();
  shape.replays_routing = false;
  scorer_.emplace(model_->settings().model, shape, model_->backend(), model_->parameters(),
                  model_->experts());
}

AnswerScorer score_trainer(Trainer& trainer) {
  BatchShape shape = trainer.model().batch_shape();
  shape.products = trainer.settings().products();
  return {trainer.settings().model, shape, trainer.backend(), trainer.state().parameters(),
          trainer.state().experts()};
}

void require_one_rank(const World& world, std::string_view command) {
  require(world.size() == 1,
          "`tessera {}` runs on one rank, but was started as one of {}; several ranks train on "
          "answers that are given to them (Trainer::give_batches)",
          command, world.size());
}

}  // namespace tessera
