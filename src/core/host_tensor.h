#pragma once

#include "core/memory.h"

namespace tessera {

/// The elements of a tensor where the host reaches them: the tensor itself, or a copy of a
/// device's.
class HostTensor {
 public:
  enum class Access : uint8_t {
    kRead,   ///< the elements are there, and may be changed for store()
    kWrite,  ///< they are undefined until written; store() brings them to the tensor
  };
  HostTensor(const Tensor& tensor, Access access);

  const Tensor& get() const { return host_; }
  void store() const;

 private:
  Tensor tensor_;
  OwnedTensor copy_;
  Tensor host_;
};

}  // namespace tessera
