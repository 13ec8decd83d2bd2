#include "ops/scale_rows/scale_rows.h"

#include "ops/storage.h"

namespace tessera {

ScaleRows::ScaleRows(DType weight, MasterKind beside, int64_t columns)
    : weight_(weight), beside_(beside), columns_(columns) {
  require(is_storage(weight) && columns >= 0, "scale_rows: rows of {} elements in {}", columns,
          dtype_name(weight));
  require(beside == MasterKind::kNone || weight == DType::kBF16,
          "scale_rows: a master of {} beside a weight in {}", master_suffix(beside),
          dtype_name(weight));
}

std::string ScaleRows::attributes() const {
  return beside_ == MasterKind::kNone ? fmt::format("weight={}", dtype_name(weight_))
                                      : fmt::format("beside={}", master_suffix(beside_));
}

std::vector<ValueType> ScaleRows::infer(std::span<const ValueType> inputs) const {
  check_shape(*this, inputs.size() == 1, "takes factors, got {} inputs", inputs.size());
  const ValueType& factors = inputs[kFactors];
  check_shape(*this, factors.dtype == DType::kF32 && factors.shape.rank() == 1 && !factors.ragged(),
              "factors must be f32 [rows], got {}", factors.to_string());
  const Shape shape = {factors.shape[0], columns_};
  const bool alone = beside_ == MasterKind::kNone;
  std::vector<ValueType> outputs = {{alone ? weight_ : master_dtype(beside_), shape}};
  if (!alone) outputs.push_back({DType::kBF16, shape});
  return outputs;
}

OperatorPtr make_scale_rows(DType weight, MasterKind beside, int64_t columns) {
  return std::make_shared<ScaleRows>(weight, beside, columns);
}

}  // namespace tessera
