#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "core/dtype.h"
#include "core/nonfinite.h"
#include "core/tensor.h"
#include "hf/config/block_scales.h"
#include "hf/tensors/hf_tensors.h"
#include "hf/tensors/tensor_map.h"

namespace tessera {

/// Where the elements of numbered tensors are read from.
class ElementSource {
 public:
  virtual ~ElementSource() = default;
  virtual DType dtype(size_t tensor) const = 0;
  /// Elements [begin, begin + count), whole rows of the tensor; perhaps unaligned, and valid until
  /// the next call.
  virtual std::span<const std::byte> read(size_t tensor, int64_t begin, int64_t count) = 0;
  /// Lets the system take back the memory of what was read.
  virtual void drop_pages() = 0;
  virtual const std::string& name(size_t tensor) const = 0;

  /// Of what was transferred, in the type that it was given in; so also where a value was too large
  /// for that. By the names of this side.
  const NonFiniteTensors& nonfinite() const { return nonfinite_; }
  void count_transferred(size_t tensor, std::span<const std::byte> elements, DType dtype) {
    nonfinite_.add(name(tensor), count_nonfinite(elements, dtype));
  }

 private:
  NonFiniteTensors nonfinite_;
};

/// Refuses weights of `where` that were NaN or infinite, or that became so in a narrower type;
/// where they are allowed, notes them.
void judge_nonfinite(const NonFiniteTensors& found, std::string_view where, bool allowed,
                     std::vector<std::string>& notes);

/// Has sources drop their pages each time that enough has been read.
class PageKeeper {
 public:
  explicit PageKeeper(std::vector<ElementSource*> sources) : sources_(std::move(sources)) {}
  void count(int64_t num_bytes);

 private:
  std::vector<ElementSource*> sources_;
  int64_t num_bytes_ = 0;
};

/// The tensors of a Hugging Face folder, numbered as in `map.hf`; all must be there. Matrices of
/// E4M3 or E2M1 and MXFP4 tensors are read as F32, by their scales.
std::unique_ptr<ElementSource> make_hf_source(const TensorMap& map, const HfTensors& tensors,
                                              const std::optional<BlockScales>& scales);

/// The tensors of a checkpoint, numbered as in `map.own`; all must be there.
std::unique_ptr<ElementSource> make_checkpoint_source(const TensorMap& map,
                                                      const CheckpointReader& reader);

/// Whole tensors in the host's memory, by name.
using HeldTensors = std::map<std::string, Tensor>;

/// The tensors of a model in memory, numbered as in `map.own`; all must be there.
std::unique_ptr<ElementSource> make_held_source(const TensorMap& map, const HeldTensors& tensors);

/// Whether two halves of rows stand in turn on one side (TensorLink::alternating).
enum class Halves : uint8_t {
  kAsTheyAre,
  kSplit,   ///< in turn in the source's rows, one behind the other in the target
  kInTurn,  ///< the reverse
};

/// A block as one direction of a conversion sees it.
struct BlockCopy {
  size_t source = 0;
  int64_t source_begin = 0;
  int64_t target_begin = 0;
  int64_t rows = 0;  ///< of the target's block; the source's is [cols, rows] where transposed
  int64_t cols = 0;
  bool transposed = false;
  Halves halves = Halves::kAsTheyAre;
  float offset = 0;  ///< what the target's elements are more; of dense blocks alone

  int64_t num_elements() const { return rows * cols; }
};

/// For each target tensor the blocks that make it, in the order of its elements. What no block
/// covers is zero.
using Plan = std::vector<std::vector<BlockCopy>>;
Plan plan_to_own(const TensorMap& map);
Plan plan_to_hf(const TensorMap& map);

struct TransferRequest {
  std::span<const BlockCopy> blocks;
  std::span<const DType> dtypes;  ///< that each block is given in
  int64_t num_elements = 0;
  DType padding_dtype = DType::kF32;
  bool pad = true;  ///< give zeros for what no block covers, instead of leaving it out
};

/// Gives the bytes of one target tensor, piece by piece. Takes the memory of a piece, or of one
/// transposed block.
void transfer_tensor(ElementSource& source, const TransferRequest& request,
                     const std::function<void(std::span<const std::byte>)>& sink);

}  // namespace tessera
