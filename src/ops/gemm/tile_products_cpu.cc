#include "ops/cpu_dispatch.h"
#include "ops/gemm/tile_product.h"
#include "ops/gemm/tile_products.h"

namespace tessera {

TESSERA_LEVELED(void, multiply_on_tiles, (const Gemm& product, uint32_t* scratch),
                (product, scratch)) {
  tile::TileProduct<tile::AmxTiles>(product, scratch).run();
}

TESSERA_LEVELED(int64_t, tile_scratch_words, (), ()) {
  return tile::TileScratch::kWords;
}

}  // namespace tessera
