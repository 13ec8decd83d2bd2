#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

struct HashTableSpec {
  int64_t vocab_size = 0;  ///< V
  int64_t top_k = 1;       ///< K
  int64_t num_experts = 1;
};

/// A table [V, K] of the experts of token ids (MoeConfig::hash_layers), a pure function of its
/// arguments: an id's experts are distinct, and each expert has as many ids as the others, give or
/// take one. Ids take what is next of random orders of all experts, one after the other; where two
/// orders meet within an id, the second one's are exchanged so that none comes twice. How often
/// tokens with these ids are is another matter, which no table knows.
std::vector<float> draw_hash_table(const HashTableSpec& spec, uint64_t seed, uint64_t stream);

}  // namespace tessera
