#include <unistd.h>

#include <cstring>

// The program is compiled for processors with AVX2 and FMA. This file is not
// (src/cli/CMakeLists.txt), and what it has runs before the constructors of any other, so that an
// older processor ends with a message rather than a bare signal. It uses nothing that is compiled
// elsewhere in the program.
namespace {

void say(const char* text) {
  static_cast<void>(!write(STDERR_FILENO, text, std::strlen(text)));
}

[[gnu::constructor(101)]] void check_processor() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
      __builtin_cpu_supports("bmi") != 0 && __builtin_cpu_supports("bmi2") != 0) {
    return;
  }
  say("tessera: this processor lacks AVX2, FMA or BMI2; Tessera needs one with x86-64-v3 (Intel "
      "Haswell, AMD Zen or newer)\n");
  _exit(2);
}

}  // namespace
