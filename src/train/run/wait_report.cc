#include "train/run/wait_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "checkpoint/together.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

bool is_message(CommKind kind) {
  return kind == CommKind::kSend || kind == CommKind::kReceive;
}

double seconds_of(CommEvent::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

Json to_json(const RankWaits& waits) {
  Json groups = Json::object();
  for (const auto& [name, group] : waits.groups) {
    Json times = Json::array();
    for (const TimedExchange& exchange : group.exchanges)
      times.push_back({exchange.begin, exchange.end, exchange.waited});
    groups[name] = {{"ranks", group.ranks}, {"times", std::move(times)}};
  }
  return {{"rank", waits.rank},
          {"machine", waits.machine},
          {"groups", std::move(groups)},
          {"messages", waits.messages},
          {"unassigned", waits.unassigned}};
}

RankWaits read_waits(const Json& json) {
  RankWaits waits{.rank = json.at("rank"),
                  .machine = json.at("machine"),
                  .groups = {},
                  .messages = json.at("messages"),
                  .unassigned = json.at("unassigned")};
  for (const auto& [name, group] : json.at("groups").items()) {
    RankWaits::Group& read = waits.groups[name];
    read.ranks = group.at("ranks").get<std::vector<int64_t>>();
    for (const Json& time : group.at("times"))
      read.exchanges.push_back({time.at(0), time.at(1), time.at(2)});
  }
  return waits;
}

/// The members' exchanges of one group, by rank.
using Members = std::map<int64_t, std::vector<TimedExchange>>;

/// Adds what the members of a group, which goes over a link, waited for exchange number `idx`.
void attribute(const std::string& group, const std::string& link, const Members& members,
               size_t idx, WaitReport& report, std::map<int64_t, WaitReport::Culprit>& culprits) {
  const auto last = std::ranges::max_element(
      members, {}, [&](const auto& member) { return member.second[idx].begin; });
  const double all_there = last->second[idx].begin;
  for (const auto& [rank, exchanges] : members) {
    const TimedExchange& own = exchanges[idx];
    const double for_last = std::clamp(all_there - (own.end - own.waited), 0.0, own.waited);
    report.exchanges += own.waited - for_last;
    report.by_link[link] += own.waited - for_last;
    if (for_last == 0) continue;
    WaitReport::Culprit& culprit = culprits[last->first];
    culprit.rank = last->first;
    culprit.seconds += for_last;
    culprit.by_group[group] += for_last;
  }
}

bool are_complete(const std::vector<int64_t>& ranks, const Members& members) {
  return members.size() == ranks.size() && std::ranges::all_of(members, [&](const auto& member) {
           return member.second.size() == members.begin()->second.size();
         });
}

std::string describe_groups(const std::map<std::string, double>& by_group) {
  std::vector<std::pair<std::string, double>> groups(by_group.begin(), by_group.end());
  std::ranges::stable_sort(groups, std::greater(), [](const auto& group) { return group.second; });
  constexpr size_t kMost = 3;
  std::string text;
  for (size_t i = 0; i < std::min(groups.size(), kMost); ++i)
    text += fmt::format("{}{} {:.3f} s", i == 0 ? "" : ", ", groups[i].first, groups[i].second);
  return text;
}

}  // namespace

double WaitReport::total() const {
  double sum = exchanges + messages + unassigned;
  for (const Culprit& culprit : culprits) sum += culprit.seconds;
  return sum;
}

GroupRanks list_group_ranks(const Settings& settings, const RunLayout& run) {
  GroupRanks groups;
  const StageGroups& stage = run.part.groups;
  for (const CommunicatorPtr& group :
       {run.world, stage.tp, stage.ring, stage.heads, stage.micro_batch, stage.dp, stage.etp,
        stage.ep, stage.experts})
    groups.emplace(group->name(), group->ranks());
  for (const ReplicaRanks& group : list_replica_ranks(settings, run.layout, run.rank())) {
    groups.emplace(group.name + ".inner", group.inner_ranks(run.rank()));
    groups.emplace(group.name, group.outer_ranks(run.rank()));
    groups.emplace(group.name + ".parts", group.parts);
  }
  return groups;
}

RankWaits collect_waits(int64_t rank, const std::vector<CommEvent>& events,
                        CommEvent::Clock::time_point origin, const GroupRanks& groups,
                        bool on_device) {
  RankWaits waits{.rank = rank};
  std::vector<CommEvent> ordered = events;
  std::ranges::stable_sort(ordered, {}, &CommEvent::begin);
  for (const CommEvent& event : ordered) {
    const double waited = seconds_of(on_device ? event.end - event.begin : event.waited);
    const auto known = groups.find(event.group);
    if (is_message(event.kind)) {
      waits.messages += waited;
    } else if (known == groups.end()) {
      waits.unassigned += waited;
    } else {
      RankWaits::Group& group = waits.groups[event.group];
      group.ranks = known->second;
      group.exchanges.push_back({.begin = seconds_of(event.begin - origin),
                                 .end = seconds_of(event.end - origin),
                                 .waited = waited});
    }
  }
  return waits;
}

