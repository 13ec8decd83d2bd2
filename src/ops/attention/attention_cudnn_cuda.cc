// The only file that includes cuDNN's frontend, which is slow to compile.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <map>
#include <optional>
#include <tuple>

#include "core/error.h"
#include "core/memory.h"
#include "ops/attention/attention_cuda_kernels.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/attention/attention_operands.h"
#include "ops/cuda/check.h"
#include "ops/cuda/device_buffer.h"
#include "ops/workspace.h"

/// Where the frontend looks its functions up.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace tessera::cuda {
namespace {

namespace fe = cudnn_frontend;
namespace device = cuda::attention;
using tessera::attention::BackwardInput;
using tessera::attention::BackwardOutput;
using tessera::attention::Input;
using tessera::attention::Output;
using TensorPtr = std::shared_ptr<fe::graph::Tensor_attributes>;
using Pointers = std::unordered_map<int64_t, void*>;

/// The tensors of a graph.
enum Uid : int64_t {
  kQUid = 1,
  kKUid,
  kVUid,
  kOUid,
  kStatsUid,
  kGradOUid,
  kGradQUid,
  kGradKUid,
  kGradVUid,
  kLengthsUid,
  kQueryOffsets,   // of q's rows
  kQueryOffsetsV,  // of o's
  kKeyOffsets,     // of k's
  kKeyOffsetsV,    // of v's
  kStatsOffsets,
};
constexpr int kNumOffsets = 5;

/// Beyond so many sequences, most of what cuDNN launches would have nothing to do, since any of
/// them may be as long as all tokens.
constexpr int64_t kMaxSequences = 16;

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void check(fe::error_t status) {
  if (status.is_bad()) throw Failure("cuDNN: " + status.get_message());
}

struct Problem {
  bool backward = false;
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_size = 0;
  int64_t head_size_v = 0;
  int64_t window = 0;
  double scale = 0;

  auto operator<=>(const Problem&) const = default;
};

Problem problem_of(const AttentionSpec& spec, const KernelArgs& args, const Tensor& cu_seqlens,
                   bool backward) {
  return {.backward = backward,
          .num_tokens = args.in(Input::kQ).shape[0],
          .num_sequences = cu_seqlens.shape[0] - 1,
          .num_heads = spec.num_heads,
          .num_kv_heads = spec.num_kv_heads,
          .head_size = spec.head_size,
          .head_size_v = spec.head_size_v,
          .window = spec.window,
          .scale = spec.scale};
}

/// "" or why not.
std::string check_problem(const Problem& problem) {
  if (problem.num_sequences > kMaxSequences)
    return fmt::format("{} sequences are more than {}", problem.num_sequences, kMaxSequences);
  if (problem.head_size % 8 != 0 || problem.head_size_v % 8 != 0)
    return "head sizes that are no multiples of 8";
  return "";
}

/// Makes a graph of packed sequences: tensors are [sequences, heads, tokens, size] to cuDNN, with
/// where each sequence begins as an array of offsets.
class GraphMaker {
 public:
  explicit GraphMaker(const Problem& problem) : problem_(problem) {
    graph_.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT)
        .set_sm_version(90);
    const int64_t s = problem.num_sequences;
    lengths_ = graph_.tensor(fe::graph::Tensor_attributes()
                                 .set_uid(kLengthsUid)
                                 .set_dim({s, 1, 1, 1})
                                 .set_stride({1, 1, 1, 1})
                                 .set_data_type(fe::DataType_t::INT32));
    for (int64_t uid = kQueryOffsets; uid <= kStatsOffsets; ++uid)
      offsets_[uid] = graph_.tensor(fe::graph::Tensor_attributes()
                                        .set_uid(uid)
                                        .set_dim({s + 1, 1, 1, 1})
                                        .set_stride({1, 1, 1, 1})
                                        .set_data_type(fe::DataType_t::INT64));
  }

  fe::graph::Graph make() {
    problem_.backward ? add_backward() : add_forward();
    return std::move(graph_);
  }

