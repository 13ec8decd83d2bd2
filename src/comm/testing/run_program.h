#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

namespace tessera {

/// How a program ended, and all that it wrote.
struct ProgramResult {
  int code = 0;
  std::string output;
  double seconds = 0;
};

/// Runs a shell command; it is killed with all its ranks, and gives code 124 or 137, after
/// `limit_seconds`.
inline ProgramResult run_program(const std::string& command, int limit_seconds = 120) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string limited =
      "timeout -k 5 " + std::to_string(limit_seconds) + " sh -c '" + command + "' 2>&1";
  FILE* pipe = popen(limited.c_str(), "r");
  ProgramResult result;
  char buffer[512];
  while (pipe != nullptr && fgets(buffer, sizeof(buffer), pipe) != nullptr) result.output += buffer;
  const int status = pipe == nullptr ? -1 : pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

inline int count_text(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

inline const std::string kRankProgram = TESSERA_BINARY "/comm_test_rank ";

/// Starts 3 ranks by `launcher` (a mode of comm_test_rank) that run until they are asked to stop,
/// waits for them, does something to process $p, which is the launcher, and says afterwards whether
/// ranks still run.
inline ProgramResult run_and(const std::string& launcher, const std::string& action) {
  return run_program("out=$(mktemp); " + kRankProgram + launcher +
                     " 3 until-asked >$out 2>&1 & p=$!; "
                     "while [ $(grep -c ^process $out) -lt 3 ]; do sleep 0.05; done; " +
                     action +
                     "; wait $p; code=$?; for i in $(seq 100); do alive=0; "
                     "for q in $(sed -n \"s/^process //p\" $out); do "
                     "grep -qs \"^State:.[^Z]\" /proc/$q/status && alive=1; done; "
                     "[ $alive = 0 ] && break; sleep 0.1; done; cat $out; rm $out; "
                     "echo alive $alive; exit $code");
}

inline bool have_mpirun() {
  return run_program("mpirun --version").output.find("Open MPI") != std::string::npos;
}

/// The test rank program under mpirun.
inline ProgramResult run_ranks(int num_ranks, const std::string& arguments,
                               const std::string& environment = "") {
  const std::string allow = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 ";
  return run_program(allow + "OMP_NUM_THREADS=1 " + environment +
                     " mpirun --oversubscribe --bind-to none -n " + std::to_string(num_ranks) +
                     " " TESSERA_BINARY "/comm_test_rank " + arguments);
}

}  // namespace tessera
