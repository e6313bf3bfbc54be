// The C core for Python: sidcomp/_core.pyi is this file's interface. Pointers and streams are integers, no torch
// header is included, so one build serves every torch. Calls that touch gradients release the GIL.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "sidcomp.h"

namespace py = pybind11;
using std::string;

namespace {

// ---- errors ------------------------------------------------------------------------------------------------------

struct ErrorClass {
    const char *name;
    sid_status status;
    const char *doc;
    PyObject **builtin; // also derives from
    PyObject *type;     // owned for ever: an exception may outlive the module
};

ErrorClass error_classes[] = {
    {"ArgumentError", SID_E_ARG, "An argument of the call is wrong.", &PyExc_ValueError, nullptr},
    {"ParameterError", SID_E_PARAM, "A codec's or memory's name or parameter is unknown or out of range.",
     &PyExc_ValueError, nullptr},
    {"SpaceError", SID_E_SPACE, "A block of memory is smaller than what was asked for.", &PyExc_ValueError, nullptr},
    {"CorruptPayloadError", SID_E_CORRUPT, "Payload bytes are not what an encoder writes.", nullptr, nullptr},
    {"MismatchError", SID_E_MISMATCH, "A sound payload, but of another plan, group or step.", nullptr, nullptr},
    {"UnsupportedError", SID_E_UNSUPPORTED, "This build, device or combination cannot do it.",
     &PyExc_NotImplementedError, nullptr},
    {"DeviceError", SID_E_DEVICE, "A CUDA call failed.", &PyExc_RuntimeError, nullptr},
};

void add_errors(py::module_ &m) {
    const auto add = [&](const char *name, const char *doc, const py::tuple &bases, int status) {
        py::dict members;
        members["status"] = status;
        PyObject *type =
            PyErr_NewExceptionWithDoc((string("sidcomp._core.") + name).c_str(), doc, bases.ptr(), members.ptr());
        if (!type) throw py::error_already_set();
        m.add_object(name, py::reinterpret_borrow<py::object>(type));
        return type;
    };
    const py::handle base = add("SidcompError", "Base of every error of the core; `status` is the C status.",
                                py::make_tuple(py::handle(PyExc_Exception)), 0);
    for (ErrorClass &e : error_classes) {
        py::tuple bases = py::make_tuple(base);
        if (e.builtin) bases = py::make_tuple(base, py::handle(*e.builtin));
        e.type = add(e.name, e.doc, bases, e.status);
    }
}

[[noreturn]] void fail(int status, const string &text, std::optional<uint32_t> culprit = {}) {
    for (const ErrorClass &e : error_classes) {
        if (e.status != status) continue;
        py::object error = py::reinterpret_borrow<py::object>(e.type)(text);
        if (culprit) error.attr("culprit") = *culprit;
        PyErr_SetObject(e.type, error.ptr());
        throw py::error_already_set();
    }
    throw std::runtime_error("sidcomp: status " + std::to_string(status) + ": " + text);
}

void check(sid_status s, const sid_error &err = {}, std::optional<uint32_t> culprit = {}) {
    if (s != SID_OK) fail(s, err.text[0] ? err.text : sid_status_text(s), culprit);
}

string joined(const std::vector<string> &names) {
    string text;
    for (const string &n : names) text += (text.empty() ? "" : ", ") + n;
    return text.empty() ? "nothing" : text;
}

// ---- names -------------------------------------------------------------------------------------------------------

struct Name {
    const char *name;
    int value;
};
constexpr Name dtypes[] = {{"float32", SID_F32}, {"float16", SID_F16}, {"bfloat16", SID_BF16}};
constexpr Name isas[] = {
    {"auto", SID_ISA_AUTO}, {"base", SID_ISA_BASE}, {"avx2", SID_ISA_AVX2}, {"avx512", SID_ISA_AVX512}};
constexpr Name traits[] = {
    {"linear", SID_LINEAR}, {"lossless", SID_LOSSLESS}, {"stochastic", SID_STOCHASTIC}, {"unbiased", SID_UNBIASED}};
constexpr const char *kinds[] = {"real", "int", "choice"};

template <size_t N> int value_of(const Name (&names)[N], const string &name, const char *what) {
    std::vector<string> valid;
    for (const Name &n : names) {
        if (name == n.name) return n.value;
        valid.emplace_back(n.name);
    }
    fail(SID_E_ARG, string("unknown ") + what + " '" + name + "'; one of: " + joined(valid));
}

template <size_t N> string name_of(const Name (&names)[N], int value) {
    for (const Name &n : names)
        if (n.value == value) return n.name;
    return "?";
}

sid_dtype dtype_of(const string &name) { return static_cast<sid_dtype>(value_of(dtypes, name, "dtype")); }

sid_isa isa_of(const std::optional<string> &asked) {
    if (asked) return static_cast<sid_isa>(value_of(isas, *asked, "isa"));
    const char *env = std::getenv("SIDCOMP_ISA");
    return static_cast<sid_isa>(env && *env ? value_of(isas, env, "SIDCOMP_ISA") : SID_ISA_AUTO);
}

// ---- registry ----------------------------------------------------------------------------------------------------

using At = const sid_info *(*)(uint32_t);

py::object param_value(const sid_param &p, double value) {
    if (p.kind == SID_CHOICE) return py::str(p.choices[static_cast<size_t>(value)]);
    if (p.kind == SID_INT) return py::int_(static_cast<int64_t>(value));
    return py::float_(value);
}

py::dict describe(const sid_info &c, bool cuda) {
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
    d["traits"] = names;
    d["cuda"] = cuda;
    d["parameters"] = parameters;
    return d;
}

const sid_info &find(At at, const string &name, const char *what) {
    std::vector<string> valid;
    for (uint32_t i = 0; const sid_info *c = at(i); i++) {
        if (name == c->name) return *c;
        valid.emplace_back(c->name);
    }
    fail(SID_E_PARAM, string("unknown ") + what + " '" + name + "'; one of: " + joined(valid));
}

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

template <class F> auto without_gil(F call) {
    py::gil_scoped_release release;
    return call();
}

// ---- vectors -----------------------------------------------------------------------------------------------------

using Address = uintptr_t;

template <class T = void> T *pointer(Address a) { return reinterpret_cast<T *>(a); }

void need(Address a, uint64_t bytes, const char *what) {
    if (!a && bytes) fail(SID_E_ARG, string(what) + " is NULL, but " + std::to_string(bytes) + " bytes are needed");
}

struct Segments {
    std::vector<sid_segment> parts;
    uint64_t n = 0;

