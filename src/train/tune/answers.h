#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "data/sampler.h"
#include "model/run/forward_model.h"
#include "tokenizer/tokenizer.h"
#include "train/infer/loaded_model.h"
#include "train/trainer/trainer.h"

namespace tessera {

/// A prompt and an answer to it, of which the answer is learned from.
struct Answer {
  std::vector<int32_t> tokens;  ///< of both
  int64_t first = 0;            ///< the answer's first among them, at least 1
  std::vector<int32_t> experts =
      {};  ///< [tokens - 1, MoE layers, K]; empty: the routers' own choice

  int64_t num_tokens() const { return std::ssize(tokens) - first; }
};

/// The ids of a prompt; an empty one is that of a new document.
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const std::string& prompt);

/// A prompt and a text that goes on behind it, with the end of the document. Each is encoded for
/// itself, as they are where a model answers.
Answer encode_answer(const Tokenizer& tokenizer, const std::string& prompt,
                     const std::string& text);

/// Log-probabilities of answers under some weights, found by forward passes of the shape of the
/// training's micro-batches. All that it is given must outlive it.
class AnswerScorer {
 public:
  AnswerScorer(const ModelConfig& config, const BatchShape& shape, const Backend& backend,
               ParameterSet& parameters, std::vector<ExpertState>& experts)
      : model_(config, shape, ForwardGoal::kLoss, backend, parameters, experts),
        max_sequences_(shape.max_sequences) {}

  /// log p of each label, F32 [T], and 0 where there is none.
  std::vector<float> score(Batch& batch);

 private:
  ForwardModel model_;
  int64_t max_sequences_;
};

/// The answers of a step as its micro-batches, in rows of data.sequence_length tokens. Each has a
/// row of its own, the rest of which is padded; or, with Settings::packs_answers, answers share
/// rows, best-fit decreasing, and rows are dealt to micro-batches in serpentine order, by the work
/// of their attention, so that they have about the same (packed sequences: Megatron-Core MoE,
/// section 6.4).
class AnswerBatches {
 public:
  /// Of as many micro-batches as the answers need, but at least `fewest`
  /// (Trainer::fewest_batches), the rest being padding. Throws UserError for an answer that is
  /// longer than a row.
  AnswerBatches(const Settings& settings, int64_t fewest, int32_t padding,
                std::vector<Answer> answers);

  const std::vector<Answer>& answers() const { return answers_; }
  /// By answer and token of it.
  std::vector<std::vector<double>> score(AnswerScorer& scorer);
  /// The batches with these weights, by answer and token of it.
  std::vector<Batch> weigh(const std::vector<std::vector<float>>& weights) const;

 private:
  /// Where an answer is, with its prompt.
  struct Place {
    size_t micro_batch = 0;
    int64_t begin = 0;  ///< of its tokens, in the micro-batch's
  };
  using Row = std::vector<size_t>;  // of answers

  int64_t num_read(size_t idx) const { return std::ssize(answers_[idx].tokens) - 1; }
  void check(const Answer& answer) const;
  std::vector<Row> pack_rows() const;
  std::vector<Row> rows_of_own() const;
  double attention_work(const Row& row) const;
  void deal(std::vector<Row> rows, int64_t num_batches);
  void add_row(size_t micro_batch, const Row& row);
  void add_answer(size_t micro_batch, size_t idx);
  void add_padding(Batch& batch, int64_t count, bool continues) const;
  void add_experts();
  /// Where the label of an answer's first token is.
  int64_t first_label(size_t idx) const { return places_[idx].begin + answers_[idx].first - 1; }

  int64_t length_;  ///< of a row
  int64_t rows_;    ///< of a micro-batch
  int64_t moe_layers_, top_k_;
  bool packs_;
  int32_t padding_;
  std::vector<Answer> answers_;
  std::vector<Place> places_;
  std::vector<Batch> batches_;
};

/// The model that a run starts from, whatever it has become since.
class ReferenceModel {
 public:
  /// Loads run.init_from, or makes the weights that run.seed gives. The trainer must outlive it.
  explicit ReferenceModel(const Trainer& trainer);
  AnswerScorer& scorer() { return *scorer_; }
  /// The checkpoint; empty for random weights.
  const std::filesystem::path& path() const { return model_->path(); }

 private:
  std::unique_ptr<LoadedModel> model_;
  std::optional<AnswerScorer> scorer_;
};

/// The scorer of the weights as they are in training.
AnswerScorer score_trainer(Trainer& trainer);

/// Throws UserError where there are several ranks: what answers are trained on is found on one.
void require_one_rank(const World& world, std::string_view command);

}  // namespace tessera
