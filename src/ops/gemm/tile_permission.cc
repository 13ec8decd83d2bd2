#include "ops/gemm/tile_permission.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "core/process/cpu_level.h"

namespace tessera {

bool may_use_tiles() {
  static const bool kAllowed = [] {
    // Linux gives the registers' memory only to those who ask (Documentation/arch/x86/xstate.rst).
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    return cpu_level() == CpuLevel::kAmx &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return kAllowed;
}

}  // namespace tessera
