#include "train/infer/decoding_batch.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/saturating.h"
#include "model/build/ports.h"
#include "model/config/limits.h"
#include "ops/paged_attention/paged_attention.h"
#include "ops/registry/cpu_kernels.h"
#include "train/setup/device_choice.h"
#include "train/setup/size_check.h"

namespace tessera {
namespace {

/// The configuration of a batch: on the CPU, what fuses products has no products of rows.
ModelConfig for_batch(ModelConfig config, const Backend& backend) {
  if (backend.is_host()) config.moe.fuse_activation = false;
  return config;
}

Backend backend_for_batch(const Backend& backend) {
  return backend.is_host() ? Backend(make_cpu_kernels_of_rows()) : backend;
}

DecodingLimits complete(DecodingLimits limits) {
  validate(limits);
  const int64_t most = limits.max_sequences * pages_of(limits.context);
  const int64_t wanted = limits.cache_tokens == 0 ? most : pages_of(limits.cache_tokens);
  limits.cache_tokens = std::min(wanted, most) * kPageTokens;
  limits.max_rows = std::max(limits.max_rows, limits.max_sequences);  // each is written in a pass
  return limits;
}

/// The shape of the cache, whose size is checked first.
CacheShape cache_shape(const ModelConfig& config, DType dtype, const DecodingLimits& limits,
                       const Device& device) {
  const CacheShape shape{.capacity = limits.context,
                         .num_pages = limits.cache_tokens / kPageTokens,
                         .num_slots = limits.max_sequences};
  require_device_memory(cache_bytes(config, dtype, shape), device,
                        fmt::format("a cache of {} tokens' keys and values", limits.cache_tokens));
  return shape;
}

/// Rows of the model that runs a pass of so many: few models for all passes.
int64_t model_rows(int64_t num_rows, int64_t max_rows) {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(num_rows)));
  const int64_t between = power / 4 * 3;
  return std::min(between >= num_rows ? between : power, max_rows);
}

/// [count, MoE layers, K] of [MoE layers, T, K].
std::vector<int32_t> experts_of_rows(const Tensor& chosen, int64_t first, int64_t count) {
  const int64_t top_k = chosen.shape[2];
  const int32_t* const from = chosen.as<int32_t>();
  std::vector<int32_t> experts;
  for (int64_t row = first; row < first + count; ++row) {
    for (int64_t layer = 0; layer < chosen.shape[0]; ++layer) {
      const int32_t* const own = from + (layer * chosen.shape[1] + row) * top_k;
      experts.insert(experts.end(), own, own + top_k);
    }
  }
  return experts;
}

/// Of the ids below `vocab_size`, or of all where that is 0.
std::vector<GeneratedToken> most_likely(const std::vector<double>& log_probabilities, int64_t count,
                                        int64_t vocab_size) {
  const auto num_ids = std::ssize(log_probabilities);
  std::vector<int32_t> ids(vocab_size > 0 ? std::min(num_ids, vocab_size) : num_ids);
  std::iota(ids.begin(), ids.end(), 0);
  const auto kept = ids.begin() + std::min(count, std::ssize(ids));
  std::partial_sort(ids.begin(), kept, ids.end(), [&](int32_t a, int32_t b) {
    const double pa = log_probabilities[a];
    const double pb = log_probabilities[b];
    return pa != pb ? pa > pb : a < b;
  });
  std::vector<GeneratedToken> result;
  for (auto id = ids.begin(); id != kept; ++id) result.push_back({*id, log_probabilities[*id]});
  return result;
}

}  // namespace

/// A request at work.
struct DecodingBatch::Sequence {
  int64_t number = 0;
  DecodingRequest request;
  Random random;
  std::vector<int32_t> pages = {};
  std::vector<int32_t> slot = {};    ///< one, of states
  std::vector<int32_t> tokens = {};  ///< the prompt and what was written
  int64_t length = 0;                ///< of which the cache has this many
  int64_t num_written = 0;
  std::optional<int32_t> written = std::nullopt;  ///< in this pass

  Sequence(int64_t own, DecodingRequest given)
      : number(own),
        request(std::move(given)),
        random(request.options.seed, hash_text("generate", 8)),
        tokens(request.prompt) {}

  int64_t most_tokens() const { return std::ssize(request.prompt) + request.options.max_tokens; }
  int64_t num_unread() const { return std::ssize(tokens) - length; }
  int64_t cache_row(int64_t position) const {
    return pages[position / kPageTokens] * kPageTokens + position % kPageTokens;
  }

  bool is_last(int64_t position) const { return position == std::ssize(tokens) - 1; }
  /// What is wanted of the token behind a position, if anything is.
  std::optional<TokenRule> rule_at(int64_t position) {
    if (!is_last(position)) {
      if (!request.scores_prompt) return std::nullopt;
      return TokenRule{.given = tokens[position + 1]};
    }
    if (request.options.max_tokens == 0) return std::nullopt;
    return token_rule(request.options, random);
  }

