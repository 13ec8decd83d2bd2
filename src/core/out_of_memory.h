#pragma once

#include "core/error.h"

namespace tessera {

/// Memory that a device did not give: how much, for what, and where.
class OutOfMemory : public UserError {
 public:
  using UserError::UserError;
};

}  // namespace tessera
