#include "cli/tests/cli_testing.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

namespace tessera {

ChildProcess::ChildProcess(const Arguments& arguments, int64_t file_limit,
                           const Variables& environment, const std::function<void()>& prepare) {
  int out[2];
  int err[2];
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) throw InternalError("pipe2");
  ::fcntl(out[1], F_SETPIPE_SZ, 4096);
  const auto program = environment.find("TEST_PROGRAM");
  std::vector<std::string> words = {program == environment.end() ? TESSERA_PROGRAM
                                                                 : program->second};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  process_ = ::fork();
  if (process_ == 0) {
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    const auto folder = environment.find("TEST_FOLDER");
    if (folder != environment.end() && ::chdir(folder->second.c_str()) != 0) ::_exit(126);
    execute(argv.data(), out[1], err[1], file_limit, prepare);
  }
  ::close(out[1]);
  ::close(err[1]);
  streams_[0].file = out[0];
  streams_[1].file = err[0];
}

ChildProcess::~ChildProcess() {
  if (process_ > 0) send(SIGKILL);
  reap();
  for (Stream& stream : streams_) stream.close();
}

void ChildProcess::send(int signal) {
  ::kill(process_, signal);
}

std::string ChildProcess::read_line_with(const std::string& text) {
  for (;;) {
    const std::string& out = streams_[0].text;
    const size_t end = out.find('\n', next_line_);
    if (end != std::string::npos) {
      const std::string line = out.substr(next_line_, end - next_line_);
      next_line_ = end + 1;
      if (line.find(text) != std::string::npos) return line;
    } else if (!read_some()) {
      return "";
    }
  }
}

Finished ChildProcess::wait() {
  while (read_some()) {
  }
  const int status = reap();
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return {code, streams_[0].text, streams_[1].text};
}

void ChildProcess::Stream::close() {
  if (file >= 0) ::close(file);
  file = -1;
}

void ChildProcess::Stream::read() {
  char buffer[256];
  const ssize_t count = ::read(file, buffer, sizeof(buffer));
  if (count > 0) text.append(buffer, count);
  if (count == 0) close();
}

void ChildProcess::execute(char** argv, int out, int err, int64_t file_limit,
                           const std::function<void()>& prepare) {
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  ::setenv("OMP_NUM_THREADS", "2", 1);
  ::setenv("OMP_WAIT_POLICY", "passive", 1);
  if (file_limit > 0) {
    const auto bytes = static_cast<rlim_t>(file_limit);
    const rlimit limit{bytes, bytes};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::signal(SIGXFSZ, SIG_IGN);  // then a write fails as on a full disk
  }
  if (prepare) prepare();
  ::execv(argv[0], argv);
  ::_exit(126);
}

bool ChildProcess::read_some() {
  pollfd polled[2] = {{streams_[0].file, POLLIN, 0}, {streams_[1].file, POLLIN, 0}};
  if (streams_[0].file < 0 && streams_[1].file < 0) return false;
  // Twice, since the first may have run out while the whole machine was suspended.
  constexpr int kPatienceMs = 60'000;
  bool ready = false;
  for (int wait = 0; wait < 2 && !ready; ++wait) ready = ::poll(polled, 2, kPatienceMs) != 0;
  if (!ready) {
    ADD_FAILURE() << "silent for too long after:\n" << streams_[0].text << streams_[1].text;
    send(SIGKILL);
  }
  for (size_t i = 0; i < 2; ++i) {
    if (polled[i].revents != 0) streams_[i].read();
  }
  return true;
}

int ChildProcess::reap() {
  int status = 0;
  if (process_ > 0) ::waitpid(process_, &status, 0);
  process_ = -1;
  return status;
}

Finished run_tessera(const Arguments& arguments, int64_t file_limit) {
  return ChildProcess(arguments, file_limit).wait();
}