    Segments(const std::vector<Address> &pointers, const std::vector<uint64_t> &lengths) {
        if (pointers.size() != lengths.size())
            fail(SID_E_ARG,
                 std::to_string(pointers.size()) + " pointers, but " + std::to_string(lengths.size()) + " lengths");
        if (pointers.size() > UINT32_MAX) fail(SID_E_ARG, "more than 2^32 - 1 segments");
        parts.reserve(pointers.size());
        for (size_t i = 0; i < pointers.size(); i++) {
            if (!pointers[i] && lengths[i]) fail(SID_E_ARG, "segment " + std::to_string(i) + " is NULL");
            if (lengths[i] > UINT64_MAX - n) fail(SID_E_ARG, "the segments' lengths overflow");
            parts.push_back({pointer(pointers[i]), lengths[i]});
            n += lengths[i];
        }
    }
    uint32_t count() const { return static_cast<uint32_t>(parts.size()); }
};

// ---- plan --------------------------------------------------------------------------------------------------------

class Plan {
  public:
    Plan(const string &codec_name, const string &memory_name, int64_t count, const string &dtype_name,
         const py::dict &settings, const std::optional<string> &isa, bool flush) {
        const sid_info &c = find(sid_codec_at, codec_name, "codec");
        const sid_info &m = find(sid_memory_at, memory_name, "memory");
        if (count < 0) fail(SID_E_ARG, "n is negative");
        std::vector<string> names; // keeps the settings' names alive
        std::vector<sid_setting> values;
        names.reserve(settings.size());
        for (const auto &[key, value] : settings) {
            names.push_back(py::str(key));
            const sid_param *p = param_of(c, names.back());
            if (!p) p = param_of(m, names.back());
            if (!p) fail(SID_E_PARAM, unknown(c, m, names.back()));
            values.push_back({names.back().c_str(), setting_value(*p, value)});
        }
        sid_config config{};
        config.codec = c.name;
        config.memory = m.name;
        config.n = static_cast<uint64_t>(count);
        config.dtype = dtype_of(dtype_name);
        config.isa = isa_of(isa);
        config.settings = values.data();
        config.n_settings = static_cast<uint32_t>(values.size());
        config.flush = flush;
        sid_error err{};
        size_t bytes = 0;
        check(sid_plan_make(&config, nullptr, &bytes, &err), err);
        memory_.reset(::operator new(bytes, std::align_val_t{64}));
        check(sid_plan_make(&config, memory_.get(), &bytes, &err), err);
        sizes = sid_plan_sizes(get());
        n = config.n;
        dtype = config.dtype;
    }

