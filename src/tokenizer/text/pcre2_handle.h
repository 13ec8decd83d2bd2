#pragma once

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <memory>

namespace tessera {

/// Frees what PCRE2 has allocated.
template <auto free_function>
struct Pcre2Free {
  template <typename T>
  void operator()(T* pointer) const {
    free_function(pointer);
  }
};
using Pcre2Code = std::unique_ptr<pcre2_code, Pcre2Free<pcre2_code_free>>;
using Pcre2MatchData = std::unique_ptr<pcre2_match_data, Pcre2Free<pcre2_match_data_free>>;
using Pcre2MatchContext = std::unique_ptr<pcre2_match_context, Pcre2Free<pcre2_match_context_free>>;
using Pcre2CompileContext =
    std::unique_ptr<pcre2_compile_context, Pcre2Free<pcre2_compile_context_free>>;
using Pcre2JitStack = std::unique_ptr<pcre2_jit_stack, Pcre2Free<pcre2_jit_stack_free>>;

}  // namespace tessera
