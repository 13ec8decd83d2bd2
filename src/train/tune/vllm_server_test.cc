#include "train/tune/vllm_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "core/error.h"
#include "core/file/file.h"
#include "core/process/stopwatch.h"
#include "train/tune/vllm_testing.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::VllmStandIn;

WeightExportSettings settings_of(const std::string& url) {
  WeightExportSettings settings;
  settings.folder = "/dev/shm/weights";
  settings.vllm_url = url;
  settings.vllm_timeout = 20;
  return settings;
}

template <typename Act>
std::string error_of(const Act& act) {
  try {
    act();
  } catch (const UserError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(VllmServer, ReloadsFromAFolder) {
  VllmStandIn vllm;
  VllmServer server(settings_of(vllm.url()));
  EXPECT_EQ(server.find_workers(), 2);
  server.load("/dev/shm/weights/step-00000003", "step-00000003");
  EXPECT_THAT(vllm.take_asked(),
              ElementsAre("GET /get_world_size", "POST /pause?mode=wait",
                          R"(POST /collective_rpc {"kwargs":{"weights_path":)"
                          R"("/dev/shm/weights/step-00000003"},"method":"reload_weights",)"
                          R"("timeout":20.0})",
                          "POST /resume"));
}

/// The phases of a weight transfer, of which the first is done once.
TEST(VllmServer, TransfersByTheDiskBackEnd) {
  VllmStandIn vllm;
  WeightExportSettings settings = settings_of(vllm.url());
  settings.vllm_way = "disk";
  settings.vllm_pause = "keep";
  VllmServer server(settings);
  server.load("/w/step-00000003", "step-00000003");
  EXPECT_THAT(
      vllm.take_asked(),
      ElementsAre("POST /pause?mode=keep", R"(POST /init_weight_transfer_engine {"init_info":{}})",
                  "POST /start_weight_update {}",
                  R"(POST /update_weights {"update_info":{"path":"/w/step-00000003"}})",
                  R"(POST /finish_weight_update {"weight_version":"step-00000003"})",
                  "POST /resume"));
  server.load("/w/step-00000004", "step-00000004");
  EXPECT_THAT(vllm.take_asked(),
              ElementsAre("POST /pause?mode=keep", "POST /start_weight_update {}",
                          R"(POST /update_weights {"update_info":{"path":"/w/step-00000004"}})",
                          R"(POST /finish_weight_update {"weight_version":"step-00000004"})",
                          "POST /resume"));
}

TEST(VllmServer, RoutesMayStandBelowAPath) {
  VllmStandIn vllm;
  vllm.set("/behind/get_world_size", 200, R"({"world_size": 1})");
  EXPECT_EQ(VllmServer(settings_of(vllm.url() + "/behind/")).find_workers(), 1);
}

TEST(VllmServer, SaysWhatTheServerSaid) {
  VllmStandIn vllm;
  VllmServer server(settings_of(vllm.url()));
  const auto load = [&] { server.load("/w/step-00000001", "step-00000001"); };
  // A paused server whose weights may be of two versions writes nothing.
  vllm.set("/collective_rpc", 500, R"({"error": {"message": "no such folder", "code": 500}})");
  EXPECT_THAT(error_of(load), AllOf(HasSubstr("/collective_rpc was answered with status 500: "
                                              "no such folder; the server stays paused"),
                                    HasSubstr("POST /resume")));
  EXPECT_THAT(vllm.take_asked(), ElementsAre(HasSubstr("/pause"), HasSubstr("/collective_rpc")));
  vllm.set("/collective_rpc", 400, R"({"detail": "Missing 'method' in request body"})");
  EXPECT_THAT(error_of(load), HasSubstr("status 400: Missing 'method' in request body"));
  vllm.set("/collective_rpc", 502, "<html>\nbad gateway");
  EXPECT_THAT(error_of(load), HasSubstr("status 502: <html> bad gateway;"));
  vllm.set("/collective_rpc", 307, "");
  EXPECT_THAT(error_of(load), HasSubstr("status 307: (nothing);"));
  // One that may have paused before it failed is let go on.
  vllm.take_asked();
  vllm.set("/pause", 400, R"({"error": "unknown mode"})");
  EXPECT_THAT(error_of(load), HasSubstr("/pause?mode=wait was answered with status 400: unknown"));
  EXPECT_THAT(vllm.take_asked(), ElementsAre(HasSubstr("/pause"), "POST /resume"));
}

TEST(VllmServer, RefusesServersWithoutTheRoutes) {
  VllmStandIn vllm;
  VllmServer server(settings_of(vllm.url()));
  vllm.set("/get_world_size", 404, R"({"detail": "Not Found"})");
  EXPECT_THAT(error_of([&] { server.find_workers(); }),
              AllOf(HasSubstr("/get_world_size was answered with status 404: Not Found"),
                    HasSubstr("VLLM_SERVER_DEV_MODE=1")));
  for (const char* answer : {R"({"world_size": 0})", R"({"world_size": "2"})", "[]", "hello", ""}) {
    vllm.set("/get_world_size", 200, answer);
    EXPECT_THAT(error_of([&] { server.find_workers(); }),
                HasSubstr(R"(expected {"world_size": 1 or more}; is that vLLM?)"))
        << answer;
  }
}

/// Takes one connection and closes it.
class Closer {
 public:
  Closer() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(own);
    auto* const address = reinterpret_cast<sockaddr*>(&own);
    EXPECT_EQ(::bind(socket_.get(), address, size), 0);
    EXPECT_EQ(::listen(socket_.get(), 1), 0);
    EXPECT_EQ(::getsockname(socket_.get(), address, &size), 0);
    url_ = "http://127.0.0.1:" + std::to_string(ntohs(own.sin_port));
    thread_ = std::thread([this] { FileDescriptor(::accept(socket_.get(), nullptr, nullptr)); });
  }
  Closer(const Closer&) = delete;
  Closer& operator=(const Closer&) = delete;
  ~Closer() { thread_.join(); }
  const std::string& url() const { return url_; }

 private:
  FileDescriptor socket_;
  std::string url_;
  std::thread thread_;
};

/// Nobody there, nobody who answers, and one whose answer has no end.
TEST(VllmServer, NeverHangs) {
  std::string gone;
  {
    VllmStandIn vllm;
    gone = vllm.url();
  }
  EXPECT_THAT(error_of([&] { VllmServer(settings_of(gone)).find_workers(); }),
              AllOf(HasSubstr("nobody answers; start a vLLM server there"), HasSubstr(gone)));

  const Closer closer;
  EXPECT_THAT(error_of([&] { VllmServer(settings_of(closer.url())).find_workers(); }),
              HasSubstr("the connection was closed before there was an answer in HTTP; start"));

  VllmStandIn vllm;
  WeightExportSettings settings = settings_of(vllm.url());
  settings.vllm_timeout = 0.3;
  VllmServer server(settings);
  vllm.set("/get_world_size", 0, "");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(error_of([&] { server.find_workers(); }),
              HasSubstr("had not been answered after 0.3 s; rl.vllm_timeout allows it no more"));
  vllm.set("/pause", 0, "");
  EXPECT_THAT(error_of([&] { server.load("/w", "1"); }),
              HasSubstr("with rl.vllm_pause = \"wait\" requests under way are waited for"));
  EXPECT_LT(seconds_since(start), 5);
}

TEST(VllmServer, RefusesAddressesThatAreNone) {
  for (const char* url : {"127.0.0.1:8000", "http://", "http:///path", "http://a b", "ftp://a",
                          "http://a:8000/?x=1", "http", "http://user@host"})
    EXPECT_THAT(error_of([&] { VllmServer(settings_of(url)); }),
                HasSubstr("must be http://host:port"))
        << url;
  EXPECT_THAT(error_of([] { VllmServer(settings_of("https://host")); }),
              HasSubstr("TLS is not spoken"));
}

}  // namespace
}  // namespace tessera
