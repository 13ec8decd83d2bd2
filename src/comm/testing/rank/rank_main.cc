// One rank of the tests of back ends whose ranks are processes: `comm_test_rank WHAT`, started by a
// launcher, which `comm_test_rank launch N WHAT` (mpirun's), `... torchrun N WHAT` and `... alone N
// WHAT` (ranks that nobody ends) are themselves. Ends with 0 where all is as expected.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <thread>

#include "comm/launch/launch.h"
#include "comm/testing/collective_checks.h"
#include "comm/testing/torch_agent.h"
#include "core/memory.h"

namespace tessera {
namespace {

using Argument = std::string;

void check_all(World& world, const Argument& /*unused*/) {
  check_random_collectives(world, 11, 30);
  check_messages(world, 5);
  check_wait_order(world, 3);
  check_large(world, 40 << 20);
  check_sizes(world, 2);
}

/// How many ranks' segments this process has mapped.
int64_t count_segments() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);)
    count += line.find("memfd:tessera_ranks") != std::string::npos ? 1 : 0;
  return count;
}

void check_off(World& world, const Argument& argument) {
  EXPECT_EQ(count_segments(), 0);
  check_all(world, argument);
}

// All messages go through memory.
void check_read(World& world, const Argument& /*unused*/) {
  EXPECT_EQ(count_segments(), world.size());
  for (const uint64_t seed : {21, 22, 23}) check_random_collectives(world, seed, 40);
  check_messages(world, 5);
  check_wait_order(world, 3);
  check_large(world, 40 << 20);
  for (const uint64_t seed : {1, 2, 3}) check_sizes(world, seed);
}

