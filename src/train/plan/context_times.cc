#include "train/plan/context_times.h"

#include <algorithm>
#include <numeric>

#include "data/step_documents.h"
#include "model/run/pass_order.h"
#include "ops/attention/attention.h"
#include "sim/step_work.h"
#include "step/build/node_types.h"
#include "train/memory/planned_rank.h"
#include "train/setup/context_batches.h"

namespace tessera {
namespace {

/// What a micro-batch's passes take on a rank, attention apart.
struct PassSeconds {
  double attention = 0;
  double ring = 0;  ///< keys and values, and gradients of them, on their way
  double other = 0;
};

bool is_attention(const Operator& op) {
  return dynamic_cast<const AttentionOperator*>(&op) != nullptr;
}

/// A program alone on the clock: exchanges beside what stands between their start and first use.
double run_alone(const ProgramTimes& times) {
  double now = 0;
  std::vector<double> ends;
  for (const ProgramMoment& moment : times.moments) {
    switch (moment.kind) {
      case ProgramMoment::Kind::kCompute:
        now += moment.seconds;
        break;
      case ProgramMoment::Kind::kStart:
        ends.push_back(now + moment.seconds);
        break;
      case ProgramMoment::Kind::kWait:
        now = std::max(now, ends.at(moment.exchange));
        break;
      case ProgramMoment::Kind::kHostWait:
        break;
    }
  }
  return now;
}

double ring_seconds(const ProgramTimes& times) {
  double seconds = 0;
  for (const ProgramMoment& moment : times.moments) {
    if (moment.kind == ProgramMoment::Kind::kStart && times.groups[moment.group].name == "ring")
      seconds += moment.seconds;
  }
  return seconds;
}

class PassClock {
 public:
  explicit PassClock(const Hardware& hardware) : work_(hardware), kernels_(hardware) {}

  PassSeconds run(const StagePrograms& programs) const {
    PassSeconds all;
    for (const PipelineChunk& chunk : programs.part.chunks) {
      for (const PassDirection direction : {PassDirection::kForward, PassDirection::kBackward}) {
        for (const ProgramRef& ref : list_pass(programs, chunk, direction))
          add(find_executable(programs, chunk, ref), all);
      }
    }
    return all;
  }

 private:
  void add(const Executable& executable, PassSeconds& to) const {
    double attention = 0;
    for (const Node& node : executable.program().nodes()) {
      if (!is_attention(*node.op)) continue;
      const auto inputs = types_at(executable, node.inputs);
      const auto outputs = types_at(executable, node.outputs);
      attention +=
          kernels_.seconds(node.op->name(), operand_format(inputs), node.op->cost(inputs, outputs));
    }
    const ProgramTimes times = work_.find(executable, RunPart(), 1);
    to.attention += attention;
    to.ring += ring_seconds(times);
    to.other += run_alone(times) - attention;
  }

