#include "train/tune/answers.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <tuple>

#include "train/setup/training_data.h"

namespace tessera {
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const std::string& prompt) {
  std::vector<int32_t> ids;
  tokenizer.encode(prompt, ids);
  if (ids.empty()) ids.push_back(tokenizer.end_of_document());
  return ids;
}

Answer encode_answer(const Tokenizer& tokenizer, const std::string& prompt,
                     const std::string& text) {
  Answer answer{.tokens = encode_prompt(tokenizer, prompt)};
  answer.first = std::ssize(answer.tokens);
  tokenizer.encode_continuation(text, answer.tokens);
  answer.tokens.push_back(tokenizer.end_of_document());
  return answer;
}

std::vector<float> AnswerScorer::score(Batch& batch) {
  pad_sequences(batch, max_sequences_);
  const auto losses = model_.run_loss(view_batch(batch)).span<float>();
  std::vector<float> scores(losses.size());
  std::ranges::transform(losses, scores.begin(), [](float loss) { return -loss; });
  return scores;
}

AnswerBatches::AnswerBatches(const Settings& settings, int64_t fewest, int32_t padding,
                             std::vector<Answer> answers)
    : length_(settings.data.sequence_length),
      rows_(settings.train.micro_batch),
      moe_layers_(settings.model.num_moe_layers()),
      top_k_(settings.model.moe.top_k),
      packs_(settings.packs_answers()),
      padding_(padding),
      answers_(std::move(answers)),
      places_(answers_.size()) {
  ensure(std::ssize(answers_) == settings.train.global_batch, "a step of {} answers",
         answers_.size());
  for (const Answer& answer : answers_) check(answer);
  std::vector<Row> rows = packs_ ? pack_rows() : rows_of_own();
  const int64_t needed = (std::ssize(rows) + rows_ - 1) / rows_;
  deal(std::move(rows), std::max(needed, fewest));
  if (std::ranges::any_of(answers_, [](const Answer& answer) { return !answer.experts.empty(); }))
    add_experts();
}

void AnswerBatches::check(const Answer& answer) const {
  require(std::ssize(answer.tokens) - 1 <= length_,  // nothing follows the last
          "a prompt and its answer have {} tokens; data.sequence_length {} has room for {}",
          answer.tokens.size(), length_, length_ + 1);
  ensure(answer.first >= 1 && answer.num_tokens() >= 1, "an answer of {} tokens to {}",
         answer.num_tokens(), answer.first);
}

std::vector<AnswerBatches::Row> AnswerBatches::rows_of_own() const {
  std::vector<Row> rows;
  for (size_t idx = 0; idx < answers_.size(); ++idx) rows.push_back({idx});
  return rows;
}

/// Longest first, each into the row with the least room that holds it.
std::vector<AnswerBatches::Row> AnswerBatches::pack_rows() const {
  std::vector<size_t> order(answers_.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](size_t idx) { return num_read(idx); });
  std::vector<Row> rows;
  std::multimap<int64_t, size_t> by_room;
  for (const size_t idx : order) {
    const auto found = by_room.lower_bound(num_read(idx));
    size_t row = rows.size();
    int64_t room = length_;
    if (found == by_room.end()) {
      rows.emplace_back();
    } else {
      std::tie(room, row) = *found;
      by_room.erase(found);
    }
    rows[row].push_back(idx);
    by_room.emplace(room - num_read(idx), row);
  }
  return rows;
}

double AnswerBatches::attention_work(const Row& row) const {
  double work = 0;
  for (const size_t idx : row) {
    const auto length = static_cast<double>(num_read(idx));
    work += length * length;
  }
  return work;
}

/// Packed rows, the most work first, go to the micro-batches from the first to the last, then back,
/// and so on.
void AnswerBatches::deal(std::vector<Row> rows, int64_t num_batches) {
  if (packs_)
    std::ranges::stable_sort(rows, std::greater(), [&](const Row& r) { return attention_work(r); });
  batches_.resize(num_batches);
  const auto count = static_cast<size_t>(num_batches);
  for (size_t i = 0; i < rows.size(); ++i) {
    const size_t round = i / count;
    const size_t place = i % count;
    const size_t dealt = round % 2 == 0 ? place : count - 1 - place;
    add_row(packs_ ? dealt : i / static_cast<size_t>(rows_), rows[i]);
  }
  for (Batch& batch : batches_) {
    if (batch.cu_seqlens.empty()) batch.cu_seqlens.push_back(0);
    // Row by row: no stretch may be longer than the sequences that the model was built for.
    while (std::ssize(batch.tokens) < rows_ * length_)
      add_padding(batch, length_, /*continues=*/false);
  }
}

void AnswerBatches::add_row(size_t micro_batch, const Row& row) {
  Batch& batch = batches_[micro_batch];
  if (batch.cu_seqlens.empty()) batch.cu_seqlens.push_back(0);
  const int64_t end = std::ssize(batch.tokens) + length_;
  for (const size_t idx : row) add_answer(micro_batch, idx);
  add_padding(batch, end - std::ssize(batch.tokens), /*continues=*/!packs_);
}

