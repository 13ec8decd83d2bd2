#include "train/run/step_traffic.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checkpoint/together.h"
#include "core/memory.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

std::string to_text(const StepTraffic::Counts& counts) {
  Json rows = Json::array();
  for (const auto& [key, count] : counts)
    rows.push_back({key.first, static_cast<int>(key.second), count.calls, count.bytes});
  return rows.dump();
}

void add_text(const std::string& text, StepTraffic::Counts& totals) {
  for (const Json& row : Json::parse(text)) {
    CommCount& total = totals[{row[0], static_cast<CommKind>(row[1].get<int>())}];
    total.calls += row[2].get<int64_t>();
    total.bytes += row[3].get<int64_t>();
  }
}

}  // namespace

void StepTraffic::add_step(const Counts& before, const Counts& after) {
  ++num_steps_;
  for (const auto& [key, count] : after) {
    const auto old = before.find(key);
    const CommCount earlier = old == before.end() ? CommCount{} : old->second;
    if (count.bytes == earlier.bytes) continue;
    CommCount& total = totals_[key];
    total.calls += count.calls - earlier.calls;
    total.bytes += count.bytes - earlier.bytes;
  }
}

StepTraffic::Counts sum_over_ranks(const StepTraffic& traffic, Communicator& world) {
  StepTraffic::Counts totals;
  for (const std::string& text : gather_texts(world, to_text(traffic.totals())))
    add_text(text, totals);
  return totals;
}

std::string describe_traffic(const StepTraffic::Counts& totals, int64_t num_steps) {
  int64_t all = 0;
  std::string rows;
  for (const auto& [key, count] : totals) {
    all += count.bytes;
    rows +=
        fmt::format("\n  {:<26} {:<15} {:>11} in {} calls", key.first, comm_kind_name(key.second),
                    format_bytes(count.bytes / num_steps), count.calls / num_steps);
  }
  return fmt::format("a step sends {} between the ranks, all together (mean of {}):{}",
                     format_bytes(all / num_steps), num_steps, rows);
}

}  // namespace tessera