    const sid_plan *get() const { return static_cast<const sid_plan *>(memory_.get()); }
    bool has(uint32_t trait) const { return (sid_plan_codec(get())->traits & trait) != 0; }

    sid_stats encode(const Segments &seg, Address state, Address work, Address payload, uint64_t step, uint64_t seed,
                     uint32_t group, uint32_t rank, uint32_t world) const {
        need(state, sizes.state, "state");
        need(work, sizes.work, "work");
        need(payload, sizes.payload, "payload");
        const sid_step at{step, seed, group, rank, world};
        sid_stats stats{};
        const sid_status s = without_gil([&] {
            return sid_encode(get(), seg.parts.data(), seg.count(), pointer(state), pointer(work), &at,
                              pointer(payload), &stats);
        });
        check(s);
        return stats;
    }

    bool decode(Address payloads, uint64_t stride, uint32_t count, float scale, const Segments &seg, Address state,
                int64_t step, uint32_t group) const {
        need(payloads, count ? sizes.payload : 0, "payloads");
        const Expected at(step, group);
        sid_report report{};
        sid_error err{};
        const sid_status s = without_gil([&] {
            return sid_decode(get(), pointer(payloads), stride, count, scale, seg.parts.data(), seg.count(),
                              pointer(state), at.get(), &report, &err);
        });
        check(s, err, report.culprit);
        return report.nonfinite != 0;
    }

    void check_payload(Address payload, uint64_t bytes, int64_t step, uint32_t group) const {
        need(payload, bytes, "payload");
        const Expected at(step, group);
        sid_error err{};
        const sid_status s = without_gil([&] { return sid_check(get(), pointer(payload), bytes, at.get(), &err); });
        check(s, err, 0u);
    }

    void residual_out(Address state, Address out) const {
        need(state, sizes.state, "state");
        need(out, n * vectors() * sizeof(float), "out");
        check(without_gil([&] { return sid_residual_out(get(), pointer(state), pointer<float>(out)); }));
    }
    void residual_in(Address state, Address values) const {
        need(state, sizes.state, "state");
        need(values, n * vectors() * sizeof(float), "values");
        check(without_gil([&] { return sid_residual_in(get(), pointer(state), pointer<const float>(values)); }));
    }
    void unsend(Address state) const {
        need(state, sizes.state, "state");
        check(sid_unsend(get(), pointer(state)));
    }
    void rescale(Address state, float factor) const {
        need(state, sizes.state, "state");
        check(without_gil([&] { return sid_rescale(get(), pointer(state), factor); }));
    }
    uint32_t vectors() const { return sid_memory_vectors(get()); }

    uint64_t cuda_work_bytes() const {
        uint64_t bytes = 0;
        sid_error err{};
        check(sid_cuda_work(get(), &bytes, &err), err);
        return bytes;
    }

    void cuda_encode(Address segs, uint32_t n_segs, Address state, Address work, Address payload, uint64_t step,
                     uint64_t seed, uint32_t group, uint32_t rank, uint32_t world, Address stats, int device,
                     Address stream) const {
        const sid_step at{step, seed, group, rank, world};
        sid_error err{};
        const sid_status s = without_gil([&] {
            return sid_cuda_encode(get(), pointer<const sid_segment>(segs), n_segs, pointer(state), pointer(work), &at,
                                   pointer(payload), pointer(stats), device, pointer(stream), &err);
        });
        check(s, err);
    }

