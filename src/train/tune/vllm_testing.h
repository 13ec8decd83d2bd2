#pragma once

#include <httplib.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::testing {

/// A server that stands in for vLLM's development routes: answers as documented, or as told, and
/// remembers what it was asked.
class VllmStandIn {
 public:
  VllmStandIn() {
    const auto answer = [this](const httplib::Request& request, httplib::Response& response) {
      give(request, response);
    };
    server_.Get("/.*", answer);
    server_.Post("/.*", answer);
    answers_["/get_world_size"] = {200, R"({"world_size": 2})"};
    for (const char* route : {"/pause", "/resume", "/init_weight_transfer_engine",
                              "/start_weight_update", "/update_weights", "/finish_weight_update"})
      answers_[route] = {200, R"({"message": "done"})"};
    answers_["/collective_rpc"] = {200, R"({"results": [null, null]})"};
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::yield();
  }
  VllmStandIn(const VllmStandIn&) = delete;
  VllmStandIn& operator=(const VllmStandIn&) = delete;
  ~VllmStandIn() {
    is_ending_ = true;
    server_.stop();
    thread_.join();
  }

  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  /// From now on this answers a route; 0: slowly and without end.
  void set(const std::string& route, int status, const std::string& body) {
    const std::lock_guard lock(mutex_);
    answers_[route] = {status, body};
    left_.erase(route);
  }
  /// Has a route fail once it was asked so many times more.
  void fail_after(const std::string& route, int count) {
    const std::lock_guard lock(mutex_);
    left_[route] = count;
  }
  /// What it was asked since the last call: method, route with its query, body.
  std::vector<std::string> take_asked() {
    const std::lock_guard lock(mutex_);
    return std::exchange(asked_, {});
  }

 private:
  void give(const httplib::Request& request, httplib::Response& response) {
    const std::lock_guard lock(mutex_);
    asked_.push_back(request.method + " " + request.target +
                     (request.body.empty() ? "" : " " + request.body));
    const auto found = answers_.find(request.path);
    const auto left = left_.find(request.path);
    if (left != left_.end() && --left->second < 0) {
      response.status = 500;
      response.set_content(R"({"error": "gone"})", "application/json");
    } else if (found == answers_.end()) {
      response.status = 404;
      response.set_content(R"({"detail": "Not Found"})", "application/json");
    } else if (found->second.first == 0) {
      response.set_chunked_content_provider("text/plain", [this](size_t, httplib::DataSink& sink) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return !is_ending_ && sink.write("x", 1);
      });
    } else {
      response.status = found->second.first;
      response.set_content(found->second.second, "application/json");
    }
  }

  httplib::Server server_;
  int port_ = 0;
  std::mutex mutex_;
  std::map<std::string, std::pair<int, std::string>> answers_;
  std::map<std::string, int> left_;
  std::vector<std::string> asked_;
  std::atomic<bool> is_ending_ = false;
  std::thread thread_;
};

}  // namespace tessera::testing
