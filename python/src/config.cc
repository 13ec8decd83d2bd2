#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "config_box.h"
#include "python.h"
#include "train/state/load_settings.h"

namespace tessera::python {

ConfigBox::ConfigBox(const ConfigSources& sources)
    : sources_(sources), schema_(make_schema(settings_)) {
  read_settings([&] {
    // Kept, so that a copy, here or elsewhere, is the same whatever became of the file.
    if (!sources.file.empty() && sources.text.empty())
      sources_.text = ConfigSchema::read_file(sources.file) + "\n";
    if (!sources_.text.empty())
      schema_.load_toml_text(sources_.text, sources.file.empty() ? "the TOML text" : sources.file);
    for (const auto& [key, value] : sources.overrides) schema_.override_value(key, value, key);
    load_settings(schema_, settings_, "", {});
  });
}

void add_config(nb::module_& module) {
  nb::class_<ConfigBox>(module, "Config")
      .def(
          "__init__",
          [](ConfigBox* self, std::string file, std::string text,
             std::vector<std::pair<std::string, std::string>> overrides) {
            new (self) ConfigBox({std::move(file), std::move(text), std::move(overrides)});
          },
          nb::arg("file"), nb::arg("text"), nb::arg("overrides"))
      .def("sources",
           [](const ConfigBox& self) {
             return nb::make_tuple(self.sources().file, self.sources().text,
                                   self.sources().overrides);
           })
      .def("to_toml", [](const ConfigBox& self) { return self.schema().to_toml(); })
      .def("to_json", [](const ConfigBox& self) { return self.schema().to_json(); })
      .def("help", [](const ConfigBox& self) { return self.schema().help_text(); })
      .def("check_model",
           [](const ConfigBox& self) { read_settings([&] { validate(self.settings().model); }); });
}

}  // namespace tessera::python
