#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "arrays.h"
#include "data/token_file.h"
#include "data/token_file_writer.h"
#include "tokenizer/tokenizer.h"

namespace tessera::python {
namespace {

/// A token file that grows document by document.
class WriterBox {
 public:
  WriterBox(const std::string& prefix, int64_t vocab_size) : vocab_size_(vocab_size) {
    writer_.emplace(prefix, vocab_size);
  }

  void add(const IntArray& ids) {
    const Rows rows = read_rows(ids, "a document's ids");
    require(rows.num_rows == 1, "a document is one row of ids, found {}", rows.num_rows);
    for (const int32_t id : rows.values) {
      require(id >= 0 && id < vocab_size_,
              "document {} holds the id {}, outside the vocabulary of {}", writer().num_documents(),
              id, vocab_size_);
    }
    append(rows.values);
  }
  void add_text(const Tokenizer& tokenizer, const std::string& text) {
    std::vector<int32_t> ids;
    tokenizer.encode(text, ids);
    ids.push_back(tokenizer.end_of_document());
    append(ids);
  }
  /// Throws UserError behind abandon().
  TokenFileWriter& writer() {
    require(writer_.has_value(), "the token file was given up; open it anew");
    return *writer_;
  }
  /// Gives up what was written and lets others write there.
  void abandon() { writer_.reset(); }

 private:
  void append(std::span<const int32_t> ids) {
    writer().append(ids);
    writer().end_document();
  }

  int64_t vocab_size_;
  std::optional<TokenFileWriter> writer_;
};

}  // namespace

void add_data(nb::module_& module) {
  nb::class_<Tokenizer>(module, "Tokenizer")
      .def("encode",
           [](const Tokenizer& self, const std::string& text) {
             std::vector<int32_t> ids;
             self.encode(text, ids);
             return ids;
           })
      .def("decode",
           [](const Tokenizer& self, const std::vector<int32_t>& ids) {
             const std::string text = self.decode(ids);
             return nb::bytes(text.data(), text.size());
           })
      .def_prop_ro("name", &Tokenizer::name)
      .def_prop_ro("vocab_size", &Tokenizer::vocab_size)
      .def_prop_ro("end_of_document", &Tokenizer::end_of_document);
  module.def(
      "make_tokenizer",
      [](const std::string& path, const std::string& end_of_document) {
        return make_tokenizer({.path = path, .end_of_document = end_of_document});
      },
      nb::arg("path"), nb::arg("end_of_document"));
  nb::class_<WriterBox>(module, "TokenWriter")
      .def(nb::init<const std::string&, int64_t>(), nb::arg("prefix"), nb::arg("vocab_size"))
      .def("add", &WriterBox::add, nb::arg("ids"))
      .def("add_text", &WriterBox::add_text, nb::arg("tokenizer"), nb::arg("text"))
      .def("abandon", &WriterBox::abandon)
      .def("finish", [](WriterBox& self) { self.writer().finish(); })
      .def_prop_ro("num_tokens", [](WriterBox& self) { return self.writer().num_tokens(); })
      .def_prop_ro("num_documents", [](WriterBox& self) { return self.writer().num_documents(); });
}

}  // namespace tessera::python
