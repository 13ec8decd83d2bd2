#include "parallel/context_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>

#include "core/error.h"

namespace tessera {
namespace {

/// Numbers of micro-batches tried beyond the fewest that hold all documents.
constexpr int64_t kMoreMicroBatches = 2;
/// Shares of a rank's mean work: a document that would take a rank longer gets more ranks.
constexpr double kQuotas[] = {std::numeric_limits<double>::infinity(), 1, 0.5, 0.25, 0.125, 0.0625};

/// Pairs of a query and a key that it sees in a document.
double pairs_of(int64_t length) {
  return 0.5 * static_cast<double>(length) * static_cast<double>(length + 1);
}

double attention_of(int64_t length, int64_t degree, const ContextCosts& costs) {
  return costs.pair * pairs_of(padded_length(length, degree)) / static_cast<double>(degree);
}

/// A group while it is filled.
struct Bin {
  int64_t degree = 1;
  int64_t micro_batch = 0;
  int64_t first_rank = 0;
  int64_t room = 0;
  double attention = 0;  ///< of each of its ranks
  std::vector<int32_t> documents = {};

  bool takes(int64_t length, int64_t max_documents) const {
    return padded_length(length, degree) <= room && std::ssize(documents) < max_documents;
  }
  void add(int32_t document, int64_t length, const ContextCosts& costs) {
    room -= padded_length(length, degree);
    attention += attention_of(length, degree, costs);
    documents.push_back(document);
  }
};

/// What one packing is asked for.
struct PackRequest {
  int64_t num_micro_batches = 1;
  double quota = 0;  ///< attention of a rank for one document, at most where more ranks can be had
  bool tight = false;  ///< fills groups closely rather than evenly
};

/// Packs the documents of a step into so many micro-batches.
class Packer {
 public:
  Packer(std::span<const int64_t> lengths, std::span<const int32_t> by_length,
         const ContextPlanSpec& spec, const PackRequest& request)
      : lengths_(lengths),
        by_length_(by_length),
        spec_(spec),
        request_(request),
        is_free_(request.num_micro_batches * spec.num_ranks, true),
        rank_work_(spec.num_ranks, 0),
        most_work_(request.num_micro_batches, 0) {}

  /// Nothing where they do not fit.
  std::optional<ContextPlan> pack();

 private:
  /// How much later a step is done for more work, and what it then amounts to where that is even.
  struct Score {
    double later = 0;
    double work = 0;
    bool is_at_most(const Score& other) const {
      return later != other.later ? later < other.later : work <= other.work;
    }
  };

  int64_t choose_degree(int64_t length) const;
  void fill_shared();
  bool place_shared();
  std::optional<Bin> find_block(const Bin& bin) const;
  bool is_block_free(const Bin& bin) const;
  void open_singles();
  bool fill_singles();
  Bin* find_bin(int64_t length);
  Score score(const Bin& bin, double more) const;
  void take(const Bin& bin, double more);
  double work_of_block(const Bin& bin) const;
  ContextPlan finish();

