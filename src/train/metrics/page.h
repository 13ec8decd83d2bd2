#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

/// Bytes that are not valid UTF-8 become the replacement sign.
std::string valid_utf8(std::string_view text);

/// Text for HTML: the five special characters become entities, bytes that are not valid UTF-8 the
/// replacement sign.
std::string escape_html(std::string_view text);

/// JSON that may stand in a script element: no text in it ends that.
std::string escape_json(std::string_view json);

/// Replaces each "{{name}}" of a page; text that is put in is not searched again. Throws
/// InternalError for a name without a value.
std::string fill_page(std::string_view page,
                      const std::vector<std::pair<std::string_view, std::string>>& values);

}  // namespace tessera
