#pragma once

#include <span>
#include <string>

namespace tessera {

/// A shared library that is loaded when it is first needed, and stays loaded.
class SharedLibrary {
 public:
  /// Loads the first of `names` that can be: file names, which the dynamic linker looks for in
  /// LD_LIBRARY_PATH and the system's folders, or paths. Throws UserError where none can, which
  /// says what `purpose` is in want of, where each was looked for, and the `remedy`.
  SharedLibrary(std::span<const std::string> names, const std::string& purpose,
                const std::string& remedy);

  /// Sets `function` to the library's function of that name. Throws UserError where it has none.
  template <typename Function>
  void find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(find_symbol(name));
  }
  /// The one that was loaded.
  const std::string& name() const { return name_; }

 private:
  void* find_symbol(const char* name) const;

  void* handle_ = nullptr;
  std::string name_;
};

}  // namespace tessera
