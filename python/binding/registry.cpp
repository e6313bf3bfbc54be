// What the library has: the listings of codecs, memories and exchanges, and settings checked against them.
#include "registry.hpp"

#include <cmath>
#include <cstdlib>

namespace binding {

namespace {

// ---- names -------------------------------------------------------------------------------------------------------

struct Name {
    const char *name;
    int value;
};
constexpr Name dtypes[] = {{"float32", SID_F32}, {"float16", SID_F16}, {"bfloat16", SID_BF16}};
constexpr Name bodies[] = {{"float32", SID_F32}, {"float16", SID_F16}, {"bfloat16", SID_BF16}, {"int8", SID_I8}};
constexpr Name isas[] = {{"auto", SID_ISA_AUTO},
                         {"base", SID_ISA_BASE},
                         {"avx2", SID_ISA_AVX2},
                         {"avx512", SID_ISA_AVX512},
                         {"avx512vbmi2", SID_ISA_AVX512_VBMI2}};
constexpr Name traits[] = {{"linear", SID_LINEAR},
                           {"lossless", SID_LOSSLESS},
                           {"stochastic", SID_STOCHASTIC},
                           {"unbiased", SID_UNBIASED},
                           {"sparse", SID_SPARSE},
                           {"feedback", SID_FEEDBACK},
                           {"momentum", SID_MOMENTUM},
                           {"vote", SID_VOTE},
                           {"shaped", SID_SHAPED},
                           {"signs", SID_SIGNS},
                           {"reductions", SID_SEVERAL_REDUCTIONS}};
constexpr const char *kinds[] = {"real", "int", "choice"};

template <size_t N> int value_of(const Name (&names)[N], const string &name, const char *what) {
    std::vector<string> valid;
    for (const Name &n : names) {
        if (name == n.name) return n.value;
        valid.emplace_back(n.name);
    }
    fail(SID_E_ARG, string("unknown ") + what + " '" + name + "'; there are: " + joined(valid));
}

template <size_t N> string name_of(const Name (&names)[N], int value) {
    for (const Name &n : names)
        if (n.value == value) return n.name;
    return "?";
}

sid_isa isa_of(const std::optional<string> &asked) {
    if (asked) return static_cast<sid_isa>(value_of(isas, *asked, "isa"));
    const char *env = std::getenv("SIDCOMP_ISA");
    return static_cast<sid_isa>(env && *env ? value_of(isas, env, "SIDCOMP_ISA") : SID_ISA_AUTO);
}

// ---- listings ----------------------------------------------------------------------------------------------------

py::object param_value(const sid_param &p, double value) {
    if (p.kind == SID_CHOICE) return py::str(p.choices[static_cast<size_t>(value)]);
    if (p.kind == SID_INT) return py::int_(static_cast<int64_t>(value));
    return py::float_(value);
}

py::dict describe(const sid_info &c) {
    py::list parameters, names;
    for (const sid_param *p = c.params; p != c.params + c.n_params; p++) {
        py::dict row;
        py::list choices;
        for (const char *const *s = p->choices; s && *s; s++) choices.append(*s);
        row["name"] = p->name;
        row["kind"] = kinds[p->kind];
        row["default"] = param_value(*p, p->dflt);
        row["min"] = p->min;
        row["max"] = p->max;
        row["unit"] = p->unit;
        row["choices"] = choices;
        row["doc"] = p->doc;
        parameters.append(row);
    }
    for (const Name &t : traits)
        if (c.traits & static_cast<uint32_t>(t.value)) names.append(t.name);
    py::dict d;
    d["name"] = c.name;
    d["family"] = c.family;
    d["paper"] = c.paper;
    d["doc"] = c.doc;
    d["wire_id"] = c.wire_id;
    d["memory"] = c.memory ? c.memory : "residual";
    d["traits"] = names;
    d["cuda"] = sid_has_cuda(&c) != 0;
    d["parameters"] = parameters;
    return d;
}

py::list describe_all(const sid_info *(*at)(uint32_t)) {
    py::list all;
    for (uint32_t i = 0; const sid_info *c = at(i); i++) all.append(describe(*c));
    return all;
}

// ---- settings ----------------------------------------------------------------------------------------------------

const sid_param *param_of(const sid_info &c, const string &name) {
    for (const sid_param *p = c.params; p != c.params + c.n_params; p++)
        if (name == p->name) return p;
    return nullptr;
}

// A setting as the core takes it. The range is the core's to check; here only what a double cannot say.
double setting_value(const sid_param &p, const py::handle &given) {
    const auto refuse = [&](const string &want) {
        fail(SID_E_PARAM,
             string("parameter '") + p.name + "' must be " + want + ", not " + py::repr(given).cast<string>());
    };
    if (p.kind == SID_CHOICE) {
        std::vector<string> valid;
        for (const char *const *s = p.choices; *s; s++) {
            if (py::isinstance<py::str>(given) && given.cast<string>() == *s) return static_cast<double>(s - p.choices);
            valid.emplace_back(*s);
        }
        refuse("one of: " + joined(valid));
    }
    const char *want = p.kind == SID_INT ? "an integer" : "a number";
    if (PyBool_Check(given.ptr()) || py::isinstance<py::str>(given)) refuse(want);
    const double value = PyFloat_AsDouble(given.ptr());
    if (PyErr_Occurred()) {
        PyErr_Clear();
        refuse(want);
    }
    if (std::isnan(value) || (p.kind == SID_INT && value != std::floor(value))) refuse(want);
    return value;
}

string unknown_parameter(const std::vector<const sid_info *> &from, const string &name) {
    string text = "unknown parameter '" + name + "'";
    for (const sid_info *i : from) {
        std::vector<string> v;
        for (const sid_param *p = i->params; p != i->params + i->n_params; p++) v.emplace_back(p->name);
        text += string("; '") + i->name + "' takes: " + joined(v);
    }
    return text;
}

} // namespace

sid_dtype dtype_of(const string &name) { return static_cast<sid_dtype>(value_of(dtypes, name, "dtype")); }
string name_of_dtype(sid_dtype dtype) { return name_of(dtypes, dtype); }
string name_of_body(sid_dtype dtype) { return name_of(bodies, dtype); }

const sid_info &find(const sid_info *(*at)(uint32_t), const string &name, const char *what) {
    std::vector<string> valid;
    for (uint32_t i = 0; const sid_info *c = at(i); i++) {
        if (name == c->name) return *c;
        valid.emplace_back(c->name);
    }
    fail(SID_E_PARAM, string("unknown ") + what + " '" + name + "'; there are: " + joined(valid));
}

Settings::Settings(const std::vector<const sid_info *> &from, const py::dict &settings) {
    names_.reserve(settings.size());
    for (const auto &[key, value] : settings) {
        names_.push_back(py::str(key));
        const sid_param *p = nullptr;
        for (size_t i = 0; !p && i < from.size(); i++) p = param_of(*from[i], names_.back());
        if (!p) fail(SID_E_PARAM, unknown_parameter(from, names_.back()));
        values.push_back({names_.back().c_str(), setting_value(*p, value)});
    }
}

Config::Config(const string &codec, const string &memory, int64_t count, const string &dtype, const py::dict &settings,
               const std::optional<string> &isa, const sid_info *exchange)
    : codec_(find(sid_codec_at, codec, "codec")), memory_(find(sid_memory_at, memory, "memory")),
      given_(exchange ? std::vector{exchange, &codec_, &memory_} : std::vector{&codec_, &memory_}, settings) {
    if (count < 0) fail(SID_E_ARG, "n is " + std::to_string(count) + ": it must not be negative");
    it.codec = codec_.name;
    it.memory = memory_.name;
    it.n = static_cast<uint64_t>(count);
    it.dtype = dtype_of(dtype);
    it.isa = isa_of(isa);
    it.settings = given_.values.data();
    it.n_settings = static_cast<uint32_t>(given_.values.size());
}

void bind_registry(py::module_ &m) {
    m.def("codecs", [] { return describe_all(sid_codec_at); });
    m.def("memories", [] { return describe_all(sid_memory_at); });
    m.def("exchanges", [] { return describe_all(sid_exchange_at); });
    m.def("isa_best", [] { return name_of(isas, sid_isa_best()); });
}

} // namespace binding
