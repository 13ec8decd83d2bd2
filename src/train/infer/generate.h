#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/random.h"
#include "model/run/forward_model.h"
#include "ops/choose_token/token_rule.h"
#include "tokenizer/tokenizer.h"

namespace tessera {

/// How the next token is chosen from its probabilities: temperature, then the top_k most likely,
/// then the fewest of those whose probabilities reach top_p, renormalised.
struct GenerateOptions {
  int64_t max_tokens = 256;
  double temperature = 1.0;  ///< 0: always the most likely
  int64_t top_k = 0;         ///< 0: all
  double top_p = 1.0;
  uint64_t seed = 1;
  /// Only ids below it are chosen: a model's vocabulary may be larger than the tokenizer's. 0: all.
  int64_t vocab_size = 0;
};

/// Throws UserError for options out of range.
void validate(const GenerateOptions& options);

struct GeneratedToken {
  int32_t id = 0;
  double log_probability = 0;  ///< under the model itself, before temperature and cuts
};

struct Generated {
  std::vector<GeneratedToken>
      prompt;  ///< prompt tokens after the first, with their log-probabilities
  std::vector<GeneratedToken> tokens;
  std::string text;    ///< of the generated tokens
  bool ended = false;  ///< at the end of a document, before max_tokens
};

/// Log-probabilities of all tokens from logits, in double.
std::vector<double> log_softmax(const Tensor& logits, int64_t row);

/// Throws UserError where a model's logits gave no probability.
void require_probability(bool is_there);

/// The same options for one token, with the next number of the stream where one is drawn.
TokenRule token_rule(const GenerateOptions& options, Random& random);

/// Chooses a token; a pure function of its arguments and the random stream. Ties go to the lower
/// id.
int32_t sample_token(const std::vector<double>& log_probabilities, const GenerateOptions& options,
                     Random& random);

/// Writes text with a model, one token at a time over a key-value cache. The parameters, which are
/// in the memory of the back end's device, and experts must outlive it.
class Generator {
 public:
  Generator(const ModelConfig& config, DType dtype, const Backend& backend,
            ParameterSet& parameters, std::vector<ExpertState>& experts);

  /// Continues the tokens of a prompt, which must not be empty, until `end_of_document`. `on_token`
  /// is called with each new token.
  Generated generate(const std::vector<int32_t>& prompt, int32_t end_of_document,
                     const GenerateOptions& options,
                     const std::function<void(const GeneratedToken&)>& on_token = {});
  /// The same on text. An empty prompt starts a new document.
  Generated generate_text(const Tokenizer& tokenizer, const std::string& prompt,
                          const GenerateOptions& options,
                          const std::function<void(const GeneratedToken&)>& on_token = {});

 private:
  std::unique_ptr<ForwardModel> make_model(int64_t num_tokens, KeyValueCache& cache);

  ModelConfig config_;
  DType dtype_;
  Backend backend_;
  ParameterSet& parameters_;
  std::vector<ExpertState>& experts_;
};

}  // namespace tessera
