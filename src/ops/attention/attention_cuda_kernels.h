#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/dtype.h"

/// The device code of attention, as the host calls it. All pointers but those of tensor maps'
/// owners are the GPU's; results for rows beyond the sequences are left unwritten.
namespace tessera::cuda::attention {

/// A block of neighbouring positions of one sequence. Position p of the queries is row
/// query_row + p, of the keys row key_row + p.
struct Item {
  int query_row;  ///< may be negative: no query has a position before `first`
  int key_row;
  int length;     ///< of the sequence; where this ends before, the end of the queries there are
  int first;      ///< position
  int num_after;  ///< blocks of the sequence after this one
  int begin;      ///< no query has a position before it; positions before `first` count too
  /// The sequence's first tile of kept pairs (KeptPairs).
  int64_t first_pairs;
};

/// Factors that the kernel of the keys' gradients leaves for the queries', as BF16: for each head,
/// sequence and block of kTensorBlock keys, one tile of 64 keys by 64 queries for each half of the
/// keys and each 64 queries from the block's first on, as it lies in shared memory. Where all tiles
/// of a head, counted on the GPU, are more than `capacity`, *fit is 0 and they are not kept.
struct KeptPairs {
  void* tiles;       ///< [heads of the chunk, capacity] of kPairTileBytes; null: not kept
  int64_t capacity;  ///< tiles of a head
  const int* fit;
  int first_kv_head;  ///< the chunk: key-value heads whose pairs have room at a time
  int num_kv_heads;
  int first_head;  ///< of the queries' heads, as first_kv_head
};
inline constexpr int kPairTileBytes = 64 * 64 * 2;
/// Tiles of a head for a sequence.
int64_t num_pair_tiles(int64_t length);

/// The blocks of all sequences, those that see most keys first.
struct WorkList {
  int* num_items;      ///< one value
  int* num_of_length;  ///< scratch: [capacity + 1]
  Item* items;         ///< [capacity]
  int capacity;
  int64_t* first_pairs;  ///< scratch: [num_sequences]; null where no pairs are kept
  int* pairs_fit;        ///< one value: whether their tiles are at most pair_capacity
  int64_t pair_capacity;
};

/// The most blocks of `block` positions that `num_sequences` sequences of `num_tokens` in all have.
int64_t max_items(int64_t num_tokens, int64_t num_sequences, int block);

/// A list of blocks of `block` positions, to be made: sequence s is rows cu_seqlens[s] to
/// cu_seqlens[s + 1] of queries and keys, clamped to 0 .. num_tokens.
struct SequenceList {
  WorkList list;
  const int* cu_seqlens;
  int num_sequences;
  int num_tokens;
  int block;
};
/// As many sequences take no scratch memory.
inline constexpr int kFewSequences = 32;
void launch_list_sequences(const SequenceList& sequences, cudaStream_t stream);
/// One sequence of *length keys whose last num_queries positions are the queries. Lists nothing
/// unless num_queries <= *length <= capacity.
void launch_list_cached(const WorkList& list, const int* length, int num_queries, int capacity,
                        int block, cudaStream_t stream);

/// The queries of one rank of a ring, which shares the tokens as core/zigzag.h says: runs of
/// `chunk` neighbouring tokens, one after the other. Keys are those of all ranks, in the order of
/// tokens.
struct RingQueries {
  int num_runs;  ///< 0: there is no ring, and all tokens are queries
  int chunk;
  int row_length;
  int num_rows;
  int rank;
  int ring;

#ifdef __CUDACC__
  /// The first token of a run.
  __device__ int run_begin(int run) const {
    if (ring == 1) return 0;
    return run / 2 * row_length + (run % 2 == 0 ? rank : 2 * ring - 1 - rank) * chunk;
  }
  /// Where a token stands if the tokens of all ranks stand rank by rank.
  __device__ int64_t gathered_row(int token) const {
    if (ring == 1) return token;
    const int part = token % row_length / chunk;
    const int owner = part < ring ? part : 2 * ring - 1 - part;
    const int run = token / row_length * 2 + (part < ring ? 0 : 1);
    return (int64_t{owner} * 2 * num_rows + run) * chunk + token % chunk;
  }
#endif
};
/// `list.num_of_length` has max_ring_lengths(...) values.
int64_t max_ring_lengths(int64_t num_tokens, int block);
/// The most blocks of one rank's queries.
int64_t max_ring_items(const RingQueries& queries, int64_t num_sequences, int block);
/// The blocks of a rank's queries, sequences being of the tokens of all ranks.
void launch_list_ring(const WorkList& list, const RingQueries& queries, const int* cu_seqlens,
                      int num_sequences, int block, cudaStream_t stream);

/// For libraries that take where sequences begin in values, not rows.
struct SequenceOffsets {
  static constexpr int kNumSizes = 5;
  const int* cu_seqlens;
  int num_sequences;
  int num_tokens;
  int* lengths;                  ///< [num_sequences], clamped as above
  int64_t* offsets;              ///< [kNumSizes, num_sequences + 1]
  int64_t row_sizes[kNumSizes];  ///< what begins are multiplied by
};
void launch_sequence_offsets(const SequenceOffsets& params, cudaStream_t stream);

/// to [columns, rows] = from [rows, columns] transposed.
void launch_transpose(const float* from, float* to, int64_t rows, int64_t columns,
                      cudaStream_t stream);

struct Heads {
  int num_heads;
  int num_kv_heads;
  int head_size;
  int head_size_v;
  int window;        ///< 0: none
  int chunk;         ///< 0: none; of the exact forward kernel alone
  int64_t num_rows;  ///< T: the stride of lse and delta, [N, T]
  float scale;
};

/// delta [N, T]: each row's sum of o · grad_o, less grad_lse where that is not null.
struct DeltaParams {
  const void* o;
  const void* grad_o;
  const float* grad_lse;
  float* delta;
  int64_t num_rows;
  int num_heads;
  int head_size_v;
};
void launch_delta(const DeltaParams& params, DType dtype, cudaStream_t stream);
/// Makes a list too, beside the sums.
void launch_delta_and_list(const DeltaParams& params, const SequenceList& sequences, DType dtype,
                           cudaStream_t stream);

/// Plain FP32 arithmetic, any head sizes, F32 or BF16 values.
struct ExactParams {
  WorkList list;     ///< of blocks of kExactBlock
  RingQueries ring;  ///< for the gradients of keys, whose blocks are of all ranks' tokens
  Heads heads;
  const void* q;
  const void* k;
  const void* v;
  const void* grad_o;  ///< this and what follows: backward alone
  const float* delta;
  float* lse;  ///< written by the forward (where not null), read by the backward
  void* o;
  void* grad_q;
  void* grad_k;  ///< with a ring this and grad_v are F32, in the order of gathered_row
  void* grad_v;
};
inline constexpr int kExactBlock = 64;
void launch_exact_forward(const ExactParams& params, DType dtype, cudaStream_t stream);
void launch_exact_query_grad(const ExactParams& params, DType dtype, cudaStream_t stream);
void launch_exact_key_grads(const ExactParams& params, DType dtype, cudaStream_t stream);

/// BF16 on the tensor cores. Tensor maps are of heads, by boxes of kTensorBox rows; head sizes must
/// be multiples of 8 and fit (tensor_fits).
struct TensorParams {
  CUtensorMap q;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap grad_o;
  const int* num_items;
  const Item* items;  ///< of blocks of kTensorBlock
  int max_items;
  int num_sms;
  Heads heads;
  RingQueries ring;  ///< as in ExactParams
  const float* delta;
  float* lse;
  void* o;
  void* grad_q;
  void* grad_k;  ///< with a ring this and grad_v are F32, in the order of gathered_row
  void* grad_v;
  KeptPairs pairs;
  /// Forward alone: the list that the kernel is to make for itself (tensor_forward_lists), in place
  /// of num_items and items; cu_seqlens is null where there is none.
  SequenceList to_list;
};
inline constexpr int kTensorBlock = 128;
inline constexpr int kTensorBox = 64;
bool tensor_fits(int head_size, int head_size_v);
void launch_tensor_forward(const TensorParams& params, cudaStream_t stream);
/// Whether each thread block of the forward can make the list itself, in its shared memory.
bool tensor_forward_lists(const SequenceList& sequences);
/// Two kernels, so that every gradient is summed up by one thread block in a fixed order. The first
/// leaves pairs for launch_tensor_pair_sums where they are kept and fit; launch_tensor_query_grad,
/// which computes the scores again, returns at once then, and launch_tensor_pair_sums otherwise.
void launch_tensor_key_grads(const TensorParams& params, cudaStream_t stream);
void launch_tensor_pair_sums(const TensorParams& params, cudaStream_t stream);
void launch_tensor_query_grad(const TensorParams& params, cudaStream_t stream);
/// Whether one launch computes both with the same results and sooner, as with heads of up to 64
/// whose blocks of keys leave half of the GPU idle.
bool tensor_gradients_share(const TensorParams& params);
void launch_tensor_gradients(const TensorParams& params, cudaStream_t stream);

}  // namespace tessera::cuda::attention