  /// Takes a token that came of `rule_at`.
  void take(int64_t position, DecodedToken token, DecodingEvent& event) {
    if (!is_last(position)) {
      event.prompt.push_back(std::move(token));
      return;
    }
    if (token.token.id == request.end_of_document) {
      event.end = DecodingEnd::kDocument;
      return;
    }
    written = token.token.id;
    event.token = std::move(token);
  }
  /// The cache has `count` more tokens.
  void advance(int64_t count, DecodingEvent& event) {
    length += count;
    const int64_t most = request.options.max_tokens;
    if (length == std::ssize(tokens) && most == 0) event.end = DecodingEnd::kLength;
    if (!written) return;
    tokens.push_back(*std::exchange(written, std::nullopt));
    if (++num_written == most) event.end = DecodingEnd::kLength;
  }
};

/// Tokens of a sequence that a pass reads, and which of its results are the sequence's.
struct DecodingBatch::Piece {
  Sequence* sequence;
  int64_t count;
  int64_t first_result = 0;
  std::vector<int64_t> positions = {};
};

void validate(const DecodingLimits& limits) {
  require(limits.max_sequences > 0 && limits.max_sequences <= kMaxLength,
          "max-sequences is {}; it must be from 1 to {}", limits.max_sequences, kMaxLength);
  require(limits.context > 0 && limits.context <= kMaxLength,
          "the context is {} tokens; it must be from 1 to {}", limits.context, kMaxLength);
  require(limits.cache_tokens >= 0, "cache-tokens is {}; it must be 0 (room for all) or above",
          limits.cache_tokens);
  require(limits.max_rows > 0 && limits.max_rows <= kMaxLength,
          "{} rows of a pass; there must be from 1 to {}", limits.max_rows, kMaxLength);
}

DecodingBatch::DecodingBatch(const ModelConfig& config, DType dtype, const Backend& backend,
                             ParameterSet& parameters, std::vector<ExpertState>& experts,
                             const DecodingLimits& limits)
    : config_(for_batch(config, backend)),
      dtype_(dtype),
      limits_(complete(limits)),
      backend_(backend_for_batch(backend)),
      parameters_(parameters),
      experts_(experts),
      pages_(limits_.cache_tokens / kPageTokens),
      slots_(limits_.max_sequences),
      cache_(config_, dtype, cache_shape(config_, dtype, limits_, backend.device()),
             backend.device()) {}

DecodingBatch::~DecodingBatch() = default;

int64_t DecodingBatch::cache_bytes() const {
  return tessera::cache_bytes(config_, dtype_, cache_.shape());
}

void DecodingBatch::check(const DecodingRequest& request) const {
  validate(request.options);
  require(!request.prompt.empty(), "the prompt has no token");
  for (const int32_t id : request.prompt)
    require(id >= 0 && id < config_.vocab_size, "the token id {} is outside the vocabulary of {}",
            id, config_.vocab_size);
  const int64_t most = std::ssize(request.prompt) + request.options.max_tokens;
  require(most <= limits_.context,
          "the prompt's {} tokens and {} more are above the context of {} tokens",
          request.prompt.size(), request.options.max_tokens, limits_.context);
  require(pages_of(most) <= pages_.num_pages(),
          "the prompt's {} tokens and {} more are above the cache of {} tokens",
          request.prompt.size(), request.options.max_tokens, limits_.cache_tokens);
}

int64_t DecodingBatch::add(DecodingRequest request) {
  check(request);
  waiting_.push_back(std::make_unique<Sequence>(next_sequence_, std::move(request)));
  return next_sequence_++;
}

void DecodingBatch::remove(int64_t sequence) {
  const auto is_it = [&](const auto& other) { return other->number == sequence; };
  std::erase_if(waiting_, is_it);
  const auto found = std::ranges::find_if(running_, is_it);
  if (found == running_.end()) return;
  pages_.give_back((*found)->pages);
  slots_.give_back((*found)->slot);
  running_.erase(found);
}

