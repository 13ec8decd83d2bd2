#include "train/tune/vllm_server.h"

#include <httplib.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/error.h"

namespace tessera {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr const char* kJson = "application/json";
constexpr double kMostSeconds = 1e6;        // which socket calls can count in milliseconds
constexpr size_t kMostShown = 400;          // bytes of what a server says
constexpr size_t kMostAnswer = 16U << 20U;  // bytes of an answer
constexpr const char* kStart =
    "start vLLM with VLLM_SERVER_DEV_MODE=1, in a version that has the route";

/// Ends a request when its time is over, however slowly its answer comes.
class TimeLimit {
 public:
  TimeLimit(httplib::Client& client, double seconds)
      : thread_([this, &client, seconds] {
          std::unique_lock lock(mutex_);
          if (changed_.wait_for(lock, Seconds(seconds), [this] { return is_over_; })) return;
          has_struck_ = true;
          client.stop();
        }) {}
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;
  ~TimeLimit() { finish(); }

  /// Whether it ended the request.
  bool finish() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    return has_struck_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  bool has_struck_ = false;
  std::thread thread_;  // last: it uses the others
};

std::string dump_text(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// What an answer says went wrong: FastAPI's "detail", vLLM's "error", or the text as it is.
std::string describe_answer(const std::string& body) {
  std::string text = body;
  const nlohmann::json json = nlohmann::json::parse(body, nullptr, false);
  if (json.is_object()) {
    const nlohmann::json* said = nullptr;
    if (json.contains("detail")) said = &json["detail"];
    if (json.contains("error")) said = &json["error"];
    if (said != nullptr && said->is_object() && said->contains("message"))
      said = &(*said)["message"];
    if (said != nullptr) text = said->is_string() ? said->get<std::string>() : dump_text(*said);
  }
  std::ranges::replace_if(
      text, [](char c) { return static_cast<unsigned char>(c) < ' '; }, ' ');
  if (text.size() > kMostShown) text = text.substr(0, kMostShown) + "...";
  return text.empty() ? "(nothing)" : text;
}

std::string describe_error(httplib::Error error) {
  switch (error) {
    case httplib::Error::Connection:
    case httplib::Error::ConnectionTimeout:
      return "nobody answers";
    case httplib::Error::Read:
    case httplib::Error::Write:
      return "the connection was closed before there was an answer in HTTP";
    default:
      return "error of the connection: " + httplib::to_string(error);
  }
}

}  // namespace

VllmServer::VllmServer(const WeightExportSettings& settings) : settings_(settings) {
  constexpr std::string_view kScheme = "http://";
  const std::string& url = settings.vllm_url;
  require(!url.starts_with("https://"),
          "rl.vllm_url is {}; TLS is not spoken to vLLM, whose development routes belong into a "
          "network of their own: set it to http://host:port",
          url);
  const size_t path = std::min(url.find('/', kScheme.size()), url.size());
  const std::string host =
      url.substr(std::min(kScheme.size(), url.size()), path - std::min(kScheme.size(), path));
  require(url.starts_with(kScheme) && !host.empty() &&
              host.find_first_of(" ?#@\t\r\n") == std::string::npos &&
              url.find_first_of(" ?#\t\r\n") == std::string::npos,
          "rl.vllm_url is \"{}\"; it must be http://host:port, as in http://127.0.0.1:8000", url);
  address_ = std::string(kScheme) + host;
  prefix_ = url.substr(path);
  while (prefix_.ends_with('/')) prefix_.pop_back();
  require(httplib::Client(address_).is_valid(),
          "rl.vllm_url is \"{}\"; it must be http://host:port, as in http://127.0.0.1:8000", url);
}

std::string VllmServer::ask(const std::string& method, const std::string& route,
                            const std::string& body) {
  const double limit = std::min(settings_.vllm_timeout, kMostSeconds);
  const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(Seconds(limit));
  httplib::Client client(address_);
  client.set_connection_timeout(microseconds);
  client.set_read_timeout(microseconds);
  client.set_write_timeout(microseconds);
  const std::string path = prefix_ + route;
  const std::string name = fmt::format("{} {}{}", method, address_, path);
  std::string answer;
  int status = 0;
  httplib::Request request;
  request.method = method;
  request.path = path;
  if (method == "POST") {
    request.body = body;
    request.set_header("Content-Type", kJson);
  }
  request.response_handler = [&](const httplib::Response& response) {
    status = response.status;
    return true;
  };
  request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
    answer.append(data, size);
    return answer.size() <= kMostAnswer;
  };
  TimeLimit time_limit(client, limit);
  const auto start = std::chrono::steady_clock::now();
  const httplib::Result result = client.send(request);
  const bool late =
      time_limit.finish() || Seconds(std::chrono::steady_clock::now() - start).count() >= limit;
  require(result || !late,
          "{} had not been answered after {} s; rl.vllm_timeout allows it no more{}", name, limit,
          route.starts_with("/pause") && settings_.vllm_pause == "wait"
              ? ", and with rl.vllm_pause = \"wait\" requests under way are waited for"
              : "");
  require(answer.size() <= kMostAnswer, "{} was answered with more than {} MiB; is that vLLM?",
          name, kMostAnswer >> 20U);
  require(static_cast<bool>(result),
          "{}: {}; start a vLLM server there, or set rl.vllm_url to where one is", name,
          describe_error(result.error()));
  require(status != 404 && status != 405, "{} was answered with status {}: {}; {}", name, status,
          describe_answer(answer), kStart);
  require(status == 200, "{} was answered with status {}: {}", name, status,
          describe_answer(answer));
  return answer;
}