  std::span<const int64_t> lengths_;
  std::span<const int32_t> by_length_;
  const ContextPlanSpec& spec_;
  PackRequest request_;
  std::vector<Bin> bins_;
  std::vector<int32_t> singles_;   // documents of one rank each, longest first
  std::vector<bool> is_free_;      // [micro-batches, ranks]
  std::vector<double> rank_work_;  // attention of each rank so far
  std::vector<double> most_work_;  // of each micro-batch's ranks, the most
};

/// The fewest ranks that hold it and are done with it within the quota.
int64_t Packer::choose_degree(int64_t length) const {
  int64_t degree = 1;
  while (degree < spec_.max_degree && (padded_length(length, degree) > degree * spec_.rank_tokens ||
                                       attention_of(length, degree, spec_.costs) > request_.quota))
    degree *= 2;
  return degree;
}

/// Documents that several ranks share, of one degree side by side as far as room and quota go.
void Packer::fill_shared() {
  for (const int32_t document : by_length_) {
    const int64_t length = lengths_[document];
    const int64_t degree = choose_degree(length);
    if (degree == 1) {
      singles_.push_back(document);
      continue;
    }
    const double more = attention_of(length, degree, spec_.costs);
    auto bin = std::ranges::find_if(bins_, [&](const Bin& open) {
      return open.degree == degree && open.takes(length, spec_.max_documents) &&
             open.attention + more <= request_.quota;
    });
    if (bin == bins_.end())
      bin = bins_.insert(bin, {.degree = degree, .room = degree * spec_.rank_tokens});
    bin->add(document, length, spec_.costs);
  }
  std::ranges::stable_sort(bins_, [](const Bin& a, const Bin& b) {
    return a.degree != b.degree ? a.degree > b.degree : a.attention > b.attention;
  });
}

bool Packer::is_block_free(const Bin& bin) const {
  const auto first = is_free_.begin() + bin.micro_batch * spec_.num_ranks + bin.first_rank;
  return std::all_of(first, first + bin.degree, [](bool is_free) { return is_free; });
}

double Packer::work_of_block(const Bin& bin) const {
  const auto first = rank_work_.begin() + bin.first_rank;
  return *std::max_element(first, first + bin.degree);
}

Packer::Score Packer::score(const Bin& bin, double more) const {
  if (!spec_.meets) return {0, work_of_block(bin) + more};
  const double work = bin.attention + more;
  return {std::max(work - most_work_[bin.micro_batch], 0.0), work};
}

/// More attention for the ranks of a group.
void Packer::take(const Bin& bin, double more) {
  for (int64_t i = 0; i < bin.degree; ++i) rank_work_[bin.first_rank + i] += more;
  double& most = most_work_[bin.micro_batch];
  most = std::max(most, bin.attention);
}

/// Where a group of that degree and work delays the step least.
std::optional<Bin> Packer::find_block(const Bin& bin) const {
  std::optional<Bin> best;
  Score best_score;
  Bin at = bin;
  const double own = spec_.meets ? 0 : bin.attention;
  for (at.micro_batch = 0; at.micro_batch < request_.num_micro_batches; ++at.micro_batch) {
    for (at.first_rank = 0; at.first_rank < spec_.num_ranks; at.first_rank += at.degree) {
      if (!is_block_free(at)) continue;
      const Score here = score(at, own);
      if (best && best_score.is_at_most(here)) continue;
      best = at;
      best_score = here;
    }
  }
  return best;
}

/// Larger groups first, so that what is left free always holds whole blocks of the next ones.
bool Packer::place_shared() {
  for (Bin& bin : bins_) {
    const auto found = find_block(bin);
    if (!found) return false;
    bin.micro_batch = found->micro_batch;
    bin.first_rank = found->first_rank;
    const auto first = is_free_.begin() + bin.micro_batch * spec_.num_ranks + bin.first_rank;
    std::fill(first, first + bin.degree, false);
    take(bin, bin.attention);
  }
  return true;
}

void Packer::open_singles() {
  for (size_t i = 0; i < is_free_.size(); ++i) {
    if (!is_free_[i]) continue;
    const auto place = static_cast<int64_t>(i);
    bins_.push_back({.micro_batch = place / spec_.num_ranks,
                     .first_rank = place % spec_.num_ranks,
                     .room = spec_.rank_tokens});
  }
}

Bin* Packer::find_bin(int64_t length) {
  Bin* best = nullptr;
  Score best_score;
  for (Bin& bin : bins_) {
    if (!bin.takes(length, spec_.max_documents)) continue;
    const Score here = request_.tight ? Score{0, static_cast<double>(bin.room)}
                                      : score(bin, attention_of(length, bin.degree, spec_.costs));
    if (best != nullptr && best_score.is_at_most(here)) continue;
    best = &bin;
    best_score = here;
  }
  return best;
}

bool Packer::fill_singles() {
  for (const int32_t document : singles_) {
    const int64_t length = lengths_[document];
    Bin* const bin = find_bin(length);
    if (bin == nullptr) return false;
    bin->add(document, length, spec_.costs);
    take(*bin, attention_of(length, bin->degree, spec_.costs));
  }
  return true;
}

ContextPlan Packer::finish() {
  ContextPlan plan;
  plan.micro_batches.resize(request_.num_micro_batches);
  std::ranges::sort(bins_, {}, &Bin::first_rank);
  for (Bin& bin : bins_) {
    std::ranges::sort(bin.documents);
    plan.micro_batches[bin.micro_batch].push_back(
        {bin.degree, bin.first_rank, std::move(bin.documents)});
  }
  plan.cost = cost_of(plan, lengths_, spec_);
  return plan;
}

std::optional<ContextPlan> Packer::pack() {
  fill_shared();
  if (!place_shared()) return std::nullopt;
  open_singles();
  if (!fill_singles()) return std::nullopt;
  return finish();
}

double mean_attention(std::span<const int64_t> lengths, const ContextPlanSpec& spec) {
  double sum = 0;
  for (const int64_t length : lengths) sum += attention_of(length, 1, spec.costs);
  return sum / static_cast<double>(spec.num_ranks);
}

std::vector<int32_t> order_by_length(std::span<const int64_t> lengths) {
  std::vector<int32_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(), [&](int32_t i) { return lengths[i]; });
  return order;
}

void check(std::span<const int64_t> lengths, const ContextPlanSpec& spec) {
  ensure(spec.num_ranks >= 1 && spec.rank_tokens >= 1 && spec.max_documents >= 1 &&
             spec.num_ranks % spec.max_degree == 0,
         "a plan for {} ranks of {} tokens with degrees up to {}", spec.num_ranks, spec.rank_tokens,
         spec.max_degree);
  for (const int64_t length : lengths) {
    ensure(
        length >= 1 && padded_length(length, spec.max_degree) <= spec.max_degree * spec.rank_tokens,
        "a document of {} tokens for {} ranks of {}", length, spec.max_degree, spec.rank_tokens);
  }
}

}  // namespace

