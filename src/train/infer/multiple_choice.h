#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "train/infer/loaded_model.h"

namespace tessera {

/// One question of a multiple-choice task.
struct ChoiceQuestion {
  std::string context;               ///< what comes before each choice; may be empty
  std::vector<std::string> choices;  ///< two or more
  int64_t answer = 0;                ///< index of the right one
};

/// Reads JSON lines {"context": "...", "choices": ["...", "..."], "answer": 0}: `context` may also
/// be called "question" or "prompt", and `answer` be the text of a choice. Empty lines are passed
/// over. Throws UserError naming `where` and the line.
std::vector<ChoiceQuestion> parse_choice_questions(std::string_view text, const std::string& where);

/// What a model makes of one question: log-likelihoods of the choices as continuations of the
/// context, in nats, and their sizes in bytes.
struct ChoiceScores {
  std::vector<double> log_likelihoods;
  std::vector<int64_t> num_bytes;
  int64_t answer = 0;

  /// The most likely choice, by its whole log-likelihood, or by that of one byte.
  int64_t best() const;
  int64_t best_per_byte() const;
};

struct ChoiceEvaluation {
  std::vector<ChoiceScores> questions;
  int64_t num_tokens = 0;  ///< of the choices
  double seconds = 0;

  /// Shares of the questions whose right choice is best: the figures "acc" and "acc_norm" of
  /// EleutherAI's lm-evaluation-harness.
  double accuracy() const;
  double accuracy_per_byte() const;
};

/// Scores every choice as what follows its context: the tokens of context and choice together, less
/// those of the context alone. Blanks that end a context count as the choice's beginning, since
/// tokenizers join them to it; an empty context is the end of a document. Sequences are packed into
/// batches of `batch_tokens`, or of the longest one. Throws UserError where a choice adds no token.
ChoiceEvaluation evaluate_choices(LoadedModel& model, const std::vector<ChoiceQuestion>& questions,
                                  int64_t batch_tokens = 2048);

}  // namespace tessera