int64_t VllmServer::find_workers() {
  const std::string route = "/get_world_size";
  const std::string answer = ask("GET", route, "");
  const nlohmann::json json = nlohmann::json::parse(answer, nullptr, false);
  const bool known = json.is_object() && json.contains("world_size") &&
                     json["world_size"].is_number_integer() && json["world_size"] > 0;
  require(known,
          "GET {}{}{} was answered with {}, expected {{\"world_size\": 1 or more}}; is that vLLM?",
          address_, prefix_, route, describe_answer(answer));
  return json["world_size"].get<int64_t>();
}

void VllmServer::load(const std::filesystem::path& folder, const std::string& version) {
  try {
    ask("POST", "/pause?mode=" + settings_.vllm_pause, "");
  } catch (const UserError&) {
    resume_quietly();  // it may have been paused all the same
    throw;
  }
  try {
    settings_.vllm_way == "disk" ? transfer(folder.string(), version) : reload(folder.string());
  } catch (const UserError& error) {
    user_error(
        "{}; the server stays paused, since a part of its weights may be new: the next "
        "version that it loads, or POST /resume, lets it go on",
        error.what());
  }
  ask("POST", "/resume", "");
}

void VllmServer::reload(const std::string& folder) {
  const nlohmann::json body = {{"method", "reload_weights"},
                               {"timeout", settings_.vllm_timeout},
                               {"kwargs", {{"weights_path", folder}}}};
  ask("POST", "/collective_rpc", dump_text(body));
}

void VllmServer::transfer(const std::string& folder, const std::string& version) {
  if (!has_begun_) {
    ask("POST", "/init_weight_transfer_engine", R"({"init_info":{}})");
    has_begun_ = true;
  }
  ask("POST", "/start_weight_update", "{}");
  const nlohmann::json update = {{"update_info", {{"path", folder}}}};
  try {
    ask("POST", "/update_weights", dump_text(update));
  } catch (const UserError&) {
    has_begun_ = false;  // a server that was started anew must be told again
    throw;
  }
  const nlohmann::json end = {{"weight_version", version}};
  ask("POST", "/finish_weight_update", dump_text(end));
}

void VllmServer::resume_quietly() {
  constexpr double kSoon = 10;  // seconds
  VllmServer other = *this;
  other.settings_.vllm_timeout = std::min(settings_.vllm_timeout, kSoon);
  try {
    other.ask("POST", "/resume", "");
  } catch (const UserError&) {
    return;  // the error that is told is that of the pause
  }
}

}  // namespace tessera
