#include "checkpoint/peer/peer_store.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "checkpoint/layout.h"
#include "checkpoint/peer/peer_exchange.h"
#include "checkpoint/together.h"
#include "checkpoint/write_part.h"
#include "comm/error.h"
#include "core/error.h"
#include "core/file/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int64_t kPartFileBytes = int64_t{4} << 30;
constexpr std::string_view kTemporary = ".tmp-";

std::string own_name(int64_t step) {
  return "own-" + step_folder_name(step);
}

std::string copy_name(int64_t rank, int64_t step) {
  return fmt::format("of-{:05}-{}", rank, step_folder_name(step));
}

std::string temporary(const std::string& name) {
  return std::string(kTemporary) + name;
}

std::string rank_name(int64_t rank) {
  return fmt::format("rank-{:05}", rank);
}

std::vector<fs::path> list_quietly(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    paths.push_back(it->path());
  std::ranges::sort(paths);
  return paths;
}

void remove_quietly(const fs::path& path) {
  std::error_code ignored;
  fs::remove_all(path, ignored);
}

/// What a part says of itself.
struct PartMark {
  std::string run;
  int64_t rank = -1;
  int64_t num_ranks = 0;
  std::string layout;
  int64_t step = -1;
};

/// Nothing where the folder holds no complete part.
std::optional<PartMark> read_mark(const fs::path& folder) {
  try {
    const Manifest manifest = parse_manifest_part(read_complete_manifest(folder), folder.string());
    const Json peer = Json::parse(manifest.state).at("peer");
    return PartMark{.run = peer.at("run").get<std::string>(),
                    .rank = peer.at("rank").get<int64_t>(),
                    .num_ranks = peer.at("num_ranks").get<int64_t>(),
                    .layout = peer.at("layout").get<std::string>(),
                    .step = manifest.step};
  } catch (const UserError&) {  // unfinished, or damaged
  } catch (const Json::exception&) {
  }
  return std::nullopt;
}

bool is_whole(const fs::path& folder) {
  try {
    CheckpointReader::of_part(folder, Verify::kChecksums);
    return true;
  } catch (const UserError&) {
    return false;
  }
}

/// Everything in a rank's folder but the parts of that step.
void remove_others(const fs::path& folder, int64_t step) {
  for (const fs::path& path : list_quietly(folder)) {
    const std::string name = path.filename().string();
    if (!name.ends_with("-" + step_folder_name(step)) || name.starts_with(kTemporary))
      remove_quietly(path);
  }
}

/// Replaces what may be there.
void rename_part(const fs::path& from, const fs::path& to) {
  remove_path(to);
  rename_path(from, to);
}

