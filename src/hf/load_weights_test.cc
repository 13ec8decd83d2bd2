#include "hf/load_weights.h"

#include <gtest/gtest.h>

#include "core/memory.h"
#include "hf/convert_testing.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {
namespace {

TEST(LoadHfTensors, TakesWeightsAndGradientsOfEveryFixture) {
  for (const std::string& name : hf_fixtures()) {
    SCOPED_TRACE(name);
    const ImportedConfig config = fixture_config(name);
    const TensorMap map = map_tensors(*config.family, config.model, DType::kF32,
                                      {.vocab_size = config.model.vocab_size});
    std::vector<OwnedTensor> storage;
    std::vector<NamedTensor> tensors;
    for (const MappedTensor& own : map.own) {
      storage.emplace_back(own.dtype, own.shape, "test");
      tensors.push_back({own.name, storage.back().get()});
    }
    load_hf_tensors(config, HfTensors(hf_fixture(name)), tensors);
    load_hf_tensors(config, HfTensors(hf_fixture(name) / "grads.safetensors"), tensors);
  }
}

}  // namespace
}  // namespace tessera