std::string read_all(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_all(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string make_prose(int num_words) {
  const std::vector<std::string> words = {"the",  "old",   "captain", "looked", "at",   "sea",
                                          "and",  "his",   "ship",    "waited", "for",  "wind",
                                          "from", "north", "while",   "rain",   "fell", "slowly"};
  Random random(1, 1);
  std::string text;
  for (int i = 1; i <= num_words; ++i) {
    text += words[random.next_below(words.size())] + (i % 12 == 0 ? ".\n" : " ");
  }
  return text;
}

std::map<std::string, std::string> snapshot(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files[entry.path().string()] = read_all(entry.path());
  }
  return files;
}

CliTest::CliTest() {
  std::filesystem::create_directories(folder_);
  write_all(path("text.txt"), make_prose(4000));
}

CliTest::~CliTest() {
  std::filesystem::remove_all(folder_);
}

Arguments CliTest::train(const std::string& run, const Arguments& options) const {
  Arguments all = {"train",
                   "--data.text=" + path("text.txt"),
                   "--run.folder=" + path(run),
                   "--run.log_interval=1",
                   "--run.report=false",
                   "--data.sequence_length=16",
                   "--model.hidden_size=16",
                   "--model.num_layers=2",
                   "--model.num_heads=2",
                   "--moe.num_experts=4",
                   "--moe.inner_size=16",
                   "--train.micro_batch=2",
                   "--train.global_batch=2",
                   "--train.validation_batches=2",
                   "--train.steps=10",
                   "--optim.learning_rate=0.01"};
  all.insert(all.end(), options.begin(), options.end());
  return all;
}

Finished CliTest::succeed(const Arguments& arguments) const {
  Finished finished = run_tessera(arguments);
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.err, "");
  return finished;
}

nlohmann::json CliTest::succeed_json(const Arguments& arguments) const {
  return nlohmann::json::parse(succeed(arguments).out);
}

void CliTest::expect_refused(const Arguments& arguments,
                             const std::vector<std::string>& parts) const {
  const auto before = snapshot(folder_);
  expect_error(run_tessera(arguments), parts);
  EXPECT_EQ(list_changes(before), "") << "written or lost by what had to be refused";
}

void CliTest::expect_refused_after_tokens(const Arguments& arguments,
                                          const std::vector<std::string>& parts) const {
  const auto before = snapshot(folder_);
  expect_error(run_tessera(arguments), parts);
  for (const auto& [name, content] : before) EXPECT_EQ(snapshot(folder_)[name], content) << name;
}

void CliTest::expect_error(const Finished& finished, const std::vector<std::string>& parts) {
  EXPECT_EQ(finished.code, 2) << finished.out;
  EXPECT_THAT(finished.err, ::testing::StartsWith("tessera: "));
  EXPECT_EQ(std::ranges::count(finished.err, '\n'), 1) << finished.err;
  for (const std::string& part : parts) EXPECT_THAT(finished.err, ::testing::HasSubstr(part));
}

std::vector<std::string> CliTest::checkpoints(const std::string& run) const {
  std::vector<std::string> names;
  const std::filesystem::path root = folder_ / run / "checkpoints";
  if (!std::filesystem::exists(root)) return names;
  for (const auto& entry : std::filesystem::directory_iterator(root)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("step-")) names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

std::vector<nlohmann::json> CliTest::read_steps(const std::string& run) const {
  std::vector<nlohmann::json> records;
  std::ifstream file(folder_ / run / "metrics.jsonl");
  for (std::string line; std::getline(file, line);) {
    auto record = nlohmann::json::parse(line);
    if (record["type"] == "step") records.push_back(std::move(record));
  }
  return records;
}

std::string CliTest::list_changes(const std::map<std::string, std::string>& before) const {
  std::string changes;
  const auto after = snapshot(folder_);
  for (const auto& [name, content] : after) {
    const auto old = before.find(name);
    if (old == before.end() || old->second != content) changes += "+ " + name + "\n";
  }
  for (const auto& [name, content] : before) {
    if (!after.contains(name)) changes += "- " + name + "\n";
  }
  return changes;
}

}  // namespace tessera
