#include "model/weights/hash_table.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/random.h"

namespace tessera {
namespace {

template <typename T>
void shuffle(std::span<T> values, Random& random) {
  for (size_t left = values.size(); left > 1; --left)
    std::swap(values[left - 1], values[random.next_below(left)]);
}

/// Random orders of all experts, one behind the other.
class ExpertOrders {
 public:
  ExpertOrders(int64_t num_experts, Random& random) : order_(num_experts), random_(random) {
    std::iota(order_.begin(), order_.end(), 0.0F);
    next_ = order_.size();
  }

  /// The next expert that is none of the `taken` ones, which then is out of this order.
  float take(std::span<const float> taken) {
    if (next_ == order_.size()) {
      shuffle(std::span(order_), random_);
      next_ = 0;
    }
    size_t at = next_;
    // An id has at most as many experts as an order: one that it lacks is left.
    while (std::ranges::find(taken, order_[at]) != taken.end()) ++at;
    std::swap(order_[at], order_[next_]);
    return order_[next_++];
  }

 private:
  std::vector<float> order_;
  Random& random_;
  size_t next_ = 0;
};

}  // namespace

std::vector<float> draw_hash_table(const HashTableSpec& spec, uint64_t seed, uint64_t stream) {
  ensure(spec.top_k >= 1 && spec.top_k <= spec.num_experts, "a table of {} of {} experts",
         spec.top_k, spec.num_experts);
  Random random(seed, stream);
  // Ids in a random order: neighbours would share orders, and a tokenizer's are alike.
  std::vector<int64_t> ids(spec.vocab_size);
  std::iota(ids.begin(), ids.end(), 0);
  shuffle(std::span(ids), random);
  std::vector<float> table(spec.vocab_size * spec.top_k);
  ExpertOrders orders(spec.num_experts, random);
  for (const int64_t id : ids) {
    const std::span<float> row = std::span(table).subspan(id * spec.top_k, spec.top_k);
    for (int64_t k = 0; k < spec.top_k; ++k) row[k] = orders.take(row.first(k));
  }
  return table;
}

}  // namespace tessera
