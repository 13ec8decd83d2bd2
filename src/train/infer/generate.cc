#include "train/infer/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/config/limits.h"
#include "ops/choose_token/choose_token.h"
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

/// Keys and values of this many tokens in the machine's memory.
void check_cache(const ModelConfig& config, DType dtype, int64_t capacity, const Backend& backend) {
  if (!backend.is_host()) return;
  require_host_memory(cache_bytes(config, dtype, CacheShape{capacity}), machine_memory(),
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
  log_softmax(values, values);
  return values;
}

void require_probability(bool is_there) {
  require(is_there,
          "the model gives no probabilities (its logits are NaN or infinite); its training "
          "diverged");
}

TokenRule token_rule(const GenerateOptions& options, Random& random) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return {.temperature = options.temperature,
          .top_p = options.top_p,
          .uniform = options.temperature == 0 ? 0 : random.next_u64() >> 11,
          .top_k = static_cast<int32_t>(std::min(options.top_k, kMost)),
          .vocab_size = static_cast<int32_t>(std::min(options.vocab_size, kMost))};
}

int32_t sample_token(const std::vector<double>& log_probabilities, const GenerateOptions& options,
                     Random& random) {
  require_probability(
      std::ranges::none_of(log_probabilities, [](double x) { return std::isnan(x); }));
  std::vector<int32_t> ids(log_probabilities.size());
  std::vector<double> weights(log_probabilities.size());
  return choose_token(log_probabilities, token_rule(options, random), ids, weights);
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
