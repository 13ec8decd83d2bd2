#include "ops/scaled_rows.h"

namespace tessera {

bool has_scaled_rows(const Format& format) {
  const ScaleLayout& scale = format.scale;
  const bool of_rows = scale.kind == ScaleLayout::Kind::kRow ||
                       (scale.kind == ScaleLayout::Kind::kBlock && scale.rows == 1);
  return of_rows && (format.element == DType::kE4M3 || format.element == DType::kE5M2);
}

ValueType values_of_scaled_rows(const Operator& op, const ValueType& rows, DType dtype) {
  check_shape(op, has_scaled_rows(rows.format()) && rows.dtype == DType::kE4M3,
              "rows must be e4m3 with scales of their own, got {}", rows.to_string());
  ValueType values = with_dtype(rows, dtype);
  values.scale = {};
  return values;
}

bool takes_scaled_rows(const Format& format) {
  return takes_f16(format) || has_scaled_rows(format);
}

Tensor elements_of(const Tensor& rows) {
  Tensor elements = rows;
  elements.scale = {};
  return elements;
}

Tensor row_scales_of(const Tensor& rows) {
  ensure(has_scaled_rows({rows.dtype, rows.scale}), "{} with scales '{}' has none of its rows",
         dtype_name(rows.dtype), rows.scale.to_string());
  return scales_of(rows);
}

int64_t columns_of_scale(const ScaleLayout& scale, int64_t num_columns) {
  return scale.kind == ScaleLayout::Kind::kBlock ? scale.columns : num_columns;
}

}  // namespace tessera
