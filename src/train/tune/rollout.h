#pragma once

#include <memory>
#include <vector>

#include "train/infer/decoding_batch.h"
#include "train/trainer/trainer.h"
#include "train/tune/answers.h"
#include "train/tune/reward_tasks.h"

namespace tessera {

/// Answers to the prompts of a step, group_size to each, one group behind the other.
struct Rollout {
  std::vector<RewardPrompt> prompts;
  std::vector<Answer> answers;
  std::vector<std::vector<double>> written;  ///< log p of answers' tokens when they were drawn
  std::vector<std::string> texts;            ///< of the answers, without the end of document
  int64_t num_ended = 0;                     ///< by the end of a document rather than rl.max_tokens
};

/// Throws UserError for a prompt of rl.prompts that leaves no room for its answer.
void check_prompts(const Settings& settings, const PromptSource& prompts,
                   const Tokenizer& tokenizer);

/// Writes answers with the weights that are being trained, in the trainer's own memory: nothing is
/// copied. A rollout is a function of the settings, its number and the weights, bit by bit on the
/// CPU. The trainer must outlive it.
class RolloutWriter {
 public:
  /// Throws UserError for prompts that cannot be used, and for memory that is not there.
  explicit RolloutWriter(Trainer& trainer);
  /// Throws UserError for a prompt that leaves no room for its answer.
  Rollout write(int64_t number);
  /// Bytes of the keys and values of all answers under way.
  int64_t cache_bytes() const;

 private:
  /// An answer under way.
  struct Draft {
    Answer answer;
    std::vector<double> written;
    bool has_ended = false;
  };

  void renew_batch();
  DecodingRequest request(const Draft& draft, int64_t number, int64_t idx) const;
  std::vector<Draft> draft(Rollout& rollout, int64_t number) const;
  void take(const DecodingEvent& event, Draft& draft);

  Trainer& trainer_;
  const Settings& settings_;
  const Tokenizer& tokenizer_;
  PromptSource prompts_;
  std::unique_ptr<DecodingBatch> batch_;
};

}  // namespace tessera
