#include "hf/verify.h"

#include <algorithm>

#include "checkpoint/hash.h"
#include "core/error.h"
#include "hf/elements.h"
#include "hf/name_list.h"

namespace tessera {
namespace {

/// The type in which a block is compared.
DType compared_type(DType source, DType target) {
  return is_exact(source, target) ? source : target;
}

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
  }
  return identity;
}

}  // namespace

VerifyReport verify_round_trip(const VerifyRequest& request) {
  VerifyReport report;
  std::vector<std::string> differing;
  PageKeeper pages({request.source, request.target});
  for (size_t i = 0; i < request.names.size(); ++i) {
    const std::span<const BlockCopy> blocks = request.back[i];
    const DType source_type = request.source->dtype(i);
    std::vector<DType> types;
    for (const BlockCopy& block : blocks) {
      types.push_back(compared_type(source_type, request.target->dtype(block.source)));
    }
    const auto advance = [&](int64_t num_bytes) {
      pages.count(num_bytes);
      request.advance(num_bytes);
    };
    const auto identity = to_identity(blocks, i);
    const uint64_t expected = hash_tensor(*request.source, identity, types, advance);
    const uint64_t found = hash_tensor(*request.target, blocks, types, advance);
    if (expected != found) differing.push_back(request.names[i]);
    report.num_tensors += 1;
    report.num_narrowed += std::ranges::count(types, source_type) == std::ssize(types) ? 0 : 1;
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
