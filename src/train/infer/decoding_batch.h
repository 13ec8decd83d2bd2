#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "train/infer/generate.h"
#include "train/infer/page_pool.h"

namespace tessera {

/// What a batch has room for.
struct DecodingLimits {
  int64_t max_sequences = 64;  ///< that are written at the same time
  int64_t context = 2048;      ///< tokens of a sequence, its prompt included
  int64_t cache_tokens = 0;    ///< of all sequences, in whole pages; 0: max_sequences · context
  /// Tokens of a pass. Prompts are read in pieces beside the tokens that are written.
  int64_t max_rows = 256;
  bool tells_experts = false;  ///< events tell which experts the tokens read went to
};

/// Throws UserError for limits out of range.
void validate(const DecodingLimits& limits);

struct DecodingRequest {
  std::vector<int32_t> prompt;
  int32_t end_of_document = -1;
  GenerateOptions options = {};
  bool scores_prompt = false;    ///< log-probabilities of the prompt's tokens are wanted
  int64_t num_alternatives = 0;  ///< most likely tokens that are given beside each
};

struct DecodedToken {
  GeneratedToken token;
  std::vector<GeneratedToken> alternatives;  ///< the most likely first
};

enum class DecodingEnd : uint8_t { kNot, kDocument, kLength };

/// What a pass brought for one sequence.
struct DecodingEvent {
  int64_t sequence = 0;
  std::vector<DecodedToken> prompt;   ///< tokens after the first that were scored
  std::optional<DecodedToken> token;  ///< the next one
  DecodingEnd end = DecodingEnd::kNot;
  /// [tokens read, MoE layers, K], where DecodingLimits has it; tokens are read in their order.
  std::vector<int32_t> experts = {};
};

/// Writes several sequences with a model, one token of each in a pass (continuous batching: Yu et
/// al., Orca, 2022): they join and leave between passes, and prompts are read in pieces beside
/// (Agrawal et al., Sarathi-Serve, 2024, section 4). Keys and values are in pages (PagedAttention).
/// A sequence begins once there are pages for all the tokens that it may come to, so it never
/// runs out of them; sequences begin in the order of their requests.
///
/// On the CPU a sequence's tokens and log-probabilities are a function of its request alone, bit by
/// bit: whatever else is in the batch, however its prompt is cut, and for any number of threads.
/// They may differ from Generator's in the last bits of a sum, since its products are oneDNN's. On
/// a GPU the last bits may also depend on how many rows a pass has, since cuBLASLt's products do.
///
/// The parameters and experts, which are in the memory of the back end's device, must outlive it.
/// Not thread-safe.
class DecodingBatch {
 public:
  DecodingBatch(const ModelConfig& config, DType dtype, const Backend& backend,
                ParameterSet& parameters, std::vector<ExpertState>& experts,
                const DecodingLimits& limits);
  ~DecodingBatch();

  const DecodingLimits& limits() const { return limits_; }
  /// Of what is kept of tokens: keys and values, or latents.
  int64_t cache_bytes() const;
  /// Throws UserError for what this batch cannot write.
  void check(const DecodingRequest& request) const;
  /// Gives the sequence's number. Throws as `check` does.
  int64_t add(DecodingRequest request);
  /// Forgets a sequence, waiting or begun; nothing where it ended before.
  void remove(int64_t sequence);
  bool is_idle() const { return waiting_.empty() && running_.empty(); }
  int64_t num_waiting() const { return std::ssize(waiting_); }
  int64_t num_running() const { return std::ssize(running_); }
  /// Runs one pass; nothing where all is idle.
  std::vector<DecodingEvent> step();

 private:
  struct Sequence;
  struct Piece;

  void admit();
  std::vector<Piece> choose_pieces();
  SequenceRows lay_out(std::vector<Piece>& pieces) const;
  ForwardModel& model_for(const SequenceRows& rows);
  static std::vector<DecodedToken> decode(const std::vector<Piece>& pieces,
                                          const ChosenTokens& chosen, ForwardModel& model);

  ModelConfig config_;
  DType dtype_;
  DecodingLimits limits_;
  Backend backend_;
  ParameterSet& parameters_;
  std::vector<ExpertState>& experts_;
  PagePool pages_;
  PagePool slots_;  ///< of states, one for each sequence
  KeyValueCache cache_;
  /// By the rows of a pass, and how many of them choose a token.
  std::map<std::pair<int64_t, int64_t>, std::unique_ptr<ForwardModel>> models_;
  int64_t next_sequence_ = 0;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;
};

}  // namespace tessera
