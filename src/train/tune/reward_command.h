#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Runs a command by the shell, gives it a text on its standard input, and returns what it printed
/// to its standard output; its standard error is this process's. Throws UserError where it cannot
/// be started, ends with an error, prints more than 64 MiB, or has not ended after so many seconds,
/// when it is killed with all that it started.
std::string run_reward_command(const std::string& command, std::string_view given, double seconds);

/// The numbers of a text, one a line. Throws UserError where there are not `count`, or one is not
/// finite.
std::vector<double> parse_rewards(std::string_view text, int64_t count);

}  // namespace tessera
