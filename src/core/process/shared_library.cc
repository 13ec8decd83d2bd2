#include "core/process/shared_library.h"

#include <dlfcn.h>

#include "core/error.h"

namespace tessera {

SharedLibrary::SharedLibrary(std::span<const std::string> names, const std::string& purpose,
                             const std::string& remedy) {
  std::string failures;
  for (const std::string& name : names) {
    handle_ = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) {
      name_ = name;
      return;
    }
    failures += fmt::format("\n  {}", ::dlerror());
  }
  user_error("{} cannot be loaded; {}; tried:{}", purpose, remedy, failures);
}

void* SharedLibrary::find_symbol(const char* name) const {
  void* const symbol = ::dlsym(handle_, name);
  require(symbol != nullptr, "{} has no {}: it is another version than this program needs", name_,
          name);
  return symbol;
}

}  // namespace tessera
