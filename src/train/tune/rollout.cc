#include "train/tune/rollout.h"

#include <algorithm>
#include <map>

namespace tessera {
namespace {

/// Answers that are written at the same time, at most.
constexpr int64_t kMostSequences = 256;

/// A prompt to which an answer is to be written.
Answer begin_answer(const Settings& settings, const Tokenizer& tokenizer,
                    const RewardPrompt& prompt) {
  const RlSettings& rl = settings.rl;
  Answer answer{.tokens = encode_prompt(tokenizer, prompt.text)};
  answer.first = std::ssize(answer.tokens);
  const std::string place =
      prompt.line.empty() ? "" : fmt::format("{}, line {}: ", rl.prompts, prompt.line_number);
  require(answer.first <= settings.data.sequence_length - rl.max_tokens,
          "{}the prompt \"{}\" has {} tokens, and an answer up to {} (rl.max_tokens); "
          "data.sequence_length {} must hold both",
          place, prompt.text.substr(0, 80), answer.first, rl.max_tokens,
          settings.data.sequence_length);
  return answer;
}

}  // namespace

void check_prompts(const Settings& settings, const PromptSource& prompts,
                   const Tokenizer& tokenizer) {
  for (const RewardPrompt& prompt : prompts.listed()) begin_answer(settings, tokenizer, prompt);
}

RolloutWriter::RolloutWriter(Trainer& trainer)
    : trainer_(trainer),
      settings_(trainer.settings()),
      tokenizer_(*trainer.data().tokenizer),
      prompts_(settings_.rl, static_cast<uint64_t>(settings_.run.seed)) {
  renew_batch();
}

void RolloutWriter::renew_batch() {
  batch_ = nullptr;  // its memory first
  batch_ = std::make_unique<DecodingBatch>(
      settings_.model, settings_.train.dtype(), trainer_.backend(), trainer_.state().parameters(),
      trainer_.state().experts(),
      DecodingLimits{.max_sequences = std::min(settings_.train.global_batch, kMostSequences),
                     .context = settings_.data.sequence_length,
                     .tells_experts = settings_.rl.router_replay});
}

DecodingRequest RolloutWriter::request(const Draft& draft, int64_t number, int64_t idx) const {
  const RlSettings& rl = settings_.rl;
  const auto draw = static_cast<uint64_t>(number * settings_.train.global_batch + idx);
  return {.prompt = draft.answer.tokens,
          .options = {
              .max_tokens = rl.max_tokens,
              .temperature = rl.temperature,
              .seed = mix(mix(static_cast<uint64_t>(settings_.run.seed), hash_text("rl", 2)), draw),
              .vocab_size = tokenizer_.vocab_size()}};
}

std::vector<RolloutWriter::Draft> RolloutWriter::draft(Rollout& rollout, int64_t number) const {
  const int64_t group_size = settings_.rl.group_size;
  const int64_t num_prompts = settings_.train.global_batch / group_size;
  std::vector<Draft> drafts;
  for (int64_t place = 0; place < num_prompts; ++place) {
    rollout.prompts.push_back(prompts_.prompt(number, place, num_prompts));
    const Draft draft{.answer = begin_answer(settings_, tokenizer_, rollout.prompts.back())};
    drafts.insert(drafts.end(), group_size, draft);
  }
  return drafts;
}

/// The end of a document is a token that is learned like others, so the batch does not look for it.
void RolloutWriter::take(const DecodingEvent& event, Draft& draft) {
  draft.answer.experts.insert(draft.answer.experts.end(), event.experts.begin(),
                              event.experts.end());
  if (!event.token) return;
  draft.answer.tokens.push_back(event.token->token.id);
  draft.written.push_back(event.token->token.log_probability);
  if (event.token->token.id != tokenizer_.end_of_document()) return;
  draft.has_ended = true;
  batch_->remove(event.sequence);
}

int64_t RolloutWriter::cache_bytes() const {
  return batch_->cache_bytes();
}

Rollout RolloutWriter::write(int64_t number) {
  trainer_.state().wait_weights();
  // A GPU's copies of the experts' biases are as old as the batch.
  if (!trainer_.backend().is_host() && settings_.model.moe.has_expert_bias()) renew_batch();
  Rollout rollout;
  std::vector<Draft> drafts = draft(rollout, number);
  std::map<int64_t, Draft*> by_sequence;
  for (size_t idx = 0; idx < drafts.size(); ++idx)
    by_sequence[batch_->add(request(drafts[idx], number, static_cast<int64_t>(idx)))] =
        &drafts[idx];
  while (!batch_->is_idle()) {
    for (const DecodingEvent& event : batch_->step()) take(event, *by_sequence.at(event.sequence));
  }
  for (Draft& draft : drafts) {
    const auto begin = draft.answer.tokens.begin() + draft.answer.first;
    rollout.texts.push_back(tokenizer_.decode_continuation(
        std::vector<int32_t>(begin, draft.answer.tokens.end() - (draft.has_ended ? 1 : 0))));
    rollout.num_ended += draft.has_ended ? 1 : 0;
    rollout.answers.push_back(std::move(draft.answer));
    rollout.written.push_back(std::move(draft.written));
  }
  return rollout;
}

}  // namespace tessera
