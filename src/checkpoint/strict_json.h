#pragma once

#include "core/strict_json.h"  // IWYU pragma: export
