#include "core/error.h"

namespace tessera {

void throw_user_error(fmt::string_view format, fmt::format_args args) {
  throw UserError(fmt::vformat(format, args));
}

void throw_internal_error(fmt::string_view format, fmt::format_args args) {
  throw InternalError(fmt::vformat(format, args));
}

}  // namespace tessera
