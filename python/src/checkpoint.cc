#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "python.h"
#include "train/state/checkpointing.h"

namespace tessera::python {
namespace {

/// An open checkpoint.
class CheckpointBox {
 public:
  CheckpointBox(const std::string& path, bool verify)
      : opened_(open_checkpoint(path, verify ? Verify::kChecksums : Verify::kSizes)) {}

  const CheckpointReader& reader() const { return opened_.reader; }
  const std::vector<std::string>& skipped() const { return opened_.skipped; }
  Turns& turns() { return turns_; }

  const TensorRecord& record(const std::string& name) const {
    const auto& tensors = reader().manifest().tensors;
    const auto found = tensors.find(name);
    if (found == tensors.end()) throw nb::key_error(name.c_str());
    return found->second;
  }

 private:
  OpenedCheckpoint opened_;
  Turns turns_;
};

/// The part of a tensor that begins at `offset`, as it is stored, or with `bits` BF16 as U16.
SharedArray read_part(CheckpointBox& self, const std::string& name,
                      const std::vector<int64_t>& offset, const std::vector<int64_t>& extent,
                      bool bits) {
  const TensorRecord& record = self.record(name);
  auto* memory = new OwnedTensor(record.dtype, Shape(extent), "a part of a checkpoint");
  const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<OwnedTensor*>(p); });
  if (memory->get().num_elements() > 0) {
    compute(self.turns(), [&] { self.reader().load_part(name, Shape(offset), memory->get()); });
  }
  Tensor part = memory->get();
  if (bits) part.dtype = DType::kU16;
  return share(part, owner);
}

nb::list list_tensors(const CheckpointBox& self) {
  nb::list list;
  for (const auto& [name, record] : self.reader().manifest().tensors) {
    nb::list shape;
    for (const int64_t extent : record.shape.dims()) shape.append(extent);
    list.append(
        nb::make_tuple(name, group_name(record.group), dtype_name(record.dtype), nb::tuple(shape)));
  }
  return list;
}

}  // namespace

void add_checkpoint(nb::module_& module) {
  nb::class_<CheckpointBox>(module, "Checkpoint")
      .def(
          "__init__",
          [](CheckpointBox* self, const std::string& path, bool verify) {
            const nb::gil_scoped_release released;
            new (self) CheckpointBox(path, verify);
          },
          nb::arg("path"), nb::arg("verify"))
      .def("tensors", list_tensors)
      .def("read", read_part, nb::arg("name"), nb::arg("offset"), nb::arg("extent"),
           nb::arg("bits"))
      .def_prop_ro("path", [](const CheckpointBox& self) { return self.reader().path().string(); })
      .def_prop_ro("step", [](const CheckpointBox& self) { return self.reader().step(); })
      .def_prop_ro("state", [](const CheckpointBox& self) { return self.reader().state(); })
      .def_prop_ro("skipped", &CheckpointBox::skipped);
}

}  // namespace tessera::python
