#include "train/infer/multiple_choice.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/config/strict_json.h"
#include "core/error.h"
#include "core/process/stopwatch.h"
#include "data/sampler.h"
#include "model/run/forward_model.h"
#include "train/setup/training_data.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

std::string read_context(const Json& object, const std::string& where) {
  const Json* found = nullptr;
  for (const char* key : {"context", "question", "prompt"}) {
    if (!object.contains(key)) continue;
    require(found == nullptr, "{}: has more than one of context, question and prompt", where);
    found = &object.at(key);
  }
  require(found != nullptr, "{}: has none of context, question and prompt", where);
  return json_text(*found, "the context", where);
}

int64_t read_answer(const Json& answer, const std::vector<std::string>& choices,
                    const std::string& where) {
  if (answer.is_string()) {
    const auto found = std::ranges::find(choices, answer.get<std::string>());
    require(found != choices.end(), "{}: the answer {} is none of the choices", where,
            quote_for_message(answer.get<std::string>()));
    return found - choices.begin();
  }
  const int64_t index = json_size(answer, "answer", where);
  require(index < static_cast<int64_t>(choices.size()),
          "{}: answer {} is no index of the {} choices, which count from 0", where, index,
          choices.size());
  return index;
}

ChoiceQuestion parse_question(std::string_view line, const std::string& where) {
  constexpr int kMaxDepth = 8;
  const Json object = parse_strict_json(line, where, kMaxDepth);
  require(object.is_object(), "{}: expected a JSON object", where);
  ChoiceQuestion question{.context = read_context(object, where)};
  const Json& choices = json_member(object, "choices", where);
  require(choices.is_array() && choices.size() >= 2, "{}: choices must be a list of two or more",
          where);
  for (const Json& choice : choices) {
    question.choices.push_back(json_text(choice, "a choice", where));
    require(!question.choices.back().empty(), "{}: a choice is empty", where);
  }
  question.answer = read_answer(json_member(object, "answer", where), question.choices, where);
  return question;
}

/// One context with one choice, as tokens. The loss of those from `first` on is the choice's.
struct Sequence {
  std::vector<int32_t> tokens;
  int64_t first = 0;
};

/// How many tokens two lists begin with in common.
int64_t common_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return std::ranges::mismatch(a, b).in1 - a.begin();
}

Sequence make_sequence(const Tokenizer& tokenizer, std::string_view context,
                       const std::string& choice) {
  const size_t kept = context.find_last_not_of(" \t\n\r") + 1;  // 0 where all is blank
  const std::string tail = std::string(context.substr(kept)) + choice;
  context = context.substr(0, kept);
  Sequence result;
  std::vector<int32_t> alone;
  if (context.empty()) {
    alone = {tokenizer.end_of_document()};
    result.tokens = alone;
    tokenizer.encode(tail, result.tokens);
  } else {
    tokenizer.encode(context, alone);
    tokenizer.encode(std::string(context) + tail, result.tokens);
  }
  // Where a token reaches over the border, it is the choice's.
  result.first = std::clamp<int64_t>(common_prefix(alone, result.tokens), 1,
                                     static_cast<int64_t>(result.tokens.size()));
  require(result.first < static_cast<int64_t>(result.tokens.size()),
          "the choice {} adds no token to its context, so that it has no likelihood",
          quote_for_message(choice));
  return result;
}

/// Sequences one after the other in one batch of `num_tokens`, the rest filled up.
class PackedBatch {
 public:
  PackedBatch(int64_t num_tokens, int64_t max_sequences)
      : num_tokens_(num_tokens), max_sequences_(max_sequences) {}

  bool has_room(const Sequence& sequence) const {
    const auto size = static_cast<int64_t>(batch_.tokens.size() + sequence.tokens.size());
    return size <= num_tokens_ && static_cast<int64_t>(begins_.size()) < max_sequences_;
  }

  void add(const Sequence& sequence) {
    begins_.push_back(static_cast<int32_t>(batch_.tokens.size()));
    const auto size = static_cast<int64_t>(sequence.tokens.size());
    for (int64_t i = 0; i < size; ++i) {
      batch_.tokens.push_back(sequence.tokens[i]);
      batch_.positions.push_back(static_cast<int32_t>(i));
      const bool scored = i + 1 >= sequence.first && i + 1 < size;
      batch_.labels.push_back(scored ? sequence.tokens[i + 1] : kNoLabel);
    }
  }

