#include "train/run/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kLockFile = "run.lock";
constexpr size_t kMaxRecordBytes = 4096;

constexpr std::array<std::pair<const char*, std::string FolderOwner::*>, 6> kTexts = {
    {{"host", &FolderOwner::host},
     {"machine", &FolderOwner::machine},
     {"pid_namespace", &FolderOwner::pid_namespace},
     {"process_start", &FolderOwner::process_start},
     {"since", &FolderOwner::since},
     {"token", &FolderOwner::token}}};

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "an unknown machine";
}

std::string read_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// When a process of this machine was started, in ticks since the machine was; "" for none.
std::string process_start(int64_t pid) {
  const std::string line = read_line(fmt::format("/proc/{}/stat", pid));
  // The second field, a name in parentheses, may hold anything.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return "";
  constexpr int kFieldsBehindName = 20;  // the start is field 22
  size_t at = name_end;
  for (int i = 0; i < kFieldsBehindName && at != std::string::npos; ++i) {
    at = line.find(' ', at + 1);
  }
  return at == std::string::npos ? "" : line.substr(at + 1, line.find(' ', at + 1) - at - 1);
}

std::string local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 48> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S %Z", &local);
  return text.data();
}

FileDescriptor open_at(int directory, int flags) {
  int fd = -1;
  do {
    fd = ::openat(directory, kLockFile, flags | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EINTR);
  return FileDescriptor(fd);
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/// Whether two open files, or an open one and that of a path, are one.
bool same_file(int a, int b) {
  struct stat first {};
  struct stat second {};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && same_file(first, second);
}

bool leads_to(const fs::path& path, int directory) {
  struct stat there {};
  struct stat own {};
  return ::stat(path.c_str(), &there) == 0 && ::fstat(directory, &own) == 0 &&
         same_file(there, own);
}

bool is_gone(int error) {
  return error == ENOENT || error == ENOTDIR || error == ESTALE;
}

std::string read_record(int file) {
  std::string text(kMaxRecordBytes, '\0');
  const ssize_t count = ::pread(file, text.data(), text.size(), 0);
  text.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return text;
}

std::chrono::nanoseconds modified(int file) {
  struct stat status {};
  if (::fstat(file, &status) != 0) return {};
  return std::chrono::seconds(status.st_mtim.tv_sec) +
         std::chrono::nanoseconds(status.st_mtim.tv_nsec);
}

std::chrono::nanoseconds age_of(int file) {
  return std::chrono::system_clock::now().time_since_epoch() - modified(file);
}

enum class KernelLock : uint8_t { kHeld, kBusy, kNone };

KernelLock try_kernel_lock(int file, bool wanted) {
  if (!wanted) return KernelLock::kNone;
  while (::flock(file, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    return errno == EWOULDBLOCK ? KernelLock::kBusy : KernelLock::kNone;
  }
  return KernelLock::kHeld;
}

std::string describe(const std::optional<FolderOwner>& owner) {
  return owner ? owner->describe() : "another process";
}

std::string stop_hint(const std::optional<FolderOwner>& owner, const FolderOwner& own) {
  const bool here = owner && owner->machine == own.machine;
  if (here && owner->pid == own.pid && owner->pid_namespace == own.pid_namespace)
    return "close it in this process (Trainer.close())";
  return here ? fmt::format("stop it (kill {})", owner->pid) : "stop it there";
}

[[noreturn]] void refuse(const fs::path& folder, const std::optional<FolderOwner>& owner,
                         const std::string& proof) {
  user_error(
      "{} is in use by another run: {}{}; wait for its end, {}, or choose another run.folder",
      folder.string(), describe(owner), proof, stop_hint(owner, this_process()));
}

/// Refuses what is in the way of a folder and does not go away by itself.
void refuse_obstacle(const fs::path& path) {
  std::error_code error;
  const bool is_link = fs::is_symlink(fs::symlink_status(path, error));
  const bool leads_nowhere = is_link && !fs::exists(path, error);
  require(!leads_nowhere, "{} is a link to {}, which does not exist; make it, or remove the link",
          path.string(), fs::read_symlink(path, error).string());
  const fs::file_status found = fs::status(path, error);
  require(!fs::exists(found) || fs::is_directory(found),
          "{} is a file, where a folder is needed; choose another run.folder, or move the file",
          path.string());
}

/// Makes the folders that are missing down to this one and puts them in front of `made`, the
/// innermost first. False where another process removed one meanwhile.
bool make_missing(const fs::path& folder, std::vector<fs::path>& made) {
  std::vector<fs::path> missing;
  fs::path at = folder;
  for (; at.has_relative_path() && !path_exists(at); at = at.parent_path()) {
    refuse_obstacle(at);
    missing.push_back(at);
  }
  refuse_obstacle(at);
  for (auto path = missing.rbegin(); path != missing.rend(); ++path) {
    if (::mkdir(path->c_str(), 0777) == 0) {
      made.insert(made.begin(), *path);
    } else if (is_gone(errno)) {
      return false;
    } else if (errno != EEXIST) {  // as where another process made it
      user_error("cannot make folder {}: {}", path->string(), describe_errno(errno));
    }
  }
  return true;
}

}  // namespace

std::string FolderOwner::describe() const {
  return fmt::format("process {} on {}, since {}", pid, host, since);
}

FolderOwner this_process() {
  FolderOwner own;
  own.host = host_name();
  own.machine = read_line("/proc/sys/kernel/random/boot_id");
  if (own.machine.empty()) own.machine = own.host;
  std::error_code ignored;
  own.pid_namespace = fs::read_symlink("/proc/self/ns/pid", ignored).string();
  own.pid = ::getpid();
  own.process_start = process_start(own.pid);
  own.since = local_time();
  own.token = unique_name("run-");
  return own;
}

std::string to_json(const FolderOwner& owner) {
  nlohmann::ordered_json json = {{"pid", owner.pid}};
  for (const auto& [key, member] : kTexts) json[key] = owner.*member;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::optional<FolderOwner> parse_folder_owner(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("pid") || !json["pid"].is_number_integer())
    return std::nullopt;
  FolderOwner owner;
  owner.pid = json["pid"].get<int64_t>();
  for (const auto& [key, member] : kTexts) {
    if (!json.contains(key) || !json[key].is_string()) return std::nullopt;
    owner.*member = json[key].get<std::string>();
  }
  return owner;
}

RunLock::RunLock(const fs::path& folder, const RunLockOptions& options)
    : folder_(fs::absolute(folder).lexically_normal()), options_(options) {
  if (!folder_.has_filename()) folder_ = folder_.parent_path();  // "runs/first/"
  record_ = to_json(this_process());
  try {
    acquire();
    heart_ = std::thread([this] { beat_until_stopped(); });
  } catch (const std::system_error& error) {
    release();
    user_error("cannot start a thread for {}: {}; see `ulimit -u`", (folder_ / kLockFile).string(),
               error.what());
  } catch (...) {
    release();
    throw;
  }
}

RunLock::~RunLock() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (heart_.joinable()) heart_.join();
  release();
}

void RunLock::release() {
  // Removed while it is locked, so that nobody can have begun to hold it.
  if (is_mine()) ::unlinkat(directory_.get(), kLockFile, 0);
  for (const fs::path& folder : made_) {
    if (::rmdir(folder.c_str()) != 0) break;
  }
}

void RunLock::acquire() {
  // Another process may remove the file, or the folder, between any two steps.
  constexpr int kMostTries = 1000;
  for (int i = 0; i < kMostTries; ++i) {
    if (try_acquire()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  user_error("{} cannot be locked: others keep removing {}", folder_.string(), kLockFile);
}

/// False where the file vanished meanwhile.
bool RunLock::try_acquire() {
  if (!make_missing(folder_, made_)) return false;
  directory_ = FileDescriptor(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory_ && is_gone(errno)) return false;
  require(static_cast<bool>(directory_), "cannot open folder {}: {}", folder_.string(),
          describe_errno(errno));
  FileDescriptor file = open_at(directory_.get(), O_RDWR | O_CREAT | O_EXCL);
  const bool made = static_cast<bool>(file);
  if (!made && errno == EEXIST) file = open_at(directory_.get(), O_RDWR);
  if (!file && is_gone(errno)) return false;
  require(static_cast<bool>(file), "cannot write {}: {}", (folder_ / kLockFile).string(),
          describe_errno(errno));
  const KernelLock kernel = try_kernel_lock(file.get(), options_.kernel_lock);
  if (kernel == KernelLock::kBusy) {
    refuse(folder_, parse_folder_owner(read_record(file.get())), "");
  }
  const FileDescriptor there = open_at(directory_.get(), O_RDONLY);
  if (!there || !same_file(there.get(), file.get())) return false;
  note_ = judge(made, file.get(), kernel == KernelLock::kHeld);
  file_ = std::move(file);
  write_record();
  return true;
}

/// Refuses where what the file says is of a living process; else gives whose lock is taken over.
std::string RunLock::judge(bool made, int file, bool locked) const {
  const std::string text = made ? "" : read_record(file);
  if (text.empty() && (made || locked)) return "";
  const auto owner = parse_folder_owner(text);
  const FolderOwner own = this_process();
  if (owner && owner->machine == own.machine) {
    // A lock of this machine's kernel would be held if that process lived.
    const bool alive = !locked && owner->pid_namespace == own.pid_namespace &&
                       process_start(owner->pid) == owner->process_start;
    if (alive) refuse(folder_, owner, "");
    if (locked || owner->pid_namespace == own.pid_namespace) {
      return fmt::format("took over the folder from {}, which ended without a word",
                         describe(owner));
    }
  }
  if (beats()) {
    const auto seconds = std::chrono::duration<double>(age_of(file)).count();
    const auto stale = std::chrono::duration<double>(options_.stale_after).count();
    refuse(folder_, owner,
           fmt::format(" (its last sign of life in {} is {:.0f} s old; one that is dead is taken "
                       "over after {:.0f} s)",
                       kLockFile, std::max(seconds, 0.0), stale));
  }
  return fmt::format("took over the folder from {}, which gives no sign of life", describe(owner));
}

/// Whether the file's owner is alive, judged by its time. Clocks of machines differ, so one that
/// seems to have stopped is watched for some heartbeats too.
bool RunLock::beats() const {
  // Opened each time, since network file systems remember the times of open files.
  const FileDescriptor first = open_at(directory_.get(), O_RDONLY);
  if (!first) return false;
  const auto age = age_of(first.get());
  if (age >= std::chrono::nanoseconds(0) && age < options_.stale_after) return true;
  const auto before = modified(first.get());
  constexpr int kLooks = 10;
  for (int i = 0; i < kLooks; ++i) {
    std::this_thread::sleep_for(options_.heartbeat / 4);  // two and a half beats in all
    const FileDescriptor now = open_at(directory_.get(), O_RDONLY);
    if (!now || modified(now.get()) != before) return true;
  }
  return false;
}

void RunLock::write_record() {
  const bool written =
      ::ftruncate(file_.get(), 0) == 0 &&
      ::pwrite(file_.get(), record_.data(), record_.size(), 0) == std::ssize(record_);
  require(written, "cannot write {}: {}", (folder_ / kLockFile).string(), describe_errno(errno));
}

bool RunLock::is_mine() const {
  const FileDescriptor there = open_at(directory_.get(), O_RDONLY);
  return there && same_file(there.get(), file_.get()) && read_record(there.get()) == record_;
}

FolderPlace RunLock::find() {
  if (leads_to(folder_, directory_.get())) return find_lock();
  struct stat status {};
  if (::stat(folder_.c_str(), &status) != 0 && !is_gone(errno)) return {};
  std::error_code ignored;
  const fs::path now = fs::read_symlink(fmt::format("/proc/self/fd/{}", directory_.get()), ignored);
  if (!now.empty() && leads_to(now, directory_.get())) {
    return {FolderPlace::State::kMoved, now, ""};
  }
  return {FolderPlace::State::kRemoved};
}

FolderPlace RunLock::find_lock() {
  const FileDescriptor there = open_at(directory_.get(), O_RDONLY);
  if (!there) return is_gone(errno) ? restore_lock() : FolderPlace{};
  const std::string text = read_record(there.get());
  if (text == record_) return {};
  return {FolderPlace::State::kTaken, folder_, describe(parse_folder_owner(text))};
}

FolderPlace RunLock::restore_lock() {
  FileDescriptor file = open_at(directory_.get(), O_RDWR | O_CREAT | O_EXCL);
  if (!file) return {};  // looked at again the next time
  if (try_kernel_lock(file.get(), options_.kernel_lock) == KernelLock::kBusy) return {};
  const std::scoped_lock lock(mutex_);
  file_ = std::move(file);
  write_record();
  return {FolderPlace::State::kInPlace, folder_,
          fmt::format("{} was removed while the run went on; written again", kLockFile)};
}

void RunLock::beat_until_stopped() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);  // signals are for the thread that trains
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, options_.heartbeat, [this] { return stopping_; })) {
    ::futimens(file_.get(), nullptr);
  }
}

}  // namespace tessera
