#pragma once

namespace tessera {

enum class GateFunction {
  kSigmoid,
  kSoftplus,  ///< log(1 + e^x)
  kIdentity,  ///< x, in F32: a factor of each row
};

}  // namespace tessera