    void cuda_decode(Address payloads, uint64_t stride, uint32_t count, float scale, Address segs, uint32_t n_segs,
                     Address state, Address work, int64_t step, uint32_t group, Address report, int device,
                     Address stream) const {
        const Expected at(step, group);
        sid_error err{};
        const sid_status s = without_gil([&] {
            return sid_cuda_decode(get(), pointer(payloads), stride, count, scale, pointer<const sid_segment>(segs),
                                   n_segs, pointer(state), pointer(work), at.get(), pointer(report), device,
                                   pointer(stream), &err);
        });
        check(s, err);
    }

    sid_sizes sizes{};
    uint64_t n = 0;
    sid_dtype dtype = SID_F32;

  private:
    struct Expected { // step < 0: any
        sid_step at{};
        bool any;
        Expected(int64_t step, uint32_t group) : any(step < 0) {
            at.step = any ? 0 : static_cast<uint64_t>(step);
            at.group = group;
            at.world = 1;
        }
        const sid_step *get() const { return any ? nullptr : &at; }
    };
    struct Free {
        void operator()(void *p) const { ::operator delete(p, std::align_val_t{64}); }
    };

    static string unknown(const sid_info &c, const sid_info &m, const string &name) {
        const auto names = [](const sid_info &i) {
            std::vector<string> v;
            for (const sid_param *p = i.params; p != i.params + i.n_params; p++) v.emplace_back(p->name);
            return joined(v);
        };
        return "unknown parameter '" + name + "'; codec '" + c.name + "' takes: " + names(c) + "; memory '" + m.name +
               "' takes: " + names(m);
    }

    std::unique_ptr<void, Free> memory_;
};

} // namespace