void AnswerBatches::add_answer(size_t micro_batch, size_t idx) {
  const Answer& answer = answers_[idx];
  Batch& batch = batches_[micro_batch];
  places_[idx] = {.micro_batch = micro_batch, .begin = std::ssize(batch.tokens)};
  for (int64_t i = 0; i < num_read(idx); ++i) {
    batch.tokens.push_back(answer.tokens[i]);
    batch.labels.push_back(i + 1 >= answer.first ? answer.tokens[i + 1] : kNoLabel);
    batch.positions.push_back(static_cast<int32_t>(i));
  }
  batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
  batch.num_valid += answer.num_tokens();
}

/// A stretch of its own, or what the last one goes on with.
void AnswerBatches::add_padding(Batch& batch, int64_t count, bool continues) const {
  if (count == 0) return;
  const int32_t first = continues ? batch.positions.back() + 1 : 0;
  for (int64_t i = 0; i < count; ++i) batch.positions.push_back(first + static_cast<int32_t>(i));
  batch.tokens.resize(batch.tokens.size() + count, padding_);
  batch.labels.resize(batch.tokens.size(), kNoLabel);
  if (continues) batch.cu_seqlens.pop_back();
  batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
}

void AnswerBatches::add_experts() {
  const int64_t num_tokens = rows_ * length_;
  for (Batch& batch : batches_) batch.experts.assign(moe_layers_ * num_tokens * top_k_, -1);
  for (size_t idx = 0; idx < answers_.size(); ++idx) {
    const std::vector<int32_t>& from = answers_[idx].experts;
    std::vector<int32_t>& to = batches_[places_[idx].micro_batch].experts;
    const int64_t told = std::ssize(from) / (moe_layers_ * top_k_);
    for (int64_t i = 0; i < told; ++i) {
      for (int64_t layer = 0; layer < moe_layers_; ++layer) {
        const int64_t token = places_[idx].begin + i;
        std::copy_n(from.begin() + (i * moe_layers_ + layer) * top_k_, top_k_,
                    to.begin() + (layer * num_tokens + token) * top_k_);
      }
    }
  }
}

std::vector<std::vector<double>> AnswerBatches::score(AnswerScorer& scorer) {
  std::vector<std::vector<float>> all;
  for (Batch& batch : batches_) all.push_back(scorer.score(batch));
  std::vector<std::vector<double>> scores;
  for (size_t idx = 0; idx < answers_.size(); ++idx) {
    const auto begin = all[places_[idx].micro_batch].begin() + first_label(idx);
    scores.emplace_back(begin, begin + answers_[idx].num_tokens());
  }
  return scores;
}

std::vector<Batch> AnswerBatches::weigh(const std::vector<std::vector<float>>& weights) const {
  std::vector<Batch> batches = batches_;
  for (Batch& batch : batches) batch.weights.assign(batch.tokens.size(), 0.0F);
  for (size_t idx = 0; idx < answers_.size(); ++idx) {
    ensure(std::ssize(weights[idx]) == answers_[idx].num_tokens(), "{} weights for {} tokens",
           weights[idx].size(), answers_[idx].num_tokens());
    Batch& batch = batches[places_[idx].micro_batch];
    std::ranges::copy(weights[idx], batch.weights.begin() + first_label(idx));
  }
  return batches;
}

namespace {

/// That of the training's micro-batches; logits are measured where they are learned from alone.
BatchShape scoring_shape(const Trainer& trainer) {
  BatchShape shape = trainer.model().batch_shape();
  shape.qk_clip = 0;
  return shape;
}

std::unique_ptr<LoadedModel> load_start(const Settings& settings) {
  const std::string& from = settings.run.init_from;
  if (from.empty()) return std::make_unique<LoadedModel>(settings);
  try {
    return std::make_unique<LoadedModel>(from, settings);
  } catch (const UserError& error) {
    user_error("run.init_from, which the model is compared with: {}", error.what());
  }
}

}  // namespace

ReferenceModel::ReferenceModel(const Trainer& trainer) {
  const Settings& settings = trainer.settings();
  model_ = load_start(settings);
  require(model_->settings().model.vocab_size == settings.model.vocab_size,
          "run.init_from {} has a vocabulary of {} ids, the run one of {}", settings.run.init_from,
          model_->settings().model.vocab_size, settings.model.vocab_size);
  BatchShape shape = scoring_shape(trainer);
  shape.dtype = model_->settings().train.dtype();
  shape.products = model_->products();
  shape.replays_routing = false;
  scorer_.emplace(model_->settings().model, shape, model_->backend(), model_->parameters(),
                  model_->experts());
}

AnswerScorer score_trainer(Trainer& trainer) {
  BatchShape shape = scoring_shape(trainer);
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
