#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace tessera {

/// What a process must do before anything else, so that the limits it runs under end in messages
/// and not in signals or silence:
/// - closed descriptors 0 to 2 are opened on /dev/null, so that no other file gets their numbers;
///   writing to standard output fails all the same;
/// - a file beyond `ulimit -f` and a closed pipe fail with an error number (signals that are
/// ignored
///   already stay so);
/// - soft limits on the stack and on open files that are small are raised as far as the hard ones
///   allow;
/// - memory that runs out where no exception can pass ends the process with a message and code 2.
/// To be called before threads are started.
void prepare_process();

/// Throws UserError where the stack, the threads' among them, is too small for this program.
void check_stack_limit();
/// Throws UserError where a limit leaves too little memory to compute at all, and where OpenMP is
/// to use more threads than is sensible or they cannot be started, which it would end the process
/// for. Costs the time to start them once.
void check_compute_limits();

/// Calls the function. Memory that runs out (std::bad_alloc) and threads that cannot be started
/// become UserErrors that name the limit.
int name_limits(const std::function<int()>& function);

/// "the address space is limited to 683.6 MiB (ulimit -v), of which 670 MiB are in use", or ""
/// where nothing but the machine limits memory.
std::string describe_memory_limit();
/// The bytes that such a limit leaves; nothing where there is none.
std::optional<int64_t> memory_limit_room();
/// "at most 2 processes and threads of this user (ulimit -u)", all limits on threads that there
/// are, or "".
std::string describe_thread_limit();
/// "this process may lock 8 MiB of the host's memory (ulimit -l)", which bounds what some systems
/// let a device reach.
std::string describe_lockable_memory();
/// "16 (ulimit -n)": of files that are open at a time.
std::string describe_open_file_limit();
/// "100 KiB (ulimit -f)": of the size of a file.
std::string describe_file_size_limit();

}  // namespace tessera
