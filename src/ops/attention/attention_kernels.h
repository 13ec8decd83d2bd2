#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "core/slice.h"
#include "ops/attention/attention_operands.h"
#include "ops/cpu_dispatch.h"
#include "ops/operator.h"

/// Attention of queries over keys in hand. A call takes one pass where all keys are in hand at once
/// (plain attention), or several, each with other keys (a ring); what a pass sums up then waits in
/// the caller's memory for the next. Any order of passes gives the same results except for
/// rounding; the same order gives the same bits.
namespace tessera {

class AttentionOperator;

namespace attention {

inline namespace TESSERA_CPU_LEVEL {

class Carver;
class WorkList;

/// Called by the calling thread now and then during a pass, to move transfers on; must not throw.
/// May be empty.
using Poll = std::function<void()>;

/// What the queries' rows have summed up between passes: F32, [Nkv, T, group, ...].
struct ForwardSums {
  float* o = nullptr;    ///< not yet divided by the sums: [..., head_columns_v]
  float* max = nullptr;  ///< greatest scores, in units of log 2
  float* sum = nullptr;  ///< of exponentials

  ForwardSums() = default;
  ForwardSums(const AttentionOperator& op, int64_t num_tokens, Carver& carver);
};

struct ForwardPass {
  const AttentionOperator& op;
  const WorkList& work;
  Tensor q, k, v;
  Tensor o;               ///< written by the last pass
  Tensor lse;             ///< likewise; null: not wanted
  ForwardSums sums = {};  ///< may be null where the first pass is the last
  bool first = true;      ///< every query must see a key in the first pass
  bool last = true;
  Poll poll = {};
};

/// The only pass of an operator's call.
ForwardPass make_forward_pass(const AttentionOperator& op, const KernelArgs& args,
                              const WorkList& work);
void run_forward(const ForwardPass& pass, std::span<std::byte> scratch);
/// Scratch bytes for all threads.
int64_t forward_scratch_bytes(const AttentionOperator& op, DType dtype);

/// Sums of the gradients of the keys and values in hand: F32, [Nkv, T, ...].
struct KeySums {
  float* keys = nullptr;    ///< not yet scaled: [..., head_columns]
  float* values = nullptr;  ///< [..., head_columns_v]

  KeySums(const AttentionOperator& op, int64_t num_tokens, Carver& carver);
};

/// Sums of the gradients of queries between passes: F32, [Nkv, T, group, head_columns].
float* take_query_sums(const AttentionOperator& op, int64_t num_tokens, Carver& carver);

struct BackwardPass {
  const AttentionOperator& op;
  const WorkList& work;
  Tensor q, k, v, o, lse, grad_o;
  Tensor grad_lse;              ///< null: zero
  Tensor grad_q;                ///< written by the last pass
  Tensor grad_k, grad_v;        ///< null: the sums alone are wanted
  KeySums key_sums;             ///< overwritten for all keys of the work
  float* query_sums = nullptr;  ///< may be null where the first pass is the last
  bool first = true;
  bool last = true;
  Poll poll = {};
};

BackwardPass make_backward_pass(const AttentionOperator& op, const KernelArgs& args,
                                const WorkList& work, const KeySums& key_sums);
void run_backward(const BackwardPass& pass, std::span<std::byte> scratch);
int64_t backward_scratch_bytes(const AttentionOperator& op, DType dtype);

/// Writes the gradients of rows begin to end of k and v, for one key-value head, from their sums.
void store_key_gradients(const AttentionOperator& op, const KeySums& sums, int64_t kv_head,
                         const IndexRange& rows, const Tensor& grad_k, const Tensor& grad_v);

}  // namespace TESSERA_CPU_LEVEL
}  // namespace attention
}  // namespace tessera
