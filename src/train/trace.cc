#include "train/trace.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/together.h"
#include "core/file.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

const char* row_name(int row) {
  constexpr const char* kNames[] = {"steps", "computation", "exchanges under way"};
  return kNames[row];
}

}  // namespace

NodeObserver TraceRecorder::observer() {
  return [this](const NodeEvent& event) { add(event); };
}

double TraceRecorder::microseconds(Clock::time_point time) const {
  return std::chrono::duration<double, std::micro>(time - origin_).count();
}

void TraceRecorder::add(const std::string& name, Clock::time_point begin, Clock::time_point end) {
  events_.push_back({.name = name,
                     .row = Row::kSteps,
                     .begin = microseconds(begin),
                     .duration = microseconds(end) - microseconds(begin)});
}

void TraceRecorder::add(const NodeEvent& event) {
  Event entry{.name = std::string(event.node.op->name()),
              .program = event.program.name(),
              .attributes = event.node.op->attributes(),
              .begin = microseconds(event.begin),
              .duration = microseconds(event.end) - microseconds(event.begin)};
  if (event.phase == NodeEvent::Phase::kStart) {
    started_.emplace_back(&event.node, event.begin);
    return;
  }
  if (event.phase == NodeEvent::Phase::kWait) {
    const auto start =
        std::ranges::find(started_, &event.node, [](const auto& s) { return s.first; });
    if (start != started_.end()) {
      Event exchange = entry;
      exchange.row = Row::kExchanges;
      exchange.begin = microseconds(start->second);
      exchange.duration = microseconds(event.end) - exchange.begin;
      events_.push_back(std::move(exchange));
      started_.erase(start);
    }
    entry.name = "wait for " + entry.name;
  }
  events_.push_back(std::move(entry));
}

std::string TraceRecorder::to_json(int64_t rank) const {
  std::vector<std::string> parts;
  parts.push_back(Json{{"ph", "M"},
                       {"name", "process_name"},
                       {"pid", rank},
                       {"args", {{"name", fmt::format("rank {}", rank)}}}}
                      .dump());
  for (int row = 0; row < 3; ++row) {
    parts.push_back(Json{{"ph", "M"},
                         {"name", "thread_name"},
                         {"pid", rank},
                         {"tid", row},
                         {"args", {{"name", row_name(row)}}}}
                        .dump());
  }
  for (const Event& event : events_) {
    parts.push_back(Json{{"ph", "X"},
                         {"name", event.name},
                         {"pid", rank},
                         {"tid", static_cast<int>(event.row)},
                         {"ts", event.begin},
                         {"dur", event.duration},
                         {"args", {{"program", event.program}, {"attributes", event.attributes}}}}
                        .dump());
  }
  return fmt::format("{}", fmt::join(parts, ",\n"));
}

void write_trace(const TraceRecorder& recorder, const std::filesystem::path& file,
                 Communicator& world) {
  const auto ranks = gather_texts(world, recorder.to_json(world.rank()));
  together(world, [&] {
    if (world.rank() != 0) return;
    write_file_synced(file, fmt::format("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n",
                                        fmt::join(ranks, ",\n")));
  });
}

}  // namespace tessera
