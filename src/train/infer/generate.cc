#include "train/infer/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/saturating.h"
#include "model/config/limits.h"
#include "train/setup/machine.h"
#include "train/setup/size_check.h"

namespace tessera {
namespace {

template <typename T>
std::vector<double> widen_row(const Tensor& logits, int64_t row) {
  const T* begin = logits.as<T>() + row * logits.shape.last();
  std::vector<double> result(logits.shape.last());
  std::transform(begin, begin + logits.shape.last(), result.begin(),
                 [](T x) { return static_cast<double>(static_cast<float>(x)); });
  return result;
}

/// Ids that may be chosen by falling probability, as many as top_k leaves.
std::vector<int32_t> rank_tokens(const std::vector<double>& log_probabilities, int64_t vocab_size,
                                 int64_t top_k) {
  const size_t num_ids =
      vocab_size > 0 ? static_cast<size_t>(vocab_size) : log_probabilities.size();
  std::vector<int32_t> ids(std::min(num_ids, log_probabilities.size()));
  std::iota(ids.begin(), ids.end(), 0);
  const auto count = static_cast<int64_t>(ids.size());
  const int64_t kept = top_k > 0 ? std::min(top_k, count) : count;
  std::partial_sort(ids.begin(), ids.begin() + kept, ids.end(), [&](int32_t a, int32_t b) {
    const double pa = log_probabilities[a];
    const double pb = log_probabilities[b];
    return pa != pb ? pa > pb : a < b;
  });
  ids.resize(kept);
  return ids;
}

/// Weights of the ranked tokens after temperature, cut where they reach top_p.
std::vector<double> weigh_tokens(const std::vector<double>& log_probabilities,
                                 std::vector<int32_t>& ids, const GenerateOptions& options) {
  std::vector<double> weights;
  const double best = log_probabilities[ids.front()];
  for (const int32_t id : ids) {
    weights.push_back(std::exp((log_probabilities[id] - best) / options.temperature));
  }
  const double goal = options.top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
  double reached = 0;
  size_t kept = 0;
  while (kept < weights.size() && (kept == 0 || reached < goal)) reached += weights[kept++];
  weights.resize(kept);
  ids.resize(kept);
  return weights;
}

/// Keys and values of this many tokens in the machine's memory.
void check_cache(const ModelConfig& config, DType dtype, int64_t capacity, const Backend& backend) {
  if (!backend.is_host()) return;
  // Gated DeltaNet keeps states, however many tokens there are.
  const auto num_delta = static_cast<int64_t>(config.delta_layers.size());
  const Saturating of_token = Saturating(std::max<int64_t>(config.num_layers - num_delta, 0)) *
                              config.kv_heads() * (config.head_dim() + config.value_dim());
  require_host_memory((of_token * capacity * dtype_size(dtype)).value(), machine_memory(),
                      fmt::format("a cache of {} tokens' keys and values", capacity));
}

}  // namespace

void validate(const GenerateOptions& options) {
  require(options.max_tokens >= 0 && options.max_tokens <= kMaxLength,
          "max-tokens is {}; it must be 0 (nothing is generated) or above, at most {}",
          options.max_tokens, kMaxLength);
  require(options.temperature >= 0 && std::isfinite(options.temperature),
          "the temperature is {}; it must be 0 (always the most likely token) or above",
          options.temperature);
  require(options.top_k >= 0, "top-k is {}; it must be 0 (all tokens) or above", options.top_k);
  require(options.top_p > 0 && options.top_p <= 1, "top-p is {}; it must be above 0 and at most 1",
          options.top_p);
}

std::vector<double> log_softmax(const Tensor& logits, int64_t row) {
  std::vector<double> values =
      logits.dtype == DType::kF32 ? widen_row<float>(logits, row) : widen_row<Bf16>(logits, row);
  const double largest = *std::ranges::max_element(values);
  double sum = 0;
  for (const double value : values) sum += std::exp(value - largest);
  const double normaliser = largest + std::log(sum);
  for (double& value : values) value -= normaliser;
  return values;
}

int32_t sample_token(const std::vector<double>& log_probabilities, const GenerateOptions& options,
                     Random& random) {
  require(
      std::ranges::none_of(log_probabilities, [](double x) { return std::isnan(x); }),
      "the model gives no probabilities (its logits are NaN or infinite); its training diverged");
  if (options.temperature == 0)
    return rank_tokens(log_probabilities, options.vocab_size, 1).front();
  std::vector<int32_t> ids = rank_tokens(log_probabilities, options.vocab_size, options.top_k);
  const std::vector<double> weights = weigh_tokens(log_probabilities, ids, options);
  double left = random.next_uniform() * std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t i = 0; i < weights.size(); ++i) {
    if (left < weights[i]) return ids[i];
    left -= weights[i];
  }
  return ids.back();
}

