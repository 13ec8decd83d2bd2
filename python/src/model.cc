#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>

#include "config_box.h"
#include "model_box.h"

namespace tessera::python {
namespace {

using FloatArray = nb::ndarray<nb::numpy, float>;

FloatArray to_array(std::vector<float> values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<float>(std::move(values));
  const nb::capsule owner(kept,
                          [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return FloatArray(kept->data(), shape, owner);
}

DeviceChoice parse_device(const std::string& device) {
  if (device == "auto") return DeviceChoice::kAuto;
  if (device == "cpu") return DeviceChoice::kCpu;
  if (device == "cuda") return DeviceChoice::kCuda;
  throw ConfigError(fmt::format("device is \"{}\"; expected auto, cpu or cuda", device));
}

std::unique_ptr<ModelBox> load_model(const std::string& path, const std::string& device,
                                     bool allow_nonfinite) {
  const DeviceChoice choice = parse_device(device);
  const auto judge = allow_nonfinite ? NonFiniteWeights::kAllow : NonFiniteWeights::kRefuse;
  Turns none;
  return compute(none, [&] {
    return std::make_unique<ModelBox>(std::make_unique<LoadedModel>(path, choice, judge));
  });
}

std::unique_ptr<ModelBox> make_model(const ConfigBox& config) {
  Turns none;
  return compute(none, [&] {
    return read_settings([&] {
      return std::make_unique<ModelBox>(std::make_unique<LoadedModel>(config.settings()));
    });
  });
}

nb::tuple measure_loss(ModelBox& model, const TokenArrays& arrays) {
  const TokenRows rows = read_tokens(arrays, model.parts().config.vocab_size);
  int64_t num_valid = 0;
  const double total = compute(model.turns(), [&] {
    double sum = 0;
    for (const float loss : model.score(rows)) sum += loss;
    for (const int32_t label : rows.labels.values) num_valid += label != kNoLabel ? 1 : 0;
    return sum;
  });
  const double mean = num_valid > 0 ? total / static_cast<double>(num_valid)
                                    : std::numeric_limits<double>::quiet_NaN();
  return nb::make_tuple(mean, num_valid);
}

FloatArray measure_logprobs(ModelBox& model, const TokenArrays& arrays) {
  const TokenRows rows = read_tokens(arrays, model.parts().config.vocab_size);
  std::vector<float> scores = compute(model.turns(), [&] {
    std::vector<float> losses = model.score(rows);
    for (float& loss : losses) loss = -loss;
    return losses;
  });
  return to_array(std::move(scores), {static_cast<size_t>(rows.tokens.num_rows),
                                      static_cast<size_t>(rows.tokens.length)});
}

FloatArray measure_logits(ModelBox& model, const IntArray& array) {
  const int64_t vocab_size = model.parts().config.vocab_size;
  const Rows tokens = read_rows(array, "tokens");
  require(!tokens.values.empty(), "there are no tokens");
  for (const int32_t id : tokens.values) {
    require(id >= 0 && id < vocab_size,
            "tokens hold the id {}, outside the model's vocabulary of {}", id, vocab_size);
  }
  std::vector<float> logits = compute(model.turns(), [&] { return model.logits(tokens); });
  return to_array(std::move(logits),
                  {static_cast<size_t>(tokens.num_rows), static_cast<size_t>(tokens.length),
                   static_cast<size_t>(vocab_size)});
}

/// What a call of generate is told.
struct GenerateCall {
  std::vector<int32_t> prompt;
  GenerateOptions options;
};

Generated run_generator(ModelBox& model, const GenerateCall& call,
                        const std::function<bool(int32_t, double)>& on_token) {
  const ModelParts& parts = model.parts();
  const Tokenizer& tokenizer = parts.tokenizer;
  return compute(model.turns(), [&](const SignalMask& masked) {
    model.settle();
    Generator generator(parts.settings.model, parts.settings.train.dtype(), parts.backend,
                        parts.parameters, parts.experts);
    GenerateOptions options = call.options;
    if (options.vocab_size == 0) options.vocab_size = tokenizer.vocab_size();
    const bool has_end = tokenizer.vocab_size() > 0;
    SignalWatch signals;
    return generator.generate(call.prompt, has_end ? tokenizer.end_of_document() : -1, options,
                              [&](const GeneratedToken& token) {
                                signals.look(masked);
                                if (!on_token) return;
                                const nb::gil_scoped_acquire acquired;
                                on_token(token.id, token.log_probability);
                              });
  });
}

nb::dict generate(ModelBox& model, const IntArray& prompt, const GenerateOptions& options,
                  const std::function<bool(int32_t, double)>& on_token) {
  const Rows rows = read_rows(prompt, "prompt");
  require(rows.num_rows == 1 && rows.length > 0, "a prompt has one row of at least one token");
  const Generated generated = run_generator(model, {rows.values, options}, on_token);
  nb::list ids, log_probabilities;
  for (const GeneratedToken& token : generated.tokens) {
    ids.append(token.id);
    log_probabilities.append(token.log_probability);
  }
  nb::dict result;
  result["ids"] = ids;
  result["logprobs"] = log_probabilities;
  result["ended"] = generated.ended;
  return result;
}

nb::list list_parameters(nb::handle self) {
  const ModelBox& model = nb::cast<const ModelBox&>(self);
  compute(model.turns(), [&] {
    model.settle();
    model.parts().backend.device().synchronize();
  });
  nb::list list;
  for (const ModelParameter& parameter : model.parts().parameters.all()) {
    list.append(nb::make_tuple(parameter.spec.name, share(parameter.weight, self)));
  }
  return list;
}

}  // namespace

void add_model(nb::module_& module) {
  module.def("load_model", load_model, nb::arg("path"), nb::arg("device"),
             nb::arg("allow_nonfinite"));
  module.def("make_model", make_model, nb::arg("config"));
  nb::class_<ModelBox>(module, "Model")
      .def(
          "loss",
          [](ModelBox& model, IntArray tokens, std::optional<IntArray> labels,
             std::optional<IntArray> documents) {
            return measure_loss(model,
                                {std::move(tokens), std::move(labels), std::move(documents)});
          },
          nb::arg("tokens"), nb::arg("labels").none(), nb::arg("documents").none())
      .def(
          "logprobs",
          [](ModelBox& model, IntArray tokens, std::optional<IntArray> labels,
             std::optional<IntArray> documents) {
            return measure_logprobs(model,
                                    {std::move(tokens), std::move(labels), std::move(documents)});
          },
          nb::arg("tokens"), nb::arg("labels").none(), nb::arg("documents").none())
      .def("logits", measure_logits, nb::arg("tokens"))
      .def(
          "generate",
          [](ModelBox& model, const IntArray& prompt, int64_t max_tokens, double temperature,
             int64_t top_k, double top_p, uint64_t seed,
             const std::optional<std::function<bool(int32_t, double)>>& on_token) {
            const GenerateOptions options{.max_tokens = max_tokens,
                                          .temperature = temperature,
                                          .top_k = top_k,
                                          .top_p = top_p,
                                          .seed = seed};
            validate(options);
            return generate(model, prompt, options,
                            on_token ? *on_token : std::function<bool(int32_t, double)>());
          },
          nb::arg("prompt"), nb::kw_only(), nb::arg("max_tokens"), nb::arg("temperature"),
          nb::arg("top_k"), nb::arg("top_p"), nb::arg("seed"), nb::arg("on_token").none())
      .def("parameters", list_parameters)
      .def("save",
           [](const ModelBox& model, const std::string& root) {
             return compute(model.turns(), [&] { return model.save(root); });
           })
      .def("to_toml",
           [](const ModelBox& model) {
             Settings settings = model.parts().settings;
             return make_schema(settings).to_toml();
           })
      .def_prop_ro("path",
                   [](const ModelBox& model) {
                     return model.own() == nullptr ? "" : model.own()->path().string();
                   })
      .def_prop_ro("step",
                   [](const ModelBox& model) {
                     return model.own() == nullptr ? int64_t{0} : model.own()->step();
                   })
      .def_prop_ro("notes",
                   [](const ModelBox& model) {
                     return model.own() == nullptr ? std::vector<std::string>()
                                                   : model.own()->notes();
                   })
      .def_prop_ro("vocab_size",
                   [](const ModelBox& model) { return model.parts().config.vocab_size; })
      .def_prop_ro("device",
                   [](const ModelBox& model) { return model.parts().backend.device().name(); })
      .def("encode",
           [](const ModelBox& model, const std::string& text) {
             std::vector<int32_t> ids;
             model.parts().tokenizer.encode(text, ids);
             return ids;
           })
      .def("decode",
           [](const ModelBox& model, const std::vector<int32_t>& ids) {
             const std::string text = model.parts().tokenizer.decode_continuation(ids);
             return nb::bytes(text.data(), text.size());
           })
      .def_prop_ro("end_of_document",
                   [](const ModelBox& model) { return model.parts().tokenizer.end_of_document(); });
}

}  // namespace tessera::python