  /// The batch, filled up, and the sum of the losses of each sequence in it; starts a new batch.
  std::vector<double> run(ForwardModel& forward) {
    const auto used = static_cast<int32_t>(batch_.tokens.size());
    const size_t total = num_tokens_;
    batch_.cu_seqlens = begins_;
    batch_.cu_seqlens.push_back(used);
    batch_.cu_seqlens.resize(max_sequences_ + 2, static_cast<int32_t>(num_tokens_));
    batch_.tokens.resize(total, 0);
    batch_.labels.resize(total, kNoLabel);
    for (auto i = static_cast<int32_t>(batch_.positions.size()); i < num_tokens_; ++i)
      batch_.positions.push_back(i - used);
    const auto losses = forward.run_loss(view_batch(batch_)).span<float>();
    std::vector<double> sums;
    for (size_t i = 0; i < begins_.size(); ++i) {
      sums.push_back(std::reduce(losses.begin() + batch_.cu_seqlens[i],
                                 losses.begin() + batch_.cu_seqlens[i + 1], 0.0));
    }
    begins_.clear();
    batch_ = {};
    return sums;
  }

 private:
  int64_t num_tokens_;
  int64_t max_sequences_;
  std::vector<int32_t> begins_;
  Batch batch_;
};

/// −log p of each sequence's choice, in the order of the sequences.
std::vector<double> score_sequences(LoadedModel& model, const std::vector<Sequence>& sequences,
                                    int64_t batch_tokens) {
  constexpr int64_t kMaxSequences = 64;
  int64_t longest = 0;
  for (const Sequence& sequence : sequences)
    longest = std::max(longest, static_cast<int64_t>(sequence.tokens.size()));
  batch_tokens = std::max(batch_tokens, longest);
  // One more stretch than sequences holds what fills the batch up.
  ForwardModel forward(model.settings().model,
                       {.num_tokens = batch_tokens,
                        .max_sequences = kMaxSequences + 1,
                        .sequence_length = longest,
                        .dtype = model.settings().train.dtype(),
                        .products = model.products()},
                       ForwardGoal::kLoss, model.backend(), model.parameters(), model.experts());
  std::vector<double> losses;
  PackedBatch batch(batch_tokens, kMaxSequences);
  const auto flush = [&] {
    const auto sums = batch.run(forward);
    losses.insert(losses.end(), sums.begin(), sums.end());
  };
  for (const Sequence& sequence : sequences) {
    if (!batch.has_room(sequence)) flush();
    batch.add(sequence);
  }
  flush();
  return losses;
}

int64_t index_of_largest(const std::vector<double>& values) {
  return std::ranges::max_element(values) - values.begin();
}

/// The share of the questions for which `choose` gives the answer.
template <typename Choose>
double share_right(const std::vector<ChoiceScores>& questions, Choose choose) {
  const auto right =
      std::ranges::count_if(questions, [&](const auto& q) { return choose(q) == q.answer; });
  return static_cast<double>(right) / static_cast<double>(std::max<size_t>(questions.size(), 1));
}

}  // namespace

std::vector<ChoiceQuestion> parse_choice_questions(std::string_view text,
                                                   const std::string& where) {
  std::vector<ChoiceQuestion> questions;
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    questions.push_back(parse_question(line, fmt::format("{}:{}", where, number)));
  }
  require(!questions.empty(), "{} has no question in it", where);
  return questions;
}

int64_t ChoiceScores::best() const {
  return index_of_largest(log_likelihoods);
}

int64_t ChoiceScores::best_per_byte() const {
  std::vector<double> per_byte = log_likelihoods;
  for (size_t i = 0; i < per_byte.size(); ++i) per_byte[i] /= static_cast<double>(num_bytes[i]);
  return index_of_largest(per_byte);
}

double ChoiceEvaluation::accuracy() const {
  return share_right(questions, [](const ChoiceScores& q) { return q.best(); });
}

double ChoiceEvaluation::accuracy_per_byte() const {
  return share_right(questions, [](const ChoiceScores& q) { return q.best_per_byte(); });
}

ChoiceEvaluation evaluate_choices(LoadedModel& model, const std::vector<ChoiceQuestion>& questions,
                                  int64_t batch_tokens) {
  const auto started = std::chrono::steady_clock::now();
  ChoiceEvaluation result;
  std::vector<Sequence> sequences;
  for (const ChoiceQuestion& question : questions) {
    ChoiceScores scores{.answer = question.answer};
    for (const std::string& choice : question.choices) {
      sequences.push_back(make_sequence(model.tokenizer(), question.context, choice));
      const Sequence& last = sequences.back();
      result.num_tokens += static_cast<int64_t>(last.tokens.size()) - last.first;
      scores.num_bytes.push_back(static_cast<int64_t>(choice.size()));
    }
    result.questions.push_back(std::move(scores));
  }
  const std::vector<double> losses = score_sequences(model, sequences, batch_tokens);
  size_t next = 0;
  for (ChoiceScores& scores : result.questions) {
    for (size_t i = 0; i < scores.num_bytes.size(); ++i)
      scores.log_likelihoods.push_back(-losses[next++]);
  }
  result.seconds = seconds_since(started);
  return result;
}

}  // namespace tessera
