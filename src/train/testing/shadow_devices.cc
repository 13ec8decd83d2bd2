#include "train/testing/shadow_devices.h"

#include "ops/registry/cpu_kernels.h"
#include "ops/testing/shadow_backend.h"

namespace tessera::testing {

RankDevice choose_shadow(const Settings& /*settings*/, World& host) {
  Backend backend = make_shadow_backend(make_cpu_kernels());
  auto world = make_shadow_world(host, backend);
  return {.backend = std::move(backend), .world = std::move(world)};
}

RankDevice choose_recording_shadow(const Settings& settings, World& host) {
  RankDevice device = choose_shadow(settings, host);
  device.backend.control().graphs = GraphMode::kOn;
  return device;
}

}  // namespace tessera::testing