PYBIND11_MODULE(_core, m) {
    m.doc() = "The C core of sidcomp. Pointers and CUDA streams are integers; calls release the GIL.";
    m.attr("version") = std::to_string(SID_VERSION / 10000) + "." + std::to_string(SID_VERSION / 100 % 100) + "." +
                        std::to_string(SID_VERSION % 100);
    m.attr("cuda_built") = sid_cuda_built() != 0;
#ifdef SID_WITH_CUDA
    m.attr("cuda_archs") = SID_CUDA_ARCH;
#else
    m.attr("cuda_archs") = "";
#endif
    add_errors(m);

    m.def("codecs", [] {
        py::list all;
        for (uint32_t i = 0; const sid_info *c = sid_codec_at(i); i++)
            all.append(describe(*c, sid_codec_has_cuda(c) != 0));
        return all;
    });
    m.def("memories", [] {
        py::list all;
        for (uint32_t i = 0; const sid_info *c = sid_memory_at(i); i++) all.append(describe(*c, sid_cuda_built() != 0));
        return all;
    });
    m.def("isa_best", [] { return name_of(isas, sid_isa_best()); });
    m.def("cuda_devices", [] {
        int count = 0;
        sid_error err{};
        const sid_status s = sid_cuda_devices(&count, &err);
        const bool usable = s == SID_OK && count > 0;
        const string reason = usable ? "" : err.text[0] ? err.text : sid_status_text(s);
        return std::make_pair(usable ? count : 0, reason);
    });

    py::class_<Segments>(m, "Segments", "A list of (pointer, length in elements): the parts of a group.")
        .def(py::init<const std::vector<Address> &, const std::vector<uint64_t> &>(), py::arg("pointers"),
             py::arg("lengths"))
        .def_readonly("n", &Segments::n)
        .def("table", [](const Segments &s) {
            return py::bytes(reinterpret_cast<const char *>(s.parts.data()), s.parts.size() * sizeof(sid_segment));
        });

    py::class_<sid_stats>(m, "Stats", "What the last encode counted.")
        .def_readonly("count", &sid_stats::count)
        .def_readonly("found", &sid_stats::found)
        .def_readonly("nonfinite", &sid_stats::nonfinite)
        .def_readonly("threshold", &sid_stats::threshold)
        .def_readonly("stages", &sid_stats::stages)
        .def_readonly("walks", &sid_stats::walks);

    using py::arg;
    py::class_<Plan>(m, "Plan")
        .def(py::init<const string &, const string &, int64_t, const string &, const py::dict &,
                      const std::optional<string> &, bool>(),
             arg("codec"), arg("memory"), arg("n"), arg("dtype"), arg("settings") = py::dict(), arg("isa") = py::none(),
             arg("flush") = false)
        .def_property_readonly("codec", [](const Plan &p) { return sid_plan_codec(p.get())->name; })
        .def_property_readonly("memory", [](const Plan &p) { return sid_plan_memory(p.get())->name; })
        .def_readonly("n", &Plan::n)
        .def_property_readonly("k", [](const Plan &p) { return p.sizes.k; })
        .def_property_readonly("dtype", [](const Plan &p) { return name_of(dtypes, p.dtype); })
        .def_property_readonly("isa", [](const Plan &p) { return sid_plan_isa(p.get()); })
        .def_property_readonly("linear", [](const Plan &p) { return p.has(SID_LINEAR); })
        .def_property_readonly("lossless", [](const Plan &p) { return p.has(SID_LOSSLESS); })
        .def_property_readonly("payload_bytes", [](const Plan &p) { return p.sizes.payload; })
        .def_property_readonly("body_offset", [](const Plan &p) { return p.sizes.body_offset; })
        .def_property_readonly("body_count", [](const Plan &p) { return p.sizes.body_count; })
        .def_property_readonly("body_dtype", [](const Plan &p) { return name_of(dtypes, p.sizes.body_dtype); })
        .def_property_readonly("state_bytes", [](const Plan &p) { return p.sizes.state; })
        .def_property_readonly("work_bytes", [](const Plan &p) { return p.sizes.work; })
        .def_property_readonly("vectors", &Plan::vectors)
        .def("encode", &Plan::encode, arg("segments"), arg("state"), arg("work"), arg("payload"), py::kw_only(),
             arg("step"), arg("seed"), arg("group"), arg("rank"), arg("world"))
        .def("decode", &Plan::decode, arg("payloads"), arg("stride"), arg("count"), arg("scale"), arg("segments"),
             arg("state"), py::kw_only(), arg("step"), arg("group"))
        .def("check", &Plan::check_payload, arg("payload"), arg("nbytes"), py::kw_only(), arg("step") = -1,
             arg("group") = 0)
        .def("residual_out", &Plan::residual_out, arg("state"), arg("out"))
        .def("residual_in", &Plan::residual_in, arg("state"), arg("values"))
        .def("unsend", &Plan::unsend, arg("state"))
        .def("rescale", &Plan::rescale, arg("state"), arg("factor"))
        .def("cuda_work_bytes", &Plan::cuda_work_bytes)
        .def("cuda_encode", &Plan::cuda_encode, arg("segments"), arg("n_segments"), arg("state"), arg("work"),
             arg("payload"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"), arg("world"),
             arg("stats"), arg("device"), arg("stream"))
        .def("cuda_decode", &Plan::cuda_decode, arg("payloads"), arg("stride"), arg("count"), arg("scale"),
             arg("segments"), arg("n_segments"), arg("state"), arg("work"), py::kw_only(), arg("step"), arg("group"),
             arg("report"), arg("device"), arg("stream"));

    m.def(
        "checksum",
        [](const Segments &s, const string &dtype) {
            const sid_dtype d = dtype_of(dtype);
            return without_gil([&] { return sid_checksum(s.parts.data(), s.count(), d); });
        },
        arg("segments"), arg("dtype"));
    m.def(
        "scale",
        [](const Segments &s, const string &dtype, float factor) {
            const sid_dtype d = dtype_of(dtype);
            const sid_status status = without_gil([&] { return sid_scale(s.parts.data(), s.count(), d, factor); });
            check(status);
        },
        arg("segments"), arg("dtype"), arg("factor"));
}