WaitReport attribute_waits(const std::vector<RankWaits>& ranks) {
  WaitReport report;
  std::map<std::pair<std::string, std::vector<int64_t>>, Members> groups;
  std::map<int64_t, std::string> machines;
  for (const RankWaits& waits : ranks) {
    machines[waits.rank] = waits.machine;
    report.messages += waits.messages;
    report.unassigned += waits.unassigned;
    for (const auto& [name, group] : waits.groups)
      groups[{name, group.ranks}][waits.rank] = group.exchanges;
  }
  std::map<int64_t, WaitReport::Culprit> culprits;
  for (const auto& [key, members] : groups) {
    if (!are_complete(key.second, members)) {
      for (const auto& [rank, exchanges] : members)
        for (const TimedExchange& exchange : exchanges) report.unassigned += exchange.waited;
      continue;
    }
    const std::string& first = machines.at(key.second.front());
    const std::vector<int64_t>& own = key.second;
    const bool spans = std::any_of(own.begin(), own.end(),
                                   [&](int64_t rank) { return machines.at(rank) != first; });
    const std::string link = spans ? key.first + " between machines" : key.first;
    for (size_t i = 0; i < members.begin()->second.size(); ++i)
      attribute(key.first, link, members, i, report, culprits);
  }
  for (auto& [rank, culprit] : culprits) report.culprits.push_back(std::move(culprit));
  std::ranges::stable_sort(report.culprits, std::greater(), &WaitReport::Culprit::seconds);
  return report;
}

WaitReport gather_waits(const RankWaits& own, Communicator& world) {
  std::vector<RankWaits> all;
  for (const std::string& text : gather_texts(world, to_json(own).dump()))
    all.push_back(read_waits(Json::parse(text)));
  return attribute_waits(all);
}

std::string describe(const WaitReport& report, int64_t num_ranks, int64_t num_steps) {
  constexpr size_t kMost = 4;
  std::string text = fmt::format("waits of {} ranks in {} step{}: {:.3f} s", num_ranks, num_steps,
                                 num_steps == 1 ? "" : "s", report.total());
  for (size_t i = 0; i < std::min(report.culprits.size(), kMost); ++i) {
    const WaitReport::Culprit& culprit = report.culprits[i];
    text += fmt::format("{} for rank {} {:.3f} s ({})", i == 0 ? ", of which" : ",", culprit.rank,
                        culprit.seconds, describe_groups(culprit.by_group));
  }
  double others = 0;
  for (size_t i = kMost; i < report.culprits.size(); ++i) others += report.culprits[i].seconds;
  if (others > 0) text += fmt::format(", for other ranks {:.3f} s", others);
  text += fmt::format("; for exchanges themselves {:.3f} s", report.exchanges);
  if (report.exchanges > 0) text += fmt::format(" ({})", describe_groups(report.by_link));
  if (report.messages > 0) text += fmt::format(", for pipeline messages {:.3f} s", report.messages);
  if (report.unassigned > 0) text += fmt::format(", not assigned {:.3f} s", report.unassigned);
  return text;
}

RankLoad find_load(const std::vector<ExpertLoad>& layers, int64_t place, int64_t num_ranks) {
  RankLoad load;
  double rows = 0;
  double mean = 0;
  for (const ExpertLoad& layer : layers) {
    const std::vector<int64_t>& experts = layer.tokens_per_expert;
    const auto all = std::accumulate(experts.begin(), experts.end(), 0.0);
    const int64_t each = std::ssize(experts) / num_ranks;
    mean += all / static_cast<double>(num_ranks);
    for (int64_t expert = place * each; expert < (place + 1) * each; ++expert) {
      const auto own = static_cast<double>(experts[expert]);
      rows += own;
      const double relative = all > 0 ? own * static_cast<double>(experts.size()) / all : 0;
      if (relative <= load.of_expert) continue;
      load.layer = layer.layer;
      load.expert = expert;
      load.of_expert = relative;
    }
  }
  if (mean > 0) load.share = rows / mean;
  return load;
}

std::string explain(const WaitReport& report, const std::vector<ExpertLoad>& layers,
                    const Layout& layout) {
  // Less is not what ranks wait for.
  constexpr double kMuch = 1.05;
  const int64_t ep = layout.degree(Axis::kEp);
  if (report.culprits.empty() || layers.empty() || ep == 1) return "";
  const int64_t rank = report.culprits.front().rank;
  const RankLoad load = find_load(layers, layout.coordinate(rank, Axis::kEp), ep);
  if (load.share < kMuch) return "";
  return fmt::format(
      "rank {} had {:.2f} times the mean's rows for its experts; expert {} of layer {} alone had "
      "{:.1f} times a mean one's",
      rank, load.share, load.expert, load.layer, load.of_expert);
}

}  // namespace tessera
