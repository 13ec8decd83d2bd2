#pragma once

#include <cstdint>

#include "core/host_device.h"

/// Where the tokens of groups, such as experts, lie when they are cut into blocks of 128, none of
/// which has tokens of two groups. On CPUs and GPUs.
namespace tessera {

constexpr int64_t kTokenBlock = 128;

/// The first block of a group whose tokens begin at `offset` among those of all groups. It depends
/// on the group alone, so that nobody needs a sum over the groups before it; the price is a block
/// behind some groups that is nobody's.
TESSERA_HOST_DEVICE_INLINE int64_t first_token_block(int64_t offset, int64_t group) {
  return offset / kTokenBlock + group;
}

/// Blocks that have a group's tokens.
TESSERA_HOST_DEVICE_INLINE int64_t token_blocks_of(int64_t num_tokens) {
  return (num_tokens + kTokenBlock - 1) / kTokenBlock;
}

/// Blocks that groups of `num_tokens` tokens in all have room in.
TESSERA_HOST_DEVICE_INLINE int64_t num_token_blocks(int64_t num_tokens, int64_t num_groups) {
  return token_blocks_of(num_tokens) + num_groups - 1;
}

}  // namespace tessera