void DecodingBatch::admit() {
  while (!waiting_.empty() && num_running() < limits_.max_sequences) {
    Sequence& next = *waiting_.front();
    const int64_t needed = pages_of(next.most_tokens());
    if (needed > pages_.num_free()) return;
    next.pages = pages_.take(needed);
    next.slot = slots_.take(1);
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

/// One token of each sequence that is being written, then what there is room for of the prompts.
std::vector<DecodingBatch::Piece> DecodingBatch::choose_pieces() {
  std::vector<Piece> pieces;
  int64_t room = limits_.max_rows;
  for (const bool written : {true, false}) {
    for (const auto& sequence : running_) {
      if ((sequence->num_written > 0) != written || room == 0) continue;
      const int64_t count = std::min(sequence->num_unread(), room);
      pieces.push_back({sequence.get(), count});
      room -= count;
    }
  }
  return pieces;
}

SequenceRows DecodingBatch::lay_out(std::vector<Piece>& pieces) const {
  SequenceRows rows;
  const int64_t pages_per_sequence = pages_of(limits_.context);
  for (Piece& piece : pieces) {
    Sequence& sequence = *piece.sequence;
    const int64_t end = sequence.length + piece.count;
    piece.first_result = std::ssize(rows.rules);
    for (int64_t position = sequence.length; position < end; ++position) {
      if (const auto rule = sequence.rule_at(position)) {
        rows.chosen_rows.push_back(static_cast<int32_t>(rows.tokens.size()));
        rows.rules.push_back(*rule);
        piece.positions.push_back(position);
      }
      rows.tokens.push_back(sequence.tokens[position]);
      rows.positions.push_back(static_cast<int32_t>(position));
      rows.cache_rows.push_back(static_cast<int32_t>(sequence.cache_row(position)));
    }
    rows.cu_seqlens.push_back(static_cast<int32_t>(rows.tokens.size()));
    rows.lengths.push_back(static_cast<int32_t>(end));
    rows.page_table.insert(rows.page_table.end(), sequence.pages.begin(), sequence.pages.end());
    rows.slots.push_back(sequence.slot.front());
    rows.page_table.resize(rows.lengths.size() * static_cast<size_t>(pages_per_sequence));
  }
  return rows;
}

ForwardModel& DecodingBatch::model_for(const SequenceRows& rows) {
  const auto num_chosen = std::ssize(rows.rules);
  const int64_t num_rows = model_rows(std::ssize(rows.tokens), limits_.max_rows);
  // Prompts that are read need no logits but of their last tokens.
  const bool has_all = num_chosen == std::ssize(rows.tokens) || num_chosen > limits_.max_sequences;
  const int64_t chosen_rows = has_all ? num_rows : std::min(num_rows, limits_.max_sequences);
  std::unique_ptr<ForwardModel>& model = models_[{num_rows, chosen_rows}];
  if (model == nullptr) {
    const BatchShape shape{.num_tokens = num_rows,
                           .max_sequences = limits_.max_sequences,
                           .sequence_length = limits_.context,
                           .dtype = dtype_,
                           .tells_routing = limits_.tells_experts};
    model = std::make_unique<ForwardModel>(config_, shape, ForwardGoal::kTokens, backend_,
                                           parameters_, experts_, &cache_, chosen_rows);
  }
  return *model;
}

/// Tokens with their probabilities, and the most likely beside them where they are asked for.
std::vector<DecodedToken> DecodingBatch::decode(const std::vector<Piece>& pieces,
                                                const ChosenTokens& chosen, ForwardModel& model) {
  std::vector<DecodedToken> result;
  for (const Piece& piece : pieces) {
    const DecodingRequest& request = piece.sequence->request;
    for (size_t i = 0; i < piece.positions.size(); ++i) {
      const int64_t row = std::ssize(result);
      require_probability(!std::isnan(chosen.log_probabilities[row]));
      DecodedToken token{{chosen.tokens[row], chosen.log_probabilities[row]}, {}};
      if (request.num_alternatives > 0)
        token.alternatives = most_likely(log_softmax(model.logits_of(row), 0),
                                         request.num_alternatives, request.options.vocab_size);
      result.push_back(std::move(token));
    }
  }
  return result;
}

std::vector<DecodingEvent> DecodingBatch::step() {
  admit();
  std::vector<Piece> pieces = choose_pieces();
  if (pieces.empty()) return {};
  const SequenceRows rows = lay_out(pieces);
  ForwardModel& model = model_for(rows);
  std::vector<DecodedToken> tokens = decode(pieces, model.run_sequences(rows), model);
  std::vector<DecodingEvent> events;
  for (const Piece& piece : pieces) {
    DecodingEvent& event = events.emplace_back(DecodingEvent{.sequence = piece.sequence->number});
    for (size_t i = 0; i < piece.positions.size(); ++i)
      piece.sequence->take(piece.positions[i], std::move(tokens[piece.first_result + i]), event);
    piece.sequence->advance(piece.count, event);
  }
  if (limits_.tells_experts) {
    const Tensor chosen = model.chosen_experts();
    for (size_t i = 0; i < pieces.size(); ++i)
      events[i].experts = experts_of_rows(chosen, rows.cu_seqlens[i], pieces[i].count);
  }
  for (const DecodingEvent& event : events) {
    if (event.end != DecodingEnd::kNot) remove(event.sequence);
  }
  return events;
}

}  // namespace tessera