int64_t padded_length(int64_t length, int64_t degree) {
  if (degree == 1) return length;
  const int64_t unit = 2 * degree;
  return (length + unit - 1) / unit * unit;
}

int64_t largest_context(int64_t num_ranks) {
  return num_ranks & -num_ranks;
}

const ContextGroup& ContextPlan::group_of(int64_t micro_batch, int64_t rank) const {
  const auto& groups = micro_batches.at(micro_batch);
  const auto behind = std::ranges::upper_bound(groups, rank, {}, &ContextGroup::first_rank);
  ensure(behind != groups.begin(), "rank {} is in no group", rank);
  return *std::prev(behind);
}

double cost_of_group(int64_t degree, double attention, const ContextPlanSpec& spec) {
  const auto tokens = static_cast<double>(spec.rank_tokens);
  const double exchanged = tokens * spec.costs.exchange * static_cast<double>(degree - 1);
  return tokens * spec.costs.token + std::max(attention, exchanged);
}

double cost_of(const ContextPlan& plan, std::span<const int64_t> lengths,
               const ContextPlanSpec& spec) {
  std::vector<double> done(spec.num_ranks, 0);
  for (const auto& groups : plan.micro_batches) {
    const double all = *std::ranges::max_element(done);
    for (const ContextGroup& group : groups) {
      const auto first = done.begin() + group.first_rank;
      const double begin = spec.meets ? all : *std::max_element(first, first + group.degree);
      double attention = 0;
      for (const int32_t document : group.documents)
        attention += attention_of(lengths[document], group.degree, spec.costs);
      std::fill_n(first, group.degree, begin + cost_of_group(group.degree, attention, spec));
    }
  }
  return *std::ranges::max_element(done);
}

ContextPlan plan_contexts(std::span<const int64_t> lengths, const ContextPlanSpec& spec) {
  check(lengths, spec);
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const int64_t capacity = spec.num_ranks * spec.rank_tokens;
  const int64_t fewest = std::max<int64_t>((total + capacity - 1) / capacity, 1);
  const double mean = mean_attention(lengths, spec);
  const std::vector<int32_t> by_length = order_by_length(lengths);
  std::optional<ContextPlan> best;
  const auto most = [&] { return fewest + std::ssize(lengths); };
  int64_t last = most();
  for (int64_t count = fewest; count <= last; ++count) {
    for (const double quota : kQuotas) {
      for (const bool tight : {false, true}) {
        auto plan = Packer(lengths, by_length, spec, {count, quota * mean, tight}).pack();
        if (!plan) continue;
        if (!best || plan->cost < best->cost) best = std::move(plan);
      }
    }
    if (best && last == most()) last = std::min(count + kMoreMicroBatches, most());
  }
  ensure(best.has_value(), "{} documents fit no plan", lengths.size());
  return std::move(*best);
}

}  // namespace tessera
