#include "program/compile/schedule.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "core/memory.h"
#include "program/dependencies.h"
#include "program/memory_plan.h"

namespace tessera {
namespace {

/// What does not change while an order is searched.
struct Graph {
  int num_nodes = 0;
  std::vector<std::vector<int>> dependencies;
  std::vector<std::vector<int>> dependents;
  /// By node, the exchanges that must be complete before it starts, ascending.
  std::vector<std::vector<int>> waits_for;
  std::vector<int> exchanges;  ///< in order
  std::vector<bool> is_exchange;
  std::vector<std::vector<ValueId>> touched;  ///< by node, each value once
  std::vector<int64_t> workspace;             ///< by node, bytes
  IdVector<ValueId, int64_t> bytes;           ///< 0 unless transient
  /// By node, how long it takes, in FLOPs that could be done meanwhile.
  std::vector<double> time;
  /// By number of the exchange and node, whether the exchange needs the node (itself included).
  std::vector<std::vector<bool>> needed_by;

  Graph(const Program& program, const MemoryPlan& plan, double flops_per_byte);

 private:
  void find_exchanges(const Program& program, const std::vector<NodeAccess>& accesses);
  void find_times(const Program& program, double flops_per_byte);
  std::vector<bool> find_needed(int exchange) const;
};

Graph::Graph(const Program& program, const MemoryPlan& plan, double flops_per_byte)
    : num_nodes(static_cast<int>(program.nodes().size())),
      dependencies(find_dependencies(program)),
      dependents(program.nodes().size()),
      waits_for(program.nodes().size()) {
  for (int idx = 0; idx < num_nodes; ++idx) {
    for (const int before : dependencies[idx]) dependents[before].push_back(idx);
  }
  std::vector<NodeAccess> accesses;
  for (const Node& node : program.nodes()) accesses.push_back(find_access(program, node));
  for (const NodeAccess& access : accesses) {
    std::set<ValueId> values(access.reads.begin(), access.reads.end());
    values.insert(access.writes.begin(), access.writes.end());
    touched.emplace_back(values.begin(), values.end());
  }
  for (const int64_t num_bytes : plan.workspace_bytes) workspace.push_back(align_up(num_bytes));
  for (ValueId id = 0; id < program.num_values(); ++id) {
    const bool transient = plan.values[id].storage == Storage::kTransient;
    bytes.add(transient ? align_up(program.type(id).num_bytes()) : 0);
  }
  find_exchanges(program, accesses);
  find_times(program, flops_per_byte);
  for (const int exchange : exchanges) needed_by.push_back(find_needed(exchange));
}

void Graph::find_times(const Program& program, double flops_per_byte) {
  // Kernels without products move about a byte of memory in the time of this many FLOPs.
  constexpr double kFlopsPerMemoryByte = 200;
  // An exchange of nothing takes as long as one of this many bytes.
  constexpr double kLatencyBytes = 1 << 20;
  for (const Node& node : program.nodes()) {
    const Cost cost = node.op->cost(program.types(node.inputs), program.types(node.outputs));
    time.push_back(node.op->communicates() ? (cost.bytes / 2 + kLatencyBytes) * flops_per_byte
                                           : cost.flops + cost.bytes * kFlopsPerMemoryByte);
  }
}

std::vector<bool> Graph::find_needed(int exchange) const {
  std::vector<bool> needed(num_nodes, false);
  std::vector<int> open = {exchange};
  while (!open.empty()) {
    const int node = open.back();
    open.pop_back();
    if (needed[node]) continue;
    needed[node] = true;
    open.insert(open.end(), dependencies[node].begin(), dependencies[node].end());
  }
  return needed;
}

void Graph::find_exchanges(const Program& program, const std::vector<NodeAccess>& accesses) {
  for (int idx = 0; idx < num_nodes; ++idx) {
    const auto& node = program.nodes()[idx];
    is_exchange.push_back(node.op->communicates());
    if (node.op->communicates()) exchanges.push_back(idx);
  }
  for (const int exchange : exchanges) {
    for (int idx = exchange + 1; idx < num_nodes; ++idx) {
      if (must_wait(accesses[exchange], accesses[idx])) waits_for[idx].push_back(exchange);
    }
  }
}

/// The transient memory in use at a point of an order.
class LiveMemory {
 public:
  explicit LiveMemory(const Graph& graph)
      : graph_(graph), touches_left_(graph.bytes.size(), 0), made_(graph.bytes.size(), false) {
    for (const auto& values : graph.touched) {
      for (const ValueId id : values) ++touches_left_[id];
    }
  }

  /// The bytes in use while `node` runs next.
  int64_t with(int node) const {
    int64_t total = live_ + graph_.workspace[node];
    for (const ValueId id : graph_.touched[node]) {
      if (!made_[id]) total += graph_.bytes[id];
    }
    return total;
  }
  void start(int node) {
    live_ = with(node);
    for (const ValueId id : graph_.touched[node]) made_[id] = true;
  }
  void finish(int node) {
    live_ -= graph_.workspace[node];
    for (const ValueId id : graph_.touched[node]) {
      if (--touches_left_[id] == 0) live_ -= graph_.bytes[id];
    }
  }

 private:
  const Graph& graph_;
  IdVector<ValueId, int> touches_left_;
  IdVector<ValueId, bool> made_;
  int64_t live_ = 0;
};

/// Searches one order, node by node.
class Search {
 public:
  /// `limit` is in bytes. A node waits that would hide less than `patience` of what it can hide
  /// later.
  Search(const Graph& graph, int64_t limit, double patience)
      : graph_(graph), limit_(limit), patience_(patience), memory_(graph) {
    for (int idx = 0; idx < graph.num_nodes; ++idx) {
      before_.push_back(std::ssize(graph.dependencies[idx]));
      if (before_.back() == 0) ready_.insert(idx);
    }
  }

