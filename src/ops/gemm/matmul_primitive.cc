#include "ops/gemm/matmul_primitive.h"

namespace tessera {
namespace {

constexpr int64_t kAny = DNNL_RUNTIME_DIM_VAL;

dnnl::memory::data_type data_type(DType dtype) {
  return dtype == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

/// The one place that differs between oneDNN 2 and 3, which dropped operation descriptors.
dnnl::matmul::primitive_desc make_desc(const dnnl::memory::desc& a, const dnnl::memory::desc& b,
                                       const dnnl::memory::desc& c,
                                       const dnnl::primitive_attr& attributes,
                                       const dnnl::engine& engine) {
  constexpr bool kAllowEmpty = true;
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul::primitive_desc(engine, a, b, c, attributes, kAllowEmpty);
#else
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, engine, kAllowEmpty);
#endif
}

dnnl::primitive_attr attributes_of(bool accumulate) {
  dnnl::primitive_attr attributes;
  if (accumulate) {
    dnnl::post_ops post_ops;
    post_ops.append_sum(1.0F);
    attributes.set_post_ops(post_ops);
  }
  return attributes;
}

}  // namespace

dnnl::memory::desc MatrixLayout::desc(DType dtype) const {
  const auto strides =
      transposed ? dnnl::memory::dims{1, leading_dim} : dnnl::memory::dims{leading_dim, 1};
  return {{rows, cols}, data_type(dtype), strides};
}

dnnl::matmul make_matmul(const MatmulKind& kind, const dnnl::engine& engine) {
  const MatrixLayout a{kAny, kAny, kAny, kind.transpose_a};
  const MatrixLayout b{kAny, kAny, kAny, kind.transpose_b};
  const MatrixLayout c{kAny, kAny, kAny, false};
  const dnnl::matmul::primitive_desc desc =
      make_desc(a.desc(kind.input_type), b.desc(kind.input_type), c.desc(DType::kF32),
                attributes_of(kind.accumulate), engine);
  return desc ? dnnl::matmul(desc) : dnnl::matmul();
}

}  // namespace tessera
