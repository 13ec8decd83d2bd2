#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hf/family/family.h"
#include "model/config/config.h"

namespace tessera {

/// A config.json of a family for a model. Reading it back gives the same model where the family can
/// express it, which `find_differences` tells.
std::string write_hf_config(const Family& family, const ModelConfig& model, DType dtype,
                            int64_t max_length);

/// The options in which two models compute different things or have other weights, one line each:
/// "moe.score: sigmoid here, softmax there". How experts are implemented, initial deviations and
/// losses of training are no differences.
std::vector<std::string> find_differences(const ModelConfig& here, const ModelConfig& there);

/// What a family cannot express of a model; empty: nothing.
std::vector<std::string> inexpressible(const Family& family, const ModelConfig& model);

/// The first family that expresses the model. Throws UserError with each family's least number of
/// obstacles where there is none.
const Family& find_family_for(const ModelConfig& model);

}  // namespace tessera