 private:
  fe::graph::Tensor_attributes rows(Uid uid, Uid offsets, int64_t heads, int64_t size) const {
    const int64_t tokens = problem_.num_tokens;
    return fe::graph::Tensor_attributes()
        .set_uid(uid)
        .set_dim({problem_.num_sequences, heads, tokens, size})
        .set_stride({tokens * heads * size, size, heads * size, 1})
        .set_data_type(fe::DataType_t::BFLOAT16)
        .set_ragged_offset(offsets_.at(offsets));
  }
  /// [heads, tokens] as lse lies; to the backward [tokens, heads], the only order in which it sizes
  /// its scratch memory right.
  fe::graph::Tensor_attributes stats() const {
    const int64_t tokens = problem_.num_tokens;
    const int64_t heads = problem_.num_heads;
    const std::vector<int64_t> by_head = {tokens * heads, tokens, 1, 1};
    const std::vector<int64_t> by_token = {tokens * heads, 1, heads, 1};
    return fe::graph::Tensor_attributes()
        .set_uid(kStatsUid)
        .set_dim({problem_.num_sequences, heads, tokens, 1})
        .set_stride(problem_.backward ? by_token : by_head)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_ragged_offset(offsets_.at(kStatsOffsets));
  }
  static void set_output(const TensorPtr& tensor, fe::graph::Tensor_attributes like) {
    tensor->set_output(true)
        .set_uid(like.get_uid())
        .set_dim(like.get_dim())
        .set_stride(like.get_stride())
        .set_data_type(like.get_data_type())
        .set_ragged_offset(like.get_ragged_offset());
  }
  fe::graph::Tensor_attributes q(Uid uid) const {
    return rows(uid, kQueryOffsets, problem_.num_heads, problem_.head_size);
  }
  fe::graph::Tensor_attributes o(Uid uid) const {
    return rows(uid, kQueryOffsetsV, problem_.num_heads, problem_.head_size_v);
  }
  fe::graph::Tensor_attributes k(Uid uid) const {
    return rows(uid, kKeyOffsets, problem_.num_kv_heads, problem_.head_size);
  }
  fe::graph::Tensor_attributes v(Uid uid) const {
    return rows(uid, kKeyOffsetsV, problem_.num_kv_heads, problem_.head_size_v);
  }
  template <typename Options>
  void set_mask(Options& options) const {
    options.set_attn_scale(static_cast<float>(problem_.scale))
        .set_padding_mask(true)
        .set_seq_len_q(lengths_)
        .set_seq_len_kv(lengths_)
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
    if (problem_.window > 0 && problem_.window < problem_.num_tokens)
      options.set_diagonal_band_left_bound(static_cast<int>(problem_.window));
  }

  void add_forward() {
    fe::graph::SDPA_attributes options;
    set_mask(options);
    options.set_generate_stats(true);
    const auto results = graph_.sdpa(graph_.tensor(q(kQUid)), graph_.tensor(k(kKUid)),
                                     graph_.tensor(v(kVUid)), options);
    set_output(results[0], o(kOUid));
    set_output(results[1], stats());
  }

  void add_backward() {
    fe::graph::SDPA_backward_attributes options;
    set_mask(options);
    options.set_max_total_seq_len_q(problem_.num_tokens)
        .set_max_total_seq_len_kv(problem_.num_tokens);
    const auto results = graph_.sdpa_backward(
        graph_.tensor(q(kQUid)), graph_.tensor(k(kKUid)), graph_.tensor(v(kVUid)),
        graph_.tensor(o(kOUid)), graph_.tensor(o(kGradOUid)), graph_.tensor(stats()), options);
    set_output(results[0], q(kGradQUid));
    set_output(results[1], k(kGradKUid));
    set_output(results[2], v(kGradVUid));
  }

  Problem problem_;
  fe::graph::Graph graph_;
  TensorPtr lengths_;
  std::map<int64_t, TensorPtr> offsets_;
};

/// A graph with its plan, or why there is none.
struct Plan {
  std::optional<fe::graph::Graph> graph;
  int64_t workspace_bytes = 0;
  std::string why_not;
};

/// Throws Failure where cuDNN cannot be loaded.
void load_library() {
  if (fe::cudnn_dlhandle != nullptr) return;
  fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW);
  if (fe::cudnn_dlhandle == nullptr) throw Failure(std::string("cuDNN is not there: ") + dlerror());
}

}  // namespace

class CudnnAttention::Impl {
 public:
  explicit Impl(CudaContext& context) : context_(context), stream_(context.stream()) {
    try {
      load_library();
      if (fe::detail::create_handle(&handle_) != CUDNN_STATUS_SUCCESS)
        throw Failure("cuDNN could not be started");
      if (fe::detail::set_stream(handle_, stream_) != CUDNN_STATUS_SUCCESS)
        throw Failure("cuDNN refused the stream");
    } catch (const std::exception& error) {
      why_not_ = error.what();
    }
  }
  ~Impl() {
    if (handle_ != nullptr) fe::detail::destroy_handle(handle_);
  }

  bool run(const Problem& problem, const Tensor& cu_seqlens, Pointers pointers) {
    if (handle_ == nullptr) return false;
    Plan& plan = find_plan(problem);
    if (!plan.graph) {
      why_not_ = plan.why_not;
      return false;
    }
    add_lengths(problem, cu_seqlens, pointers);
    if (problem.backward) transpose_stats(problem, pointers);
    fe::error_t status =
        plan.graph->execute(handle_, pointers, scratch_->as<std::byte>() + plan_offset(problem));
    ensure(!status.is_bad(), "cuDNN's attention failed: {}", status.get_message());
    return true;
  }
  const std::string& why_not() const { return why_not_; }

 private:
  /// Lengths and offsets of the sequences, before the plan's own scratch memory.
  static constexpr int64_t kLengthsBytes = 4096;
  static_assert(kMaxSequences * 4 + kNumOffsets * (kMaxSequences + 1) * 8 + 64 <= kLengthsBytes);