  StepWork work_;
  KernelTimes kernels_;
};

/// Those that programs foresee: of sequences as long as they may be.
double foreseen_pairs(const BatchShape& shape) {
  const auto length = static_cast<double>(shape.sequence_length);
  return static_cast<double>(shape.num_tokens) * (length + 1) / 2;
}

/// Adds a stretch of tokens behind one another, which lie `place` tokens behind their sequence's
/// begin.
double pairs_of_run(int64_t place, int64_t count) {
  const auto n = static_cast<double>(count);
  return n * static_cast<double>(place) + n * (n + 1) / 2;
}

double pairs_of_tokens(std::span<const int32_t> cu_seqlens, const IndexRange& run) {
  double pairs = 0;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    const int64_t begin = std::max<int64_t>(run.begin, cu_seqlens[i - 1]);
    const int64_t end = std::min<int64_t>(run.end(), cu_seqlens[i]);
    if (begin < end) pairs += pairs_of_run(begin - cu_seqlens[i - 1], end - begin);
  }
  return pairs;
}

/// The step as rows that rings of one size share; of all ranks of a ring the slowest one counts.
ContextWay time_fixed(const Settings& settings, const Layout& layout, const BatchSource& source,
                      const ContextPlanSpec& spec, int64_t step) {
  const int64_t cp = layout.degree(Axis::kCp);
  const int64_t dp = layout.degree(Axis::kDp);
  const Zigzag tokens{.num_rows = settings.train.micro_batch,
                      .row_length = settings.data.sequence_length,
                      .ring = cp};
  ContextWay way{.micro_batches = count_micro_batches(settings, layout)};
  way.groups[cp] = way.micro_batches * dp;
  std::vector<double> done(dp, 0);
  double work = 0;
  Batch batch;
  for (int64_t i = 0; i < way.micro_batches; ++i) {
    const double met = *std::ranges::max_element(done);
    for (int64_t d = 0; d < dp; ++d) {
      source.fetch(step, i * dp + d, batch);
      const std::vector<double> pairs = pairs_of_ring(batch.cu_seqlens, tokens);
      const double slowest = *std::ranges::max_element(pairs);
      done[d] = (spec.meets ? met : done[d]) + cost_of_group(cp, spec.costs.pair * slowest, spec);
      for (const double own : pairs) work += cost_of_group(cp, spec.costs.pair * own, spec);
    }
  }
  way.seconds = *std::ranges::max_element(done);
  way.mean_seconds = work / static_cast<double>(cp * dp);
  return way;
}

ContextWay time_plan(const ContextPlan& plan, std::span<const int64_t> lengths,
                     const ContextPlanSpec& spec) {
  ContextWay way{.micro_batches = plan.num_micro_batches(),
                 .seconds = cost_of(plan, lengths, spec)};
  ContextPlanSpec alone = spec;
  alone.meets = false;
  double work = 0;
  for (const auto& groups : plan.micro_batches) {
    for (const ContextGroup& group : groups) {
      ++way.groups[group.degree];
      ContextGroup only = group;
      only.first_rank = 0;
      alone.num_ranks = group.degree;
      work += static_cast<double>(group.degree) * cost_of({{{only}}}, lengths, alone);
    }
  }
  way.mean_seconds = work / static_cast<double>(spec.num_ranks);
  return way;
}

}  // namespace

std::vector<double> pairs_of_ring(std::span<const int32_t> cu_seqlens, const Zigzag& tokens) {
  std::vector<double> pairs(tokens.ring, 0);
  for (int64_t rank = 0; rank < tokens.ring; ++rank) {
    tokens.for_each_run(cu_seqlens, rank, [&](const IndexRange& run) {
      pairs[rank] += pairs_of_tokens(cu_seqlens, run);
    });
  }
  return pairs;
}

ContextCosts simulate_costs(const Settings& settings, int64_t num_ranks, const Hardware& hardware) {
  Settings on_host = settings;
  on_host.run.device = DeviceChoice::kCpu;
  const PlannedRank planned = plan_rank(on_host, 0, num_ranks);
  const auto& degrees = planned.model.programs().of_degrees;
  ensure(!degrees.empty(), "costs of contexts without parallel.dynamic_cp");
  const PassClock clock(hardware);
  const PassSeconds one = clock.run(*degrees.front());
  const auto tokens = static_cast<double>(degrees.front()->shape.num_tokens);
  ContextCosts costs{.token = one.other / tokens,
                     .pair = one.attention / foreseen_pairs(degrees.front()->shape)};
  if (degrees.size() == 1) return costs;
  costs.exchange = clock.run(*degrees[1]).ring / tokens;
  return costs;
}

ContextComparison compare_contexts(const Settings& settings, int64_t num_ranks,
                                   const BatchSource& source, const ContextCosts& costs,
                                   int64_t step) {
  const Layout layout(settings.parallel.layout, num_ranks);
  ContextPlanSpec spec = context_spec(settings, layout, source.max_sequences() + kFillingSequences);
  const StepDocuments documents(source, step);
  const std::vector<int64_t>& lengths = documents.lengths();
  const ContextPlan plan = plan_contexts(lengths, spec);
  spec.costs = costs;
  return {.documents = std::ssize(lengths),
          .tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0}),
          .longest = lengths.empty() ? 0 : *std::ranges::max_element(lengths),
          .fixed = time_fixed(settings, layout, source, spec, step),
          .dynamic = time_plan(plan, lengths, spec)};
}

}  // namespace tessera