  std::vector<int> run() {
    while (!ready_.empty()) take(choose());
    return std::move(order_);
  }

 private:
  int choose() const {
    for (const auto& preference :
         {&Search::is_free_exchange, &Search::is_free_and_needed, &Search::fills_the_wait,
          &Search::is_needed, &Search::is_ready}) {
      for (const int node : ready_) {
        if ((this->*preference)(node) && memory_.with(node) <= limit_) return node;
      }
    }
    // The earliest node left depends only on earlier ones, so it is ready.
    return *ready_.begin();
  }

  /// Needs no exchange that is under way.
  bool is_free(int node) const {
    return std::ranges::none_of(graph_.waits_for[node],
                                [this](int exchange) { return under_way_.contains(exchange); });
  }
  bool is_needed(int node) const {
    return next_exchange_ < graph_.exchanges.size() && graph_.needed_by[next_exchange_][node];
  }
  bool is_free_exchange(int node) const { return graph_.is_exchange[node] && is_free(node); }
  bool is_free_and_needed(int node) const { return is_needed(node) && is_free(node); }
  bool fills_the_wait(int node) const {
    return !under_way_.empty() && is_free(node) && hides_now(node) >= patience_ * hides_later(node);
  }
  bool is_ready(int /*node*/) const { return true; }

  /// How much of the exchanges under way a node would hide.
  double hides_now(int node) const {
    double left = 0;
    for (const auto& [exchange, time_left] : under_way_) left = std::max(left, time_left);
    return std::min(graph_.time[node], left);
  }
  /// The same of the longest later exchange that can start before it.
  double hides_later(int node) const {
    double longest = 0;
    for (size_t i = next_exchange_; i < graph_.exchanges.size(); ++i) {
      const auto exchange = graph_.exchanges[i];
      if (!graph_.needed_by[i][node]) longest = std::max(longest, graph_.time[exchange]);
    }
    return std::min(graph_.time[node], longest);
  }

  void take(int node) {
    for (const int exchange : graph_.waits_for[node]) {
      if (under_way_.erase(exchange) > 0) memory_.finish(exchange);
    }
    memory_.start(node);
    ready_.erase(node);
    order_.push_back(node);
    const double time = graph_.time[node];
    if (graph_.is_exchange[node]) {
      under_way_[node] = time;
      ++next_exchange_;
    } else {
      memory_.finish(node);
      for (auto& [exchange, time_left] : under_way_) time_left = std::max(time_left - time, 0.0);
    }
    for (const int dependent : graph_.dependents[node]) {
      if (--before_[dependent] == 0) ready_.insert(dependent);
    }
  }

  const Graph& graph_;
  int64_t limit_;
  double patience_;
  LiveMemory memory_;
  std::vector<std::ptrdiff_t> before_;
  std::set<int> ready_;
  std::map<int, double> under_way_;  ///< exchanges, and what is left of their times
  size_t next_exchange_ = 0;
  std::vector<int> order_;
};

/// Where in an order the exchange at `start` must be complete: before the first node that waits
/// for it.
size_t find_wait(const Graph& graph, const std::vector<int>& order, size_t start) {
  const auto waits = [&](int node) {
    return std::ranges::binary_search(graph.waits_for[node], order[start]);
  };
  size_t at = start + 1;
  while (at < order.size() && !waits(order[at])) ++at;
  return at;
}

/// The time of exchanges that other nodes hide, those `order` puts between start and first use.
double hidden_time(const Graph& graph, const std::vector<int>& order) {
  double total = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const int node = order[i];
    if (!graph.is_exchange[node]) continue;
    double between = 0;
    const size_t wait = find_wait(graph, order, i);
    for (size_t j = i + 1; j < wait; ++j) {
      const int other = order[j];
      if (!graph.is_exchange[other]) between += graph.time[other];
    }
    total += std::min(between, graph.time[node]);
  }
  return total;
}

/// What hidden_time is at most.
double exchange_time(const Graph& graph) {
  double total = 0;
  for (const int exchange : graph.exchanges) total += graph.time[exchange];
  return total;
}

}  // namespace

std::vector<int> find_schedule(const Program& program, const std::vector<ValueId>& saved,
                               const ScheduleOptions& options) {
  std::vector<int> best(program.nodes().size());
  std::iota(best.begin(), best.end(), 0);
  const auto communicates = [](const Node& node) { return node.op->communicates(); };
  if (std::ranges::none_of(program.nodes(), communicates)) return best;
  const MemoryPlan plan = plan_memory(program, saved, options.workspace);
  const Graph graph(program, plan, options.flops_per_byte);
  double most_hidden = hidden_time(graph, best);
  const double all = exchange_time(graph);
  const double limit = static_cast<double>(plan.transient_bytes) * (1 + options.memory_growth);
  for (const double share : {1.0, 0.9, 0.8, 0.65, 0.5}) {
    for (const double patience : {0.5, 0.0}) {
      if (most_hidden >= all) return best;
      std::vector<int> order = Search(graph, static_cast<int64_t>(limit * share), patience).run();
      const double hidden = hidden_time(graph, order);
      if (hidden <= most_hidden) continue;
      const MemoryPlan reordered = plan_memory(program.reordered(order), saved, options.workspace);
      if (static_cast<double>(reordered.transient_bytes) > limit) continue;
      most_hidden = hidden;
      best = std::move(order);
    }
  }
  return best;
}

Program schedule(const Program& program, const std::vector<ValueId>& saved,
                 const ScheduleOptions& options) {
  return program.reordered(find_schedule(program, saved, options));
}

}  // namespace tessera