  /// Where the plan's scratch memory begins; before it is, for the backward, lse by tokens.
  static int64_t plan_offset(const Problem& problem) {
    if (!problem.backward) return kLengthsBytes;
    return kLengthsBytes + align_up(problem.num_tokens * problem.num_heads * 4);
  }

  void transpose_stats(const Problem& problem, Pointers& pointers) {
    auto* const by_token = reinterpret_cast<float*>(scratch_->as<std::byte>() + kLengthsBytes);
    device::launch_transpose(static_cast<const float*>(pointers[kStatsUid]), by_token,
                             problem.num_heads, problem.num_tokens, stream_);
    pointers[kStatsUid] = by_token;
  }

  Plan& find_plan(const Problem& problem) {
    const auto found = plans_.find(problem);
    if (found != plans_.end()) return found->second;
    return plans_.emplace(problem, make_plan(problem)).first->second;
  }

  Plan make_plan(const Problem& problem) {
    Plan plan;
    plan.why_not = check_problem(problem);
    if (!plan.why_not.empty()) return plan;
    try {
      fe::graph::Graph graph = GraphMaker(problem).make();
      check(graph.validate());
      check(graph.build_operation_graph(handle_));
      check(graph.create_execution_plans({fe::HeurMode_t::A}));
      check(graph.check_support());
      check(graph.build_plans());
      plan.workspace_bytes = graph.get_workspace_size();
      plan.graph = std::move(graph);
    } catch (const std::exception& error) {
      plan.why_not = error.what();
      return plan;
    }
    const int64_t needed = plan_offset(problem) + plan.workspace_bytes;
    if (!scratch_ ||
        std::ssize(std::span(scratch_->as<std::byte>(), scratch_->num_bytes())) < needed) {
      cuda::check(cudaStreamSynchronize(stream_));
      scratch_.reset();
      scratch_.emplace(needed, "cuDNN");
      context_.change_version();  // recorded work has the former's address
    }
    return plan;
  }

  void add_lengths(const Problem& problem, const Tensor& cu_seqlens, Pointers& pointers) {
    auto* const offsets = scratch_->as<int64_t>();
    auto* const lengths =
        reinterpret_cast<int32_t*>(offsets + kNumOffsets * (problem.num_sequences + 1));
    const int64_t wide = problem.num_heads;
    const int64_t narrow = problem.num_kv_heads;
    device::launch_sequence_offsets(
        {.cu_seqlens = cu_seqlens.as<int32_t>(),
         .num_sequences = static_cast<int>(problem.num_sequences),
         .num_tokens = static_cast<int>(problem.num_tokens),
         .lengths = lengths,
         .offsets = offsets,
         .row_sizes = {wide * problem.head_size, wide * problem.head_size_v,
                       narrow * problem.head_size, narrow * problem.head_size_v,
                       problem.backward ? wide : 1}},
        stream_);
    pointers[kLengthsUid] = lengths;
    for (int i = 0; i < kNumOffsets; ++i)
      pointers[kQueryOffsets + i] = offsets + i * (problem.num_sequences + 1);
  }

  CudaContext& context_;
  cudaStream_t stream_;
  cudnnHandle_t handle_ = nullptr;
  std::string why_not_;
  std::map<Problem, Plan> plans_;
  std::optional<DeviceBuffer> scratch_;
};

CudnnAttention::CudnnAttention(CudaContext& context) : impl_(std::make_unique<Impl>(context)) {}
CudnnAttention::~CudnnAttention() = default;
const std::string& CudnnAttention::why_not() const {
  return impl_->why_not();
}

bool CudnnAttention::run_forward(const AttentionSpec& spec, const KernelArgs& args) {
  const Tensor& cu_seqlens = args.in(Input::kForwardCuSeqlens);
  return impl_->run(problem_of(spec, args, cu_seqlens, false), cu_seqlens,
                    {{kQUid, args.in(Input::kQ).data},
                     {kKUid, args.in(Input::kK).data},
                     {kVUid, args.in(Input::kV).data},
                     {kOUid, args.out(Output::kO).data},
                     {kStatsUid, args.out(Output::kLse).data}});
}

bool CudnnAttention::run_backward(const AttentionSpec& spec, const KernelArgs& args) {
  if (std::ssize(args.inputs) > BackwardInput::kGradLse)
    return false;  // cuDNN has no gradient of it
  const Tensor& cu_seqlens = args.in(BackwardInput::kBackwardCuSeqlens);
  return impl_->run(problem_of(spec, args, cu_seqlens, true), cu_seqlens,
                    {{kQUid, args.in(Input::kQ).data},
                     {kKUid, args.in(Input::kK).data},
                     {kVUid, args.in(Input::kV).data},
                     {kOUid, args.in(BackwardInput::kSavedO).data},
                     {kStatsUid, args.in(BackwardInput::kSavedLse).data},
                     {kGradOUid, args.in(BackwardInput::kGradO).data},
                     {kGradQUid, args.out(BackwardOutput::kGradQ).data},
                     {kGradKUid, args.out(BackwardOutput::kGradK).data},
                     {kGradVUid, args.out(BackwardOutput::kGradV).data}});
}

}  // namespace tessera::cuda