Generator::Generator(const ModelConfig& config, DType dtype, const Backend& backend,
                     ParameterSet& parameters, std::vector<ExpertState>& experts)
    : config_(config),
      dtype_(dtype),
      backend_(backend),
      parameters_(parameters),
      experts_(experts) {}

std::unique_ptr<ForwardModel> Generator::make_model(int64_t num_tokens, KeyValueCache& cache) {
  const BatchShape shape{
      .num_tokens = num_tokens, .sequence_length = cache.capacity(), .dtype = dtype_};
  return std::make_unique<ForwardModel>(config_, shape, ForwardGoal::kLogits, backend_, parameters_,
                                        experts_, &cache);
}

Generated Generator::generate(const std::vector<int32_t>& prompt, int32_t end_of_document,
                              const GenerateOptions& options,
                              const std::function<void(const GeneratedToken&)>& on_token) {
  validate(options);
  require(!prompt.empty(), "the prompt has no token");
  const int64_t capacity = static_cast<int64_t>(prompt.size()) + options.max_tokens;
  check_cache(config_, dtype_, capacity, backend_);
  KeyValueCache cache(config_, dtype_, capacity, backend_.device());
  Random random(options.seed, hash_text("generate", 8));
  Generated result;
  const auto prefill = make_model(static_cast<int64_t>(prompt.size()), cache);
  const Tensor prompt_logits = prefill->run_logits(prompt);
  for (size_t i = 0; i + 1 < prompt.size(); ++i) {
    const auto row = log_softmax(prompt_logits, static_cast<int64_t>(i));
    result.prompt.push_back({prompt[i + 1], row[prompt[i + 1]]});
  }
  std::vector<double> next = log_softmax(prompt_logits, static_cast<int64_t>(prompt.size()) - 1);
  const auto decode = make_model(1, cache);
  while (static_cast<int64_t>(result.tokens.size()) < options.max_tokens) {
    const int32_t id = sample_token(next, options, random);
    if (id == end_of_document) {
      result.ended = true;
      break;
    }
    result.tokens.push_back({id, next[id]});
    if (on_token) on_token(result.tokens.back());
    next = log_softmax(decode->run_logits(std::span(&id, 1)), 0);
  }
  return result;
}

Generated Generator::generate_text(const Tokenizer& tokenizer, const std::string& prompt,
                                   const GenerateOptions& options,
                                   const std::function<void(const GeneratedToken&)>& on_token) {
  std::vector<int32_t> ids;
  tokenizer.encode(prompt, ids);
  if (ids.empty()) ids.push_back(tokenizer.end_of_document());
  GenerateOptions known = options;
  known.vocab_size = tokenizer.vocab_size();
  Generated result = generate(ids, tokenizer.end_of_document(), known, on_token);
  std::vector<int32_t> generated;
  for (const GeneratedToken& token : result.tokens) generated.push_back(token.id);
  result.text = tokenizer.decode_continuation(generated);
  return result;
}

}  // namespace tessera
