#pragma once

#include <string>
#include <vector>

namespace tessera::testing {

/// Trains two steps of a configuration given as overrides ("--model.preset=laptop") and checks that
/// the memory in use is within 3 % of the prediction. In a process of its own, since what earlier
/// tests left loaded would count. Under AddressSanitizer, whose memory nobody predicts, it checks
/// nothing.
void expect_memory_as_predicted(const std::vector<std::string>& overrides);

}  // namespace tessera::testing
