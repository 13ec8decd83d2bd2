#include "train/testing/shadow_devices.h"

#include "ops/registry/cpu_kernels.h"
#include "ops/testing/shadow_backend.h"

namespace tessera::testing {

RankDevice choose_shadow(const Settings& /*settings*/, World& host) {
  Backend backend = make_shadow_backend(make_cpu_kernels());
  auto world = make_shadow_world(host, backend);
  return {.backend = std::move(backend), .world = std::move(world)};
}

}  // namespace tessera::testing
