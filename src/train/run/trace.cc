#include "train/run/trace.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/together.h"
#include "core/file/file.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

Json name_process(int64_t rank) {
  return {{"ph", "M"},
          {"name", "process_name"},
          {"pid", rank},
          {"args", {{"name", fmt::format("rank {}", rank)}}}};
}

Json name_row(int64_t rank, int64_t row, const std::string& name) {
  return {{"ph", "M"},
          {"name", "thread_name"},
          {"pid", rank},
          {"tid", row},
          {"args", {{"name", name}}}};
}

}  // namespace

NodeObserver TraceRecorder::observer() {
  return [this](const NodeEvent& event) { add(event); };
}

UpdateObserver TraceRecorder::update_observer() {
  return [this](std::string_view name, Clock::time_point begin, Clock::time_point end) {
    events_.push_back({.name = std::string(name),
                       .program = "update",
                       .attributes = "",
                       .row = name == Optimizer::kOnHost ? Row::kHostUpdates : Row::kComputation,
                       .begin = microseconds(begin),
                       .duration = microseconds(end) - microseconds(begin)});
  };
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

// The communicator tells of what a node started; of the node itself its wait is left.
void TraceRecorder::add(const NodeEvent& event) {
  if (event.phase == NodeEvent::Phase::kStart) return;
  const std::string name(event.node.op->name());
  events_.push_back({.name = event.phase == NodeEvent::Phase::kWait ? "wait for " + name : name,
                     .program = event.program.name(),
                     .attributes = event.node.op->attributes(),
                     .begin = microseconds(event.begin),
                     .duration = microseconds(event.end) - microseconds(event.begin)});
}

TaskObserver TraceRecorder::task_observer() {
  return [this](const Task& task, Device::Time begin, Device::Time end) {
    events_.push_back({.name = task.name,
                       .program = "step",
                       .attributes = "",
                       .row = Row::kTasks,
                       .begin = microseconds(begin),
                       .duration = microseconds(end) - microseconds(begin)});
  };
}

void TraceRecorder::watch(CommStatistics& statistics) {
  stop_watching();
  watched_ = &statistics;
  statistics.observe([this](const CommEvent& event) { communications_.push_back(event); });
}

void TraceRecorder::stop_watching() {
  if (watched_ != nullptr) watched_->observe(nullptr);
  watched_ = nullptr;
}

std::vector<std::string> TraceRecorder::place_communications(
    int64_t first_row, std::vector<Communication>& placed) const {
  std::map<std::string, std::vector<CommEvent>> by_track;
  for (const CommEvent& event : communications_)
    by_track[fmt::format("{} {}", event.group, comm_kind_name(event.kind))].push_back(event);
  std::vector<std::string> names;
  for (auto& [track, events] : by_track) {
    std::ranges::stable_sort(events, {}, &CommEvent::begin);
    const int64_t first = first_row + std::ssize(names);
    std::vector<Clock::time_point> ends;  // of the last in each row
    for (const CommEvent& event : events) {
      const auto row =
          std::ranges::find_if(ends, [&](Clock::time_point end) { return end <= event.begin; });
      placed.push_back({event, first + (row - ends.begin())});
      if (row == ends.end()) {
        names.push_back(track);
        ends.push_back(event.end);
      } else {
        *row = event.end;
      }
    }
  }
  return names;
}

std::string TraceRecorder::to_json(int64_t rank) const {
  std::vector<Communication> communications;
  std::vector<std::string> rows = {"steps", "tasks", "computation"};
  const auto is_host_update = [](const Event& event) { return event.row == Row::kHostUpdates; };
  if (std::ranges::any_of(events_, is_host_update)) rows.emplace_back("host updates");
  const auto tracks = place_communications(std::ssize(rows), communications);
  rows.insert(rows.end(), tracks.begin(), tracks.end());
  std::vector<std::string> parts = {name_process(rank).dump()};
  for (size_t row = 0; row < rows.size(); ++row)
    parts.push_back(name_row(rank, static_cast<int64_t>(row), rows[row]).dump());
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
  for (const auto& [event, row] : communications) {
    const double begin = microseconds(event.begin);
    const std::chrono::duration<double, std::micro> waited = event.waited;
    parts.push_back(Json{
        {"ph", "X"},
        {"name", comm_kind_name(event.kind)},
        {"pid", rank},
        {"tid", row},
        {"ts", begin},
        {"dur", microseconds(event.end) - begin},
        {"args", {{"group", event.group}, {"bytes", event.bytes}, {"waited_us", waited.count()}}}}
                        .dump());
  }
  return fmt::format("{}", fmt::join(parts, ",\n"));
}

void write_trace(const TraceRecorder& recorder, const std::filesystem::path& file,
                 Communicator& world) {
  const auto ranks = gather_texts(world, recorder.to_json(world.rank()));
  together(world, [&] {
    if (world.rank() != 0) return;
    replace_file(file, fmt::format("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n",
                                   fmt::join(ranks, ",\n")));
  });
}

}  // namespace tessera