// The last rank is lost while all exchange large messages again and again: it ends as by a crash,
// or stands still, after a random time.
void lose_in_exchange(World& world, const Argument& signal) {
  const CommunicatorPtr group = world.make_world_group();
  const int64_t part = int64_t{3} << 20;
  const OwnedTensor in(DType::kF32, {world.size() * part / 4});
  const OwnedTensor out(DType::kF32, {world.size() * part / 4});
  std::thread fault;
  if (world.rank() == world.size() - 1) {
    std::random_device random;
    const auto wait = std::chrono::microseconds(random() % 30'000);
    fault = std::thread([=] {
      std::this_thread::sleep_for(wait);
      kill(getpid(), std::stoi(signal));
    });
  }
  while (true) {
    group->all_to_all(in, out).wait();
    group->all_reduce(in, out).wait();
  }
}

void check_bytes(World& world, const Argument& bytes) {
  check_large(world, std::stoll(bytes));
}

// All ranks but the last two wait for the last, which is killed; the one before the last computes.
void lose_rank(World& world, const Argument& /*unused*/) {
  const CommunicatorPtr group = world.make_world_group();
  const OwnedTensor tensor(DType::kF32, {1000});
  group->all_reduce(tensor, tensor).wait();
  if (world.rank() == world.size() - 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    raise(SIGKILL);
  }
  group->all_reduce(tensor, tensor).wait();
}

// The last rank comes to an operation too late.
void come_late(World& world, const Argument& seconds) {
  const CommunicatorPtr group = world.make_world_group();
  if (world.rank() == world.size() - 1)
    std::this_thread::sleep_for(std::chrono::duration<double>(std::stod(seconds)));
  group->barrier();
}

bool is_last(const World& world) {
  return world.rank() == world.size() - 1;
}

// The last rank is stopped while groups are made.
void stop_in_setup(World& world, const Argument& /*unused*/) {
  world.make_world_group()->barrier();
  if (is_last(world)) raise(SIGSTOP);
  world.make_world_group();
  world.make_world_group()->barrier();
}

// The last rank is stopped when all have done their work.
void stop_at_end(World& world, const Argument& /*unused*/) {
  world.make_world_group()->barrier();
  if (is_last(world)) raise(SIGSTOP);
}

void one_fails(World& world, const Argument& /*unused*/) {
  const CommunicatorPtr group = world.make_world_group();
  const OwnedTensor tensor(DType::kF32, {1000});
  const Pending pending = group->all_reduce(tensor, tensor);
  if (world.rank() == world.size() - 1) user_error("the disk is full");
  group->barrier();
}

void all_fail(World& /*world*/, const Argument& /*unused*/) {
  user_error("a mistake in the configuration");
}

void other_size(World& world, const Argument& /*unused*/) {
  const OwnedTensor tensor(DType::kF32, {100 + world.rank()});
  const CommunicatorPtr group = world.make_world_group();
  if (world.rank() == 0) group->send(tensor, 1).wait();
  if (world.rank() == 1) group->receive(tensor, 0).wait();
  group->barrier();
}

void say_environment(World& world, const Argument& name) {
  const char* value = std::getenv(name.c_str());
  std::cout << "rank " + std::to_string(world.rank()) + ": " +
                   (value == nullptr ? "unset" : value) + "\n"
            << std::flush;
  world.make_world_group()->barrier();
}

volatile std::sig_atomic_t g_asked = 0;

// Works until it is asked to stop, as training does.
void run_until_asked(World& world, const Argument& /*unused*/) {
  std::signal(SIGUSR1, [](int) { g_asked = 1; });
  const CommunicatorPtr group = world.make_world_group();
  const OwnedTensor stop(DType::kI32, {1});
  group->barrier();
  std::cout << "process " + std::to_string(getpid()) + "\n" << std::flush;
  while (stop.get().as<int32_t>()[0] == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    stop.get().as<int32_t>()[0] = g_asked;
    group->all_reduce(stop, stop, ReduceOp::kMax).wait();
  }
  std::cout << "saved\n" << std::flush;
}

using Body = std::function<void(World&, const Argument&)>;

const std::map<std::string, Body>& bodies() {
  static const std::map<std::string, Body> all = {
      {"all", check_all},
      {"mixed", check_all},
      {"off", check_off},
      {"read", check_read},
      {"large", check_bytes},
      {"lose-in-exchange", lose_in_exchange},
      {"lose", lose_rank},
      {"late", come_late},
      {"stop-in-setup", stop_in_setup},
      {"stop-at-end", stop_at_end},
      {"one-fails", one_fails},
      {"all-fail", all_fail},
      {"size", other_size},
      {"environment", say_environment},
      {"until-asked", run_until_asked},
      {"stop-at-start", [](World&, const Argument&) {}}};
  return all;
}

int run(const std::string& what, const Argument& argument) {
  // These are about the time limit.
  const bool is_stopped =
      what == "late" || what.starts_with("stop-") || argument == std::to_string(SIGSTOP);
  CommOptions options = {.timeout_seconds = is_stopped ? 3.0 : 100.0, .grace_seconds = 0};
  const LaunchInfo info = detect_launch(process_environment());
  if (what == "read" || what == "mixed") options.shared_bytes = 1;
  // As if every third rank were on another machine.
  if (what == "off" || (what == "mixed" && info.rank % 3 == 2))
    options.shared_memory = SharedMemory::kOff;
  if (what == "stop-at-start" && info.rank == info.num_ranks - 1) raise(SIGSTOP);
  const auto world = connect_world(options);
  return run_rank(*world, [&] {
    bodies().at(what)(*world, argument);
    return testing::UnitTest::GetInstance()->ad_hoc_test_result().Failed() ? 1 : 0;
  });
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    const std::string mode = argv[1];
    if (argc <= 3) return tessera::run(mode, argc > 2 ? argv[2] : "");
    std::vector<std::string> command(argv + 2, argv + argc);
    command[0] = argv[0];
    const int64_t num_ranks = std::stoll(argv[2]);
    if (mode == "launch") {
      const tessera::LaunchSignals signals;
      return tessera::launch_local_ranks(num_ranks, command, signals, std::cout);
    }
    return tessera::run_torch_agent(num_ranks, command, mode == "torchrun");
  } catch (const std::exception& error) {
    std::cerr << "comm_test_rank: " << error.what() << "\n";
    return 2;
  }
}
