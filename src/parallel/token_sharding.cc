#include "parallel/token_sharding.h"

#include <numeric>
#include <string>

#include "core/error.h"

namespace tessera {
namespace {

/// "96 or 104": the multiples of `step` beside `value`, which is none.
std::string nearest_multiples(int64_t value, int64_t step) {
  const int64_t below = value / step * step;
  if (below == 0) return fmt::format("{}", step);
  return fmt::format("{} or {}", below, below + step);
}

void check_positive(const TokenSharding& sharding) {
  const std::pair<const char*, int64_t> counts[] = {
      {"train.micro_batch", sharding.num_rows},
      {"data.sequence_length", sharding.row_length},
      {"parallel.cp (ring)", sharding.ring},
      {"parallel.cp (all-to-all)", sharding.all_to_all},
      {"parallel.tp", sharding.tp}};
  for (const auto& [name, count] : counts) {
    require(count >= 1, "{} is {}; it must be at least 1", name, count);
  }
}

void check_coordinate(const char* name, int64_t coordinate, int64_t degree) {
  ensure(0 <= coordinate && coordinate < degree, "{} coordinate {} of {}", name, coordinate,
         degree);
}

}  // namespace

void check_token_sharding(const TokenSharding& sharding) {
  check_positive(sharding);
  const auto& [num_rows, row_length, ring, all_to_all, tp] = sharding;
  const int64_t ranks = ring * all_to_all * tp;
  if (sharding.zigzag().divides() && num_rows * row_length % ranks == 0) return;
  const int64_t chunks = ring == 1 ? 1 : 2 * ring;
  const int64_t length_step = std::lcm(chunks, ranks / std::gcd(ranks, num_rows));
  const int64_t batch_step = ranks / std::gcd(ranks, row_length);
  std::string choices =
      fmt::format("data.sequence_length {}", nearest_multiples(row_length, length_step));
  if (row_length % chunks == 0) {
    choices += fmt::format(", or train.micro_batch {}", nearest_multiples(num_rows, batch_step));
  }
  user_error(
      "train.micro_batch {} x data.sequence_length {} = {} tokens do not spread evenly over "
      "parallel.cp {} (ring {} x all-to-all {}) x parallel.tp {} = {} ranks{}; take {}, or smaller "
      "degrees",
      num_rows, row_length, num_rows * row_length, ring * all_to_all, ring, all_to_all, tp, ranks,
      chunks == 1 ? "" : fmt::format(", each row in {} equal chunks", chunks), choices);
}

std::vector<int64_t> ring_tokens(const TokenSharding& sharding, int64_t ring_coordinate) {
  check_coordinate("ring", ring_coordinate, sharding.ring);
  std::vector<int64_t> tokens;
  tokens.reserve(sharding.tokens_per_ring_rank());
  sharding.zigzag().for_each_run(ring_coordinate, [&](const IndexRange& run) {
    for (int64_t token = run.begin; token < run.end(); ++token) tokens.push_back(token);
  });
  return tokens;
}

std::vector<int64_t> local_tokens(const TokenSharding& sharding, int64_t ring_coordinate,
                                  int64_t all_to_all_coordinate, int64_t tp_coordinate) {
  check_coordinate("all-to-all", all_to_all_coordinate, sharding.all_to_all);
  check_coordinate("tp", tp_coordinate, sharding.tp);
  const std::vector<int64_t> tokens = ring_tokens(sharding, ring_coordinate);
  const int64_t count = sharding.tokens_per_rank();
  const auto first = tokens.begin() + (all_to_all_coordinate * sharding.tp + tp_coordinate) * count;
  return {first, first + count};
}

}  // namespace tessera
