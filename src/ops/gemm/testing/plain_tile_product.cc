#include "ops/gemm/testing/plain_tile_product.h"

#include "ops/cpu_dispatch.h"
#include "ops/gemm/testing/plain_tiles.h"
#include "ops/gemm/tile_product.h"

namespace tessera::testing {

TESSERA_LEVELED(void, multiply_on_plain_tiles, (const Gemm& product, uint32_t* scratch),
                (product, scratch)) {
  tile::TileProduct<PlainTiles>(product, scratch).run();
}

}  // namespace tessera::testing
