#include "hf/verify.h"

#include <algorithm>

#include "core/error.h"
#include "core/file/hash.h"
#include "hf/tensors/name_list.h"
#include "hf/transfer/elements.h"

namespace tessera {
namespace {

uint64_t hash_tensor(ElementSource& from, std::span<const BlockCopy> blocks,
                     std::span<const DType> dtypes, const AdvanceProgress& advance) {
  Hash64 hash;
  transfer_tensor(from, {.blocks = blocks, .dtypes = dtypes, .pad = false},
                  [&](std::span<const std::byte> bytes) {
                    hash.update(bytes);
                    advance(std::ssize(bytes));
                  });
  return hash.digest();
}

/// Blocks of a tensor as copies from itself, in the same order and pieces.
std::vector<BlockCopy> to_identity(std::span<const BlockCopy> blocks, size_t tensor) {
  std::vector<BlockCopy> identity(blocks.begin(), blocks.end());
  for (BlockCopy& block : identity) {
    block.source = tensor;
    block.source_begin = block.target_begin;
    block.transposed = false;
    block.halves = Halves::kAsTheyAre;
    block.offset = -block.offset;
  }
  return identity;
}

/// The same blocks as they are: what they differ by was added to what they are compared with.
std::vector<BlockCopy> without_offsets(std::span<const BlockCopy> blocks) {
  std::vector<BlockCopy> plain(blocks.begin(), blocks.end());
  for (BlockCopy& block : plain) block.offset = 0;
  return plain;
}

enum class Comparison { kEqual, kEqualRounded, kDiffers };

/// One tensor of a round trip.
class TensorComparison {
 public:
  TensorComparison(const VerifyRequest& request, size_t tensor, const AdvanceProgress& advance)
      : request_(request),
        advance_(advance),
        blocks_(without_offsets(request.back[tensor])),
        identity_(to_identity(request.back[tensor], tensor)) {
    const DType own = request.source->dtype(tensor);
    for (const BlockCopy& block : request.back[tensor]) {
      const DType other = request.target->dtype(block.source);
      // The sum with an offset was rounded to what the target has.
      own_types_.push_back(block.offset != 0 ? other : own);
      rounded_types_.push_back(block.offset == 0 && is_exact(own, other) ? own : other);
    }
  }

  Comparison run() const {
    if (equal_as(own_types_)) return Comparison::kEqual;
    const bool rounded = rounded_types_ != own_types_ && equal_as(rounded_types_);
    return rounded ? Comparison::kEqualRounded : Comparison::kDiffers;
  }

 private:
  bool equal_as(std::span<const DType> types) const {
    return hash_tensor(*request_.source, identity_, types, advance_) ==
           hash_tensor(*request_.target, blocks_, types, advance_);
  }

  const VerifyRequest& request_;
  const AdvanceProgress& advance_;
  std::vector<BlockCopy> blocks_;
  std::vector<BlockCopy> identity_;
  std::vector<DType> own_types_;
  std::vector<DType> rounded_types_;
};

}  // namespace

VerifyReport verify_round_trip(const VerifyRequest& request) {
  VerifyReport report;
  std::vector<std::string> differing;
  PageKeeper pages({request.source, request.target});
  const AdvanceProgress advance = [&](int64_t num_bytes) {
    pages.count(num_bytes);
    request.advance(num_bytes);
  };
  for (size_t i = 0; i < request.names.size(); ++i) {
    const Comparison found = TensorComparison(request, i, advance).run();
    if (found == Comparison::kDiffers) differing.push_back(request.names[i]);
    report.num_tensors += 1;
    report.num_narrowed += found == Comparison::kEqualRounded ? 1 : 0;
  }
  require(differing.empty(),
          "verification failed: mapped back from what was written, these tensors are not those of "
          "the source: {}; the target was not kept",
          list_names(differing));
  return report;
}

void verify_padding(const std::vector<MappedTensor>& tensors, const Plan& plan,
                    ElementSource& target) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    int64_t end = 0;
    for (const BlockCopy& block : plan[i]) {
      end = std::max(end, block.target_begin + block.num_elements());
    }
    const int64_t size = tensors[i].shape.num_elements();
    if (end == size) continue;
    const auto bytes = target.read(i, end, size - end);
    require(std::ranges::all_of(bytes, [](std::byte byte) { return byte == std::byte{0}; }),
            "verification failed: the padding of {} is not zero", tensors[i].name);
  }
}

}  // namespace tessera
