#pragma once

namespace tessera {

enum class GateFunction {
  kSigmoid,
  kSoftplus,  ///< log(1 + e^x)
};

}  // namespace tessera
