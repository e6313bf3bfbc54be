// Names and settings: from what Python says to what the core takes.
#ifndef SID_BINDING_REGISTRY_HPP
#define SID_BINDING_REGISTRY_HPP

#include "common.hpp"

namespace binding {

// dtypes by their names in torch. Raises ArgumentError, which lists the names.
sid_dtype dtype_of(const string &name);
string name_of_dtype(sid_dtype dtype);
string name_of_body(sid_dtype dtype); // of a linear codec's body

// The entry of that name in a table such as sid_codec_at's; what: "codec", "memory" or "exchange", for the message.
const sid_info &find(const sid_info *(*at)(uint32_t), const string &name, const char *what);

// Settings by name, as the core takes them; `from` are the tables that may know them.
class Settings {
  public:
    Settings(const std::vector<const sid_info *> &from, const py::dict &settings);
    std::vector<sid_setting> values;

  private:
    std::vector<string> names_; // keeps the settings' names alive
};

// What to compress, and how: `exchange`, if there is one, may know settings too.
class Config {
  public:
    Config(const string &codec, const string &memory, int64_t count, const string &dtype, const py::dict &settings,
           const std::optional<string> &isa, const sid_info *exchange = nullptr);
    sid_config it{};

  private:
    const sid_info &codec_, &memory_;
    const Settings given_;
};

} // namespace binding

#endif