/// What failed on this rank alone, which all are told together; a lost rank is thrown at once.
template <typename Action>
std::exception_ptr failure_of(const Action& action) {
  try {
    action();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

PeerStore::PeerStore(PeerPlace place, Communicator& world)
    : place_(std::move(place)), world_(world) {
  ensure(world.size() > 1 && place_.shift > 0 && place_.shift < world.size() &&
             std::ssize(place_.machines) == world.size(),
         "PeerStore: {} ranks, a shift of {}, {} machines", world.size(), place_.shift,
         place_.machines.size());
}

fs::path PeerStore::folder_of(int64_t rank) const {
  return place_.root / rank_name(rank);
}

fs::path PeerStore::own_folder() const {
  return folder_of(world_.rank());
}

int64_t PeerStore::bytes_in(const fs::path& root) {
  int64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(root, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code no_size;
    if (it->is_regular_file(no_size)) {
      const auto size = it->file_size(no_size);
      if (!no_size) bytes += static_cast<int64_t>(size);
    }
  }
  return bytes;
}

/// The run's state with what tells whose part it is.
std::string PeerStore::state_text(const std::string& state) const {
  Json json = Json::parse(state);
  json["peer"] = {{"run", place_.run},
                  {"rank", world_.rank()},
                  {"num_ranks", world_.size()},
                  {"layout", fmt::format("{:016x}", place_.layout)}};
  return json.dump();
}

void PeerStore::write_own(const PeerSave& request, const fs::path& folder) const {
  make_folder(folder);
  Manifest manifest = write_part(folder, {.rank = world_.rank(),
                                          .num_ranks = world_.size(),
                                          .step = request.step,
                                          .shard_bytes = kPartFileBytes,
                                          .model = sliced_tensors(request.model),
                                          .optimizer = sliced_tensors(request.optimizer)});
  manifest.state = state_text(request.state);
  complete_folder(folder, manifest_text(manifest));
}

void PeerStore::save(const PeerSave& request) {
  const int64_t size = world_.size();
  const int64_t from = (world_.rank() + size - place_.shift) % size;
  const fs::path own = own_folder() / temporary(own_name(request.step));
  const fs::path copy = own_folder() / temporary(copy_name(from, request.step));
  try {
    together(world_, [&] {
      remove_path(own);
      remove_path(copy);
      write_own(request, own);
    });
    const std::exception_ptr failure = failure_of([&] {
      exchange_parts(world_, GivenPart{own, (world_.rank() + place_.shift) % size},
                     TakenPart{copy, from});
    });
    together(world_, [&] {
      if (failure) std::rethrow_exception(failure);
    });
  } catch (const CommError&) {
    throw;
  } catch (const UserError& error) {
    remove_quietly(own);
    remove_quietly(copy);
    user_error("the state after step {} was not copied to the ranks' memory: {}; {}", request.step,
               error.what(), "the copies of an earlier step are as they were");
  }
  publish(request.step);
}

/// All ranks have both parts. Those of the step before go when all have the names of the new ones.
void PeerStore::publish(int64_t step) {
  const int64_t size = world_.size();
  const int64_t from = (world_.rank() + size - place_.shift) % size;
  together(world_, [&] {
    for (const std::string& name : {own_name(step), copy_name(from, step)})
      rename_part(own_folder() / temporary(name), own_folder() / name);
  });
  remove_others(own_folder(), step);
}

/// What this rank sees on its machine of this run and of ranks that hold what they held then; of
/// what others held the newest step.
std::vector<PeerStore::SeenPart> PeerStore::list_parts(const std::vector<int64_t>& layouts) {
  std::vector<SeenPart> parts;
  other_step_ = -1;
  for (const fs::path& folder : list_quietly(place_.root)) {
    for (const fs::path& path : list_quietly(folder)) {
      if (path.filename().string().starts_with(kTemporary)) continue;
      const auto mark = read_mark(path);
      if (!mark || mark->run != place_.run) continue;
      const bool fits =
          mark->num_ranks == world_.size() && mark->rank >= 0 && mark->rank < world_.size() &&
          mark->layout == fmt::format("{:016x}", static_cast<uint64_t>(layouts[mark->rank]));
      if (fits) {
        parts.push_back({mark->rank, mark->step, path});
      } else {
        other_step_ = std::max(other_step_, mark->step);
      }
    }
  }
  return parts;
}

/// The newest step of which some rank sees the part of each. All ranks choose alike.
PeerStore::Plan PeerStore::choose(const std::vector<SeenPart>& parts) const {
  Json own = Json::array();
  for (const SeenPart& part : parts) own.push_back({part.rank, part.step});
  const auto texts = broadcast_texts(world_, gather_texts(world_, own.dump()));
  std::map<int64_t, std::vector<std::vector<int64_t>>> seers;  // by step and part
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    for (const Json& part : Json::parse(texts[rank])) {
      auto& of_step = seers[part[1].get<int64_t>()];
      of_step.resize(world_.size());
      of_step[part[0].get<int64_t>()].push_back(static_cast<int64_t>(rank));
    }
  }
  Plan plan;
  for (const auto& [step, ranks] : seers) {
    if (std::ranges::any_of(ranks, [](const auto& seeing) { return seeing.empty(); })) continue;
    plan = {.step = step, .givers = {}};
    for (int64_t rank = 0; rank < world_.size(); ++rank) {
      const auto& seeing = ranks[rank];
      const bool itself = std::ranges::find(seeing, rank) != seeing.end();
      plan.givers.push_back(itself ? rank : seeing.front());
    }
  }
  return plan;
}

/// Of the parts that this rank is to read or to give.
void PeerStore::drop_damaged(const Plan& plan, std::vector<SeenPart>& parts, bool& dropped) const {
  int64_t num_dropped = 0;
  std::set<int64_t> done;
  std::erase_if(parts, [&](const SeenPart& part) {
    const bool concerns = part.step == plan.step && plan.givers[part.rank] == world_.rank() &&
                          !done.contains(part.rank);
    if (!concerns) return false;
    if (is_whole(part.folder)) {
      done.insert(part.rank);
      return false;
    }
    ++num_dropped;
    return true;
  });
  const Tensor sum = view(std::span(&num_dropped, 1), {1});
  world_.all_reduce(sum, sum).wait();
  dropped = num_dropped > 0;
}

/// Gives parts to the ranks that have not their own, one after the other.
void PeerStore::bring(const Plan& plan, const std::vector<SeenPart>& parts) const {
  const auto find = [&](int64_t rank) {
    return std::ranges::find_if(
        parts, [&](const SeenPart& part) { return part.step == plan.step && part.rank == rank; });
  };
  std::exception_ptr failure;
  for (int64_t rank = 0; rank < world_.size(); ++rank) {
    const int64_t giver = plan.givers[rank];
    if (giver == rank) continue;
    std::optional<GivenPart> given;
    std::optional<TakenPart> taken;
    if (giver == world_.rank()) given = {find(rank)->folder, rank};
    if (rank == world_.rank()) taken = {own_folder() / temporary(own_name(plan.step)), giver};
    if (!given && !taken) continue;
    const std::exception_ptr own = failure_of([&] {
      if (taken) remove_path(taken->folder);
      exchange_parts(world_, given, taken);
      if (taken) rename_part(taken->folder, own_folder() / own_name(plan.step));
    });
    if (own) failure = own;
  }
  together(world_, [&] {
    if (failure) std::rethrow_exception(failure);
  });
}

std::optional<CheckpointReader> PeerStore::find() {
  auto layout = static_cast<int64_t>(place_.layout);
  std::vector<int64_t> layouts(world_.size());
  world_.all_gather(view(std::span(&layout, 1), {1}), view(std::span(layouts), {world_.size()}))
      .wait();
  std::vector<SeenPart> parts;
  together(world_, [&] { parts = list_parts(layouts); });
  const Tensor newest = view(std::span(&other_step_, 1), {1});
  world_.all_reduce(newest, newest, ReduceOp::kMax).wait();
  for (;;) {
    const Plan plan = choose(parts);
    if (plan.step < 0) return std::nullopt;
    bool dropped = false;
    drop_damaged(plan, parts, dropped);
    if (dropped) continue;
    bring(plan, parts);
    std::optional<CheckpointReader> reader;
    together(world_, [&] {
      const auto mine = std::ranges::find_if(parts, [&](const SeenPart& part) {
        return part.step == plan.step && part.rank == world_.rank();
      });
      const bool here = plan.givers[world_.rank()] == world_.rank();
      reader = CheckpointReader::of_part(here ? mine->folder : own_folder() / own_name(plan.step),
                                         Verify::kSizes);
    });
    return reader;
  }
}

void PeerStore::remove() {
  world_.barrier();  // nobody reads another rank's any more
  remove_quietly(own_folder());
  bool is_last = true;
  const int64_t machine = place_.machines[world_.rank()];
  for (const fs::path& path : list_quietly(place_.root)) {
    // Not of ranks that are elsewhere now, or not at all.
    for (int64_t rank = 0; rank < world_.size(); ++rank) {
      if (path.filename() == rank_name(rank) && place_.machines[rank] == machine) is_last = false;
    }
  }
  if (is_last) remove_quietly(place_.root);
  world_.barrier();
}

}  // namespace tessera
