#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <iostream>

#include "cli/commands.h"
#include "core/error.h"
#include "core/exit_code.h"
#include "core/limits.h"
#include "core/process/lost_page.h"
#include "core/process/standard_output.h"
#include "core/text/message.h"

namespace tessera {
namespace {

int tell(const std::string& text, int code) {
  std::cerr << "tessera: " << shorten_message(text) << "\n";
  return code;
}

/// A closed pipe ends a command without a word, as it ends others (`| head`), but not before it has
/// cleaned up. Where the caller ignores the signal it is an error like a full disk.
int lose_output(const OutputLost& error) {
  if (error.reader_left()) {
    struct sigaction action {};
    sigaction(SIGPIPE, nullptr, &action);
    if (action.sa_handler != SIG_IGN) {
      std::signal(SIGPIPE, SIG_DFL);
      std::raise(SIGPIPE);
    }
  }
  return tell(error.what(), kInternalErrorCode);
}

int run(int argc, char** argv, StandardOutput& output) {
  try {
    const int code = name_limits([&] { return run_command_line(argc, argv, output); });
    std::cout.flush();
    return code;
  } catch (const UserError& error) {
    return tell(error.what(), kUserErrorCode);
  } catch (const OutputLost& error) {
    return lose_output(error);
  } catch (const std::filesystem::filesystem_error& error) {
    return tell(error.what(), kUserErrorCode);
  } catch (const std::exception& error) {
    return tell(std::string("internal error: ") + error.what(), kInternalErrorCode);
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::prepare_process();
  const tessera::LostPageMessage message;
  std::cerr.tie(nullptr);  // a message must not fail for what standard output holds
  tessera::StandardOutput output(std::cout, STDOUT_FILENO, std::cerr);
  return output.finish(tessera::run(argc, argv, output));
}
