#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// "", or for what is no operator's name ", which is no operator", with the nearest name where one
/// is near. Operators that only GPUs or ranks beside others run are known too.
std::string judge_operator_name(std::string_view name);

}  // namespace tessera
