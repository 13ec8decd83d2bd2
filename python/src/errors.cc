#include <filesystem>
#include <new>

#include "core/out_of_memory.h"
#include "python.h"
#include "train/trainer/trainer.h"

namespace tessera::python {
namespace {

/// Makes tessera.NAME, a kind of `base` and, where it is given, of one of Python's own.
PyObject* make_error(nb::module_& module, const char* name, const char* doc, PyObject* base,
                     PyObject* own = nullptr) {
  const nb::object bases =
      own == nullptr ? nb::borrow(base) : nb::make_tuple(nb::borrow(base), nb::borrow(own));
  const std::string path = std::string("tessera.") + name;
  const nb::object error =
      nb::steal(PyErr_NewExceptionWithDoc(path.c_str(), doc, bases.ptr(), nullptr));
  if (!error.is_valid()) throw nb::python_error();
  module.attr(name) = error;
  return error.ptr();  // the module keeps it
}

/// The types that C++'s exceptions become; they live as long as the module, which is never
/// unloaded.
struct ErrorTypes {
  PyObject* error = nullptr;
  PyObject* config = nullptr;
  PyObject* stopped = nullptr;
  PyObject* memory = nullptr;
  PyObject* internal = nullptr;
};

void translate(const std::exception_ptr& thrown, void* payload) {
  const auto& types = *static_cast<const ErrorTypes*>(payload);
  try {
    std::rethrow_exception(thrown);
  } catch (const ConfigError& error) {
    PyErr_SetString(types.config, error.what());
  } catch (const TrainingStopped& error) {
    PyErr_SetString(types.stopped, error.what());
  } catch (const OutOfMemory& error) {
    PyErr_SetString(types.memory, error.what());
  } catch (const UserError& error) {
    PyErr_SetString(types.error, error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    PyErr_SetString(types.error, error.what());
  } catch (const InternalError& error) {
    PyErr_SetString(types.internal, error.what());
  }
}

}  // namespace

void add_errors(nb::module_& module) {
  auto* types = new ErrorTypes;
  types->error = make_error(module, "Error",
                            "What the user can mend: a file, a setting, an argument. The message "
                            "says what was found, what was expected and what to do.",
                            PyExc_Exception);
  types->config = make_error(module, "ConfigError", "A setting that is refused.", types->error,
                             PyExc_ValueError);
  types->stopped = make_error(module, "TrainingStopped",
                              "Training cannot go on: the loss or a gradient is NaN or infinite. "
                              "Nothing was updated.",
                              types->error);
  types->memory = make_error(module, "OutOfMemoryError", "Memory that the device does not have.",
                             types->error, PyExc_MemoryError);
  types->internal =
      make_error(module, "InternalError", "A fault of Tessera itself.", PyExc_RuntimeError);
  nb::register_exception_translator(translate, types);
}

}  // namespace tessera::python
