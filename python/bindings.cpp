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
#include <tuple>
#include <utility>
#include <vector>

#include "fusion.h"
#include "sidcomp.h"
#include "sidcomp_cuda.h"
#include "sidcomp_nccl.h"

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
    {"ExchangeError", SID_E_PEER, "An exchange failed: a peer has ended, hangs, or cannot be reached.",
     &PyExc_RuntimeError, nullptr},
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
constexpr Name bodies[] = {{"float32", SID_F32}, {"float16", SID_F16}, {"bfloat16", SID_BF16}, {"int8", SID_I8}};
constexpr Name isas[] = {
    {"auto", SID_ISA_AUTO}, {"base", SID_ISA_BASE}, {"avx2", SID_ISA_AVX2}, {"avx512", SID_ISA_AVX512}};
constexpr Name traits[] = {{"linear", SID_LINEAR},     {"lossless", SID_LOSSLESS}, {"stochastic", SID_STOCHASTIC},
                           {"unbiased", SID_UNBIASED}, {"sparse", SID_SPARSE},     {"feedback", SID_FEEDBACK},
                           {"momentum", SID_MOMENTUM}, {"vote", SID_VOTE},         {"shaped", SID_SHAPED},
                           {"signs", SID_SIGNS},       {"rounds", SID_IN_ROUNDS}};
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
    d["memory"] = c.memory ? c.memory : "residual";
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

// Settings by name, as the core takes them; `from` are the tables that may know them.
class Settings {
  public:
    Settings(const std::vector<const sid_info *> &from, const py::dict &settings) {
        names_.reserve(settings.size());
        for (const auto &[key, value] : settings) {
            names_.push_back(py::str(key));
            const sid_param *p = nullptr;
            for (size_t i = 0; !p && i < from.size(); i++) p = param_of(*from[i], names_.back());
            if (!p) fail(SID_E_PARAM, unknown(from, names_.back()));
            values.push_back({names_.back().c_str(), setting_value(*p, value)});
        }
    }
    std::vector<sid_setting> values;

  private:
    static string unknown(const std::vector<const sid_info *> &from, const string &name) {
        string text = "unknown parameter '" + name + "'";
        for (const sid_info *i : from) {
            std::vector<string> v;
            for (const sid_param *p = i->params; p != i->params + i->n_params; p++) v.emplace_back(p->name);
            text += string("; '") + i->name + "' takes: " + joined(v);
        }
        return text;
    }
    std::vector<string> names_; // keeps the settings' names alive
};

// What to compress, and how: `exchange`, if there is one, may know settings too.
class Config {
  public:
    Config(const string &codec, const string &memory, int64_t count, const string &dtype, const py::dict &settings,
           const std::optional<string> &isa, const sid_info *exchange = nullptr)
        : codec_(find(sid_codec_at, codec, "codec")), memory_(find(sid_memory_at, memory, "memory")),
          given_(exchange ? std::vector{exchange, &codec_, &memory_} : std::vector{&codec_, &memory_}, settings) {
        if (count < 0) fail(SID_E_ARG, "n is negative");
        it.codec = codec_.name;
        it.memory = memory_.name;
        it.n = static_cast<uint64_t>(count);
        it.dtype = dtype_of(dtype);
        it.isa = isa_of(isa);
        it.settings = given_.values.data();
        it.n_settings = static_cast<uint32_t>(given_.values.size());
    }
    sid_config it{};

  private:
    const sid_info &codec_, &memory_;
    const Settings given_;
};

template <class F> auto without_gil(F call) {
    py::gil_scoped_release release;
    return call();
}

struct Free { // of a block that starts at a multiple of 64
    void operator()(void *p) const { ::operator delete(p, std::align_val_t{64}); }
};

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
    Plan(const string &codec, const string &memory, int64_t count, const string &dtype_name, const py::dict &settings,
         const std::optional<string> &isa, bool flush,
         const std::optional<std::vector<std::pair<uint64_t, uint64_t>>> &shapes) {
        Config given(codec, memory, count, dtype_name, settings, isa);
        sid_config &config = given.it;
        config.flush = flush;
        std::vector<sid_shape> parts;
        if (shapes) {
            parts.reserve(shapes->size() + 1); // no shapes at all are not the same as none given
            for (const auto &[length, columns] : *shapes) parts.push_back({length, columns});
            config.shapes = parts.data();
            config.n_shapes = static_cast<uint32_t>(parts.size());
        }
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
                     uint32_t group, uint32_t rank, uint32_t world, float carry, int64_t origin) const {
        need(state, sizes.state, "state");
        need(work, sizes.work, "work");
        need(payload, sizes.payload, "payload");
        const sid_step at{step, seed, group, rank, world, carry, origin};
        sid_stats stats{};
        const sid_status s = without_gil([&] {
            return sid_encode(get(), seg.parts.data(), seg.count(), pointer(state), pointer(work), &at,
                              pointer(payload), &stats);
        });
        check(s);
        return stats;
    }

    void next_round(uint32_t round, const Segments &seg, Address state, Address work, Address payload, uint64_t step,
                    uint64_t seed, uint32_t group, uint32_t rank, uint32_t world) const {
        need(state, sizes.state, "state");
        need(work, sizes.work, "work");
        need(payload, sizes.payload, "payload");
        const sid_step at{step, seed, group, rank, world, 1, 0};
        check(without_gil([&] {
            return sid_next_round(get(), round, seg.parts.data(), seg.count(), pointer(state), pointer(work), &at,
                                  pointer(payload));
        }));
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

    void learn(Address state, Address payload) const {
        need(state, sizes.state, "state");
        need(payload, sizes.payload, "payload");
        check(without_gil([&] { return sid_learn(get(), pointer(state), pointer(payload)); }));
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
    void forget(Address state) const {
        need(state, sizes.state, "state");
        check(without_gil([&] { return sid_forget(get(), pointer(state)); }));
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
                     uint64_t seed, uint32_t group, uint32_t rank, uint32_t world, float carry, int64_t origin,
                     Address stats, int device, Address stream) const {
        const sid_step at{step, seed, group, rank, world, carry, origin};
        sid_error err{};
        const sid_status s = without_gil([&] {
            return sid_cuda_encode(get(), pointer<const sid_segment>(segs), n_segs, pointer(state), pointer(work), &at,
                                   pointer(payload), pointer(stats), device, pointer(stream), &err);
        });
        check(s, err);
    }

    void cuda_next_round(uint32_t round, Address segs, uint32_t n_segs, Address state, Address work, Address payload,
                         uint64_t step, uint64_t seed, uint32_t group, uint32_t rank, uint32_t world, int device,
                         Address stream) const {
        const sid_step at{step, seed, group, rank, world, 1, 0};
        sid_error err{};
        const sid_status s = without_gil([&] {
            return sid_cuda_next_round(get(), round, pointer<const sid_segment>(segs), n_segs, pointer(state),
                                       pointer(work), &at, pointer(payload), device, pointer(stream), &err);
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

    void cuda_settle(Address segs, uint32_t n_segs, Address state, Address work, Address payload, int device,
                     Address stream) const {
        sid_error err{};
        const sid_status s = without_gil([&] {
            return sid_cuda_settle(get(), pointer<const sid_segment>(segs), n_segs, pointer(state), pointer(work),
                                   pointer(payload), device, pointer(stream), &err);
        });
        check(s, err);
    }

    void cuda_unsend(Address state, int device, Address stream) const {
        sid_error err{};
        const sid_status s =
            without_gil([&] { return sid_cuda_unsend(get(), pointer(state), device, pointer(stream), &err); });
        check(s, err);
    }

    void cuda_checksum(Address segs, uint32_t n_segs, Address work, Address report, Address sum, int device,
                       Address stream) const {
        sid_error err{};
        const sid_status s = without_gil([&] {
            return sid_cuda_checksum(get(), pointer<const sid_segment>(segs), n_segs, pointer(work), pointer(report),
                                     pointer(sum), device, pointer(stream), &err);
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

    std::unique_ptr<void, Free> memory_;
};

// ---- exchange ----------------------------------------------------------------------------------------------------

class Exchange {
  public:
    Exchange(const string &name, const string &codec, const string &memory, int64_t count, const string &dtype,
             uint32_t of, uint32_t all, const py::dict &settings, const std::optional<string> &isa) {
        const sid_info &e = find(sid_exchange_at, name, "exchange");
        const Config given(codec, memory, count, dtype, settings, isa, &e);
        const sid_route route{e.name, &given.it, of, all};
        sid_error err{};
        size_t bytes = 0;
        check(sid_exchange_make(&route, nullptr, &bytes, &err), err);
        memory_.reset(::operator new(bytes, std::align_val_t{64}));
        check(sid_exchange_make(&route, memory_.get(), &bytes, &err), err);
        sizes = sid_exchange_sizes_of(get());
        n = given.it.n;
        rank = of;
        world = all;
    }

    const sid_exchange *get() const { return static_cast<const sid_exchange *>(memory_.get()); }

    // What it needs room for; kept, so that steps do not allocate.
    sid_segment *cut(const Segments &seg) {
        if (cut_.size() < seg.parts.size()) cut_.resize(seg.parts.size());
        return cut_.data();
    }

    std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> messages(uint32_t round, bool receive) const {
        std::vector<sid_message> room(sizes.messages + 1);
        const uint32_t count = sid_exchange_messages(get(), round, receive, room.data());
        std::vector<std::tuple<uint32_t, uint64_t, uint64_t>> out;
        for (uint32_t i = 0; i < count; i++) out.emplace_back(room[i].peer, room[i].offset, room[i].bytes);
        return out;
    }

    bool advance(uint32_t round, const Segments &seg, Address state, Address work, Address wire, uint64_t step,
                 uint64_t seed, uint32_t group, float carry, int64_t origin) {
        const sid_step at{step, seed, group, rank, world, carry, origin};
        sid_report report{};
        sid_error err{};
        sid_segment *room = cut(seg);
        const sid_status s = without_gil([&] {
            return sid_exchange_advance(get(), round, seg.parts.data(), seg.count(), room, pointer(state),
                                        pointer(work), &at, pointer(wire), &report, &err);
        });
        check(s, err, report.culprit);
        return report.nonfinite != 0;
    }

    bool has_meanwhile() const { return sid_exchange_has_meanwhile(get()) != 0; }
    void meanwhile(uint32_t round, const Segments &seg, Address state, Address work, Address wire, uint64_t step,
                   uint64_t seed, uint32_t group) {
        const sid_step at{step, seed, group, rank, world, 1.0f, 0}; // what is owed was weighted by advance(0)'s
        sid_segment *room = cut(seg);
        check(without_gil([&] {
            return sid_exchange_meanwhile(get(), round, seg.parts.data(), seg.count(), room, pointer(state),
                                          pointer(work), &at, pointer(wire));
        }));
    }

    uint64_t cuda_work_bytes() const {
        uint64_t bytes = 0;
        sid_error err{};
        check(sid_cuda_exchange_work(get(), &bytes, &err), err);
        return bytes;
    }
    void cuda_advance(uint32_t round, Address segs, uint32_t n_segs, Address state, Address work, Address wire,
                      uint64_t step, uint64_t seed, uint32_t group, float carry, int64_t origin, Address stats,
                      Address report, int device, Address stream) const {
        const sid_step at{step, seed, group, rank, world, carry, origin};
        sid_error err{};
        check(without_gil([&] {
                  return sid_cuda_exchange_advance(get(), round, pointer<const sid_segment>(segs), n_segs,
                                                   pointer(state), pointer(work), &at, pointer(wire), pointer(stats),
                                                   pointer(report), device, pointer(stream), &err);
              }),
              err);
    }

    void cuda_settle(Address segs, uint32_t n_segs, Address state, Address work, Address wire, int device,
                     Address stream) const {
        sid_error err{};
        check(without_gil([&] {
                  return sid_cuda_exchange_settle(get(), pointer<const sid_segment>(segs), n_segs, pointer(state),
                                                  pointer(work), pointer(wire), device, pointer(stream), &err);
              }),
              err);
    }
    void cuda_unsend(Address state, int device, Address stream) const {
        sid_error err{};
        check(
            without_gil([&] { return sid_cuda_exchange_unsend(get(), pointer(state), device, pointer(stream), &err); }),
            err);
    }
    void cuda_checksum(Address segs, uint32_t n_segs, Address work, Address report, Address sum, int device,
                       Address stream) const {
        sid_error err{};
        check(without_gil([&] {
                  return sid_cuda_exchange_checksum(get(), pointer<const sid_segment>(segs), n_segs, pointer(work),
                                                    pointer(report), pointer(sum), device, pointer(stream), &err);
              }),
              err);
    }

    void abandon(const Segments &seg, Address state, Address work, Address wire, uint64_t step, uint64_t seed,
                 uint32_t group) {
        const sid_step at{step, seed, group, rank, world, 1, 0};
        sid_segment *room = cut(seg);
        check(without_gil([&] {
            return sid_exchange_abandon(get(), seg.parts.data(), seg.count(), room, pointer(state), pointer(work), &at,
                                        pointer(wire));
        }));
    }

    void residual_out(Address state, Address out) const {
        need(state, sizes.state, "state");
        check(without_gil([&] { return sid_exchange_residual_out(get(), pointer(state), pointer<float>(out)); }));
    }
    void residual_in(Address state, Address values) const {
        need(state, sizes.state, "state");
        check(
            without_gil([&] { return sid_exchange_residual_in(get(), pointer(state), pointer<const float>(values)); }));
    }
    void unsend(Address state) const {
        need(state, sizes.state, "state");
        check(sid_exchange_unsend(get(), pointer(state)));
    }
    void forget(Address state) const {
        need(state, sizes.state, "state");
        check(without_gil([&] { return sid_exchange_forget(get(), pointer(state)); }));
    }
    void rescale(Address state, float factor) const {
        need(state, sizes.state, "state");
        check(without_gil([&] { return sid_exchange_rescale(get(), pointer(state), factor); }));
    }

    sid_exchange_sizes sizes{};
    uint64_t n = 0;
    uint32_t rank = 0, world = 1;

  private:
    std::unique_ptr<void, Free> memory_;
    std::vector<sid_segment> cut_;
};

// One step of all ranks in this process: whether it was not finite, and what each rank sent, of it for control.
py::tuple loopback(const std::vector<Exchange *> &ranks, const std::vector<Segments *> &segments,
                   const std::vector<Address> &state, const std::vector<Address> &work,
                   const std::vector<Address> &wire, uint64_t step, uint64_t seed, uint32_t group, float carry) {
    const size_t world = ranks.size();
    if (!world || segments.size() != world || state.size() != world || work.size() != world || wire.size() != world)
        fail(SID_E_ARG, "a loopback needs segments, state, work and wire of every rank");
    std::vector<sid_rank> all;
    uint32_t most = 0;
    for (size_t r = 0; r < world; r++) {
        sid_rank one{};
        one.exchange = ranks[r]->get();
        one.seg = segments[r]->parts.data();
        one.n_seg = segments[r]->count();
        one.cut = ranks[r]->cut(*segments[r]);
        one.state = pointer(state[r]);
        one.work = pointer(work[r]);
        one.wire = pointer(wire[r]);
        all.push_back(one);
        if (most < ranks[r]->sizes.messages) most = ranks[r]->sizes.messages;
    }
    std::vector<sid_message> room(2 * (most + 1));
    const sid_step at{step, seed, group, 0, static_cast<uint32_t>(world), carry, 0};
    sid_report report{};
    sid_error err{};
    const sid_status s = without_gil([&] { return sid_loopback(all.data(), room.data(), &at, &report, &err); });
    check(s, err, report.culprit);
    std::vector<uint64_t> sent, control;
    for (const sid_rank &one : all) {
        sent.push_back(one.sent);
        control.push_back(one.control);
    }
    return py::make_tuple(report.nonfinite != 0, sent, control);
}

// ---- NCCL --------------------------------------------------------------------------------------------------------

class Nccl {
  public:
    explicit Nccl(const std::optional<string> &path) {
        const char *file = path ? path->c_str() : nullptr;
        sid_error err{};
        size_t bytes = 0;
        check(sid_nccl_open(file, nullptr, &bytes, &err), err);
        memory_.reset(::operator new(bytes, std::align_val_t{64}));
        check(without_gil([&] { return sid_nccl_open(file, memory_.get(), &bytes, &err); }), err);
    }
    const sid_nccl *get() const { return static_cast<const sid_nccl *>(memory_.get()); }

    py::bytes unique_id() const {
        char id[SID_NCCL_ID_BYTES];
        sid_error err{};
        check(without_gil([&] { return sid_nccl_unique_id(get(), id, &err); }), err);
        return {id, sizeof id};
    }

  private:
    std::unique_ptr<void, Free> memory_;
};

class Communicator {
  public:
    using Message = std::tuple<uint32_t, uint64_t, uint64_t>; // peer, offset, bytes, as Exchange.messages has them

    Communicator(const Nccl &nccl, const py::bytes &id, uint32_t of, uint32_t all, int on, double limit)
        : rank(of), world(all), device(on) {
        const string bytes_of_id = id;
        if (bytes_of_id.size() != SID_NCCL_ID_BYTES)
            fail(SID_E_ARG, "an id has " + std::to_string(SID_NCCL_ID_BYTES) + " bytes");
        if (!(limit >= 0.001)) fail(SID_E_ARG, "the time limit is in seconds, and more than 0");
        const uint32_t ms = limit < 4e6 ? static_cast<uint32_t>(limit * 1000) : UINT32_MAX;
        sid_error err{};
        size_t bytes = 0;
        check(sid_nccl_join(nccl.get(), bytes_of_id.data(), rank, world, device, ms, nullptr, &bytes, &err), err);
        memory_.reset(::operator new(bytes, std::align_val_t{64}));
        check(without_gil([&] {
                  return sid_nccl_join(nccl.get(), bytes_of_id.data(), rank, world, device, ms, memory_.get(), &bytes,
                                       &err);
              }),
              err);
    }

    // f(communicator, error) without the GIL.
    template <class F> void call(F f) {
        sid_error err{};
        check(without_gil([&] { return f(static_cast<sid_nccl_comm *>(memory_.get()), &err); }), err);
    }

    void all_gather(Address in, Address out, uint64_t bytes, Address stream) {
        call([&](sid_nccl_comm *c, sid_error *err) {
            return sid_nccl_all_gather(c, pointer(in), pointer(out), bytes, pointer(stream), err);
        });
    }
    void all_reduce(Address in, Address out, uint64_t count, const string &dtype, Address stream) {
        const sid_dtype d = dtype_of(dtype);
        call([&](sid_nccl_comm *c, sid_error *err) {
            return sid_nccl_all_reduce(c, pointer(in), pointer(out), count, d, pointer(stream), err);
        });
    }
    void reduce_scatter(Address in, Address out, uint64_t count, const string &dtype, Address stream) {
        const sid_dtype d = dtype_of(dtype);
        call([&](sid_nccl_comm *c, sid_error *err) {
            return sid_nccl_reduce_scatter(c, pointer(in), pointer(out), count, d, pointer(stream), err);
        });
    }
    void messages(Address wire, const std::vector<Message> &sends, const std::vector<Message> &receives,
                  Address stream) {
        const auto table = [](const std::vector<Message> &from) {
            std::vector<sid_message> out;
            for (const auto &[peer, offset, bytes] : from) out.push_back({offset, bytes, peer, 0});
            return out;
        };
        const std::vector<sid_message> out = table(sends), in = table(receives);
        call([&](sid_nccl_comm *c, sid_error *err) {
            return sid_nccl_messages(c, pointer(wire), out.data(), static_cast<uint32_t>(out.size()), in.data(),
                                     static_cast<uint32_t>(in.size()), pointer(stream), err);
        });
    }
    void poll() { call(sid_nccl_poll); }
    void leave() { call(sid_nccl_leave); }
    void abort(const string &why) {
        call([&](sid_nccl_comm *c, sid_error *) {
            sid_nccl_abort(c, why.c_str());
            return SID_OK;
        });
    }

    uint32_t rank, world;
    int device;

  private:
    std::unique_ptr<void, Free> memory_; // what NCCL has of it ends with leave or abort, or with the process
};

// A group's places on the device, so that a step takes three numbers.
class DeviceGroup {
  public:
    DeviceGroup(const Plan &plan, Address segments, uint32_t n_segments, Address state, Address work, Address payload,
                Address incoming, Address stats, Address report, Address seen)
        : DeviceGroup(segments, n_segments, state, work, payload, incoming, stats, report, seen) {
        group_.plan = plan.get();
    }
    DeviceGroup(const Exchange &exchange, Address segments, uint32_t n_segments, Address state, Address work,
                Address wire, Address stats, Address report, Address seen)
        : DeviceGroup(segments, n_segments, state, work, wire, 0, stats, report, seen) {
        group_.exchange = exchange.get();
        room_.resize(2 * exchange.sizes.messages + 1);
        group_.room = room_.data();
    }
    DeviceGroup(const DeviceGroup &) = delete;
    DeviceGroup &operator=(const DeviceGroup &) = delete;

    void step(Communicator &c, uint64_t step, uint64_t seed, uint32_t group, float carry, int64_t origin,
              Address stream) const {
        const sid_step at{step, seed, group, c.rank, c.world, carry, origin};
        c.call([&](sid_nccl_comm *comm, sid_error *err) {
            return sid_nccl_step(comm, &group_, &at, pointer(stream), err);
        });
    }

    py::bytes kept() const {
        std::vector<sid_cuda_kept> entries(sid_cuda_kept_by(&group_, nullptr, 0));
        sid_cuda_kept_by(&group_, entries.data(), static_cast<uint32_t>(entries.size()));
        return {reinterpret_cast<const char *>(entries.data()), entries.size() * sizeof entries[0]};
    }

  private:
    DeviceGroup(Address segments, uint32_t n_segments, Address state, Address work, Address payload, Address incoming,
                Address stats, Address report, Address seen) {
        group_.segs_dev = pointer<const sid_segment>(segments);
        group_.n_seg = n_segments;
        group_.state = pointer(state);
        group_.work = pointer(work);
        group_.payload = pointer(payload);
        group_.incoming = pointer(incoming);
        group_.stats_dev = pointer(stats);
        group_.report_dev = pointer(report);
        group_.seen = pointer(seen);
    }

    std::vector<sid_message> room_;
    sid_cuda_group group_{};
};

// ---- planner -----------------------------------------------------------------------------------------------------

void check(sid_fuse_status s, const sid_fuse_error &err) {
    if (s != SID_FUSE_OK) fail(SID_E_ARG, err.text);
}

class Instance {
  public:
    using Knots = std::vector<std::pair<int64_t, int64_t>>;
    using Method = std::tuple<std::optional<Knots>, Knots, std::optional<Knots>>;

    Instance(int64_t forward_ps, std::vector<int64_t> backward_ps, std::vector<int64_t> bytes,
             const std::vector<Method> &methods, int64_t max_group_bytes, const std::vector<uint32_t> &cut_before,
             uint32_t overlap_permille, uint32_t stolen_permille, bool decode_main)
        : backward_(std::move(backward_ps)), bytes_(std::move(bytes)), cuts_(backward_.size()) {
        if (backward_.size() != bytes_.size())
            fail(SID_E_ARG, std::to_string(backward_.size()) + " times of tensors, but " +
                                std::to_string(bytes_.size()) + " sizes");
        if (bytes_.size() > SID_FUSE_MAX_TENSORS || methods.size() > SID_FUSE_MAX_METHODS)
            fail(SID_E_ARG, "at most " + std::to_string(SID_FUSE_MAX_TENSORS) + " tensors and " +
                                std::to_string(SID_FUSE_MAX_METHODS) + " methods");
        for (uint32_t i : cut_before) {
            if (i >= cuts_.size()) fail(SID_E_ARG, "cut_before: there is no tensor " + std::to_string(i));
            cuts_[i] = 1;
        }
        const auto curve = [&](const Knots &from, size_t method, const char *stage) {
            if (from.empty()) fail(SID_E_ARG, "method " + std::to_string(method) + ": " + stage + " has no knots");
            std::vector<sid_knot> k;
            for (const auto &[x, ps] : from) k.push_back({x, ps});
            knots_.push_back(std::move(k));
            return sid_curve{knots_.back().data(), static_cast<uint32_t>(knots_.back().size())};
        };
        knots_.reserve(3 * methods.size());
        for (size_t m = 0; m < methods.size(); m++) {
            const auto &[encode, exchange, decode] = methods[m];
            methods_.push_back({encode ? curve(*encode, m, "encode") : sid_curve{}, curve(exchange, m, "exchange"),
                                decode ? curve(*decode, m, "decode") : sid_curve{}});
        }
        in_.n = static_cast<uint32_t>(bytes_.size());
        in_.backward_ps = backward_.data();
        in_.bytes = bytes_.data();
        in_.cut_before = cuts_.data();
        in_.forward_ps = forward_ps;
        in_.max_group_bytes = max_group_bytes;
        in_.n_methods = static_cast<uint32_t>(methods_.size());
        in_.methods = methods_.data();
        in_.overlap_permille = overlap_permille;
        in_.stolen_permille = stolen_permille;
        in_.decode_main = decode_main;
        sid_fuse_error err{};
        check(sid_fuse_check(&in_, &err), err);
    }
    Instance(const Instance &) = delete;
    Instance &operator=(const Instance &) = delete;

    py::dict fuse(const string &algorithm, const py::dict &options) const {
        std::vector<string> names; // keeps the settings' names alive
        std::vector<sid_fuse_setting> settings;
        std::vector<uint32_t> seed_ends;
        std::vector<uint8_t> seed_methods;
        names.reserve(options.size());
        for (const auto &[key, value] : options) {
            names.push_back(py::str(key));
            const string &name = names.back();
            try {
                if (name == "seed_ends")
                    seed_ends = py::cast<std::vector<uint32_t>>(value);
                else if (name == "seed_methods")
                    seed_methods = py::cast<std::vector<uint8_t>>(value);
                else
                    settings.push_back({name.c_str(), py::cast<int64_t>(value)});
            } catch (const py::cast_error &) {
                fail(SID_E_ARG, algorithm + ": " + name + " must be " +
                                    (name.rfind("seed_", 0) ? "an integer" : "a list of indices"));
            }
        }
        need_pair(seed_ends, seed_methods);
        const sid_fuse_request what{algorithm.c_str(),
                                    settings.data(),
                                    static_cast<uint32_t>(settings.size()),
                                    static_cast<uint32_t>(seed_ends.size()),
                                    seed_ends.data(),
                                    seed_methods.data()};
        std::vector<uint32_t> ends(in_.n);
        std::vector<uint8_t> methods(in_.n);
        sid_fusion out{};
        out.ends = ends.data();
        out.methods = methods.data();
        sid_fuse_error err{};
        size_t bytes = 0;
        check(sid_fuse(&in_, &what, nullptr, nullptr, &bytes, &err), err);
        const std::unique_ptr<void, Free> scratch(::operator new(bytes, std::align_val_t{64}));
        check(without_gil([&] { return sid_fuse(&in_, &what, &out, scratch.get(), &bytes, &err); }), err);
        ends.resize(out.groups);
        py::dict d;
        d["ends"] = ends;
        d["methods"] = std::vector<uint32_t>(methods.begin(), methods.begin() + out.groups);
        d["time_ps"] = out.time_ps;
        d["lower_bound_ps"] = out.lower_bound_ps;
        d["exact"] = out.exact != 0;
        d["work"] = out.work;
        return d;
    }

    py::dict evaluate(const std::vector<uint32_t> &ends, const std::vector<uint8_t> &methods) const {
        need_pair(ends, methods);
        std::vector<sid_row> rows(ends.size());
        int64_t time = 0;
        sid_fuse_error err{};
        check(sid_fuse_evaluate(&in_, static_cast<uint32_t>(ends.size()), ends.data(), methods.data(), &time,
                                rows.data(), &err),
              err);
        py::list timeline;
        for (const sid_row &r : rows)
            timeline.append(py::make_tuple(r.backward.start, r.backward.end, r.encode.start, r.encode.end,
                                           r.exchange.start, r.exchange.end, r.decode.start, r.decode.end));
        py::dict d;
        d["time_ps"] = time;
        d["timeline"] = timeline;
        return d;
    }

  private:
    static void need_pair(const std::vector<uint32_t> &ends, const std::vector<uint8_t> &methods) {
        if (ends.size() != methods.size())
            fail(SID_E_ARG, std::to_string(ends.size()) + " ends, but " + std::to_string(methods.size()) +
                                " methods: one of each a group");
    }

    std::vector<int64_t> backward_, bytes_;
    std::vector<uint8_t> cuts_;
    std::vector<std::vector<sid_knot>> knots_;
    std::vector<sid_method> methods_;
    sid_instance in_{};
};

py::dict describe(const sid_algorithm &a) {
    py::list options;
    for (const sid_fuse_option *o = a.options; o != a.options + a.n_options; o++) {
        py::dict d;
        d["name"] = o->name;
        d["default"] = o->dflt;
        d["min"] = o->min;
        d["max"] = o->max;
        d["doc"] = o->doc;
        options.append(d);
    }
    py::dict d;
    d["name"] = a.name;
    d["paper"] = a.paper;
    d["doc"] = a.doc;
    d["options"] = options;
    d["takes_seed"] = a.takes_seed != 0;
    return d;
}

} // namespace

PYBIND11_MODULE(_core, m) {
    m.doc() = "The C core of sidcomp. Pointers and CUDA streams are integers; calls release the GIL.";
    m.attr("version") = std::to_string(SID_VERSION / 10000) + "." + std::to_string(SID_VERSION / 100 % 100) + "." +
                        std::to_string(SID_VERSION % 100);
    m.attr("cuda_built") = sid_cuda_built() != 0;
    m.attr("cuda_early") = SID_CUDA_EARLY;
#ifdef SID_WITH_CUDA
    m.attr("cuda_archs") = SID_CUDA_ARCH;
#else
    m.attr("cuda_archs") = "";
#endif
    add_errors(m);

    m.def("codecs", [] {
        py::list all;
        for (uint32_t i = 0; const sid_info *c = sid_codec_at(i); i++) all.append(describe(*c, sid_has_cuda(c) != 0));
        return all;
    });
    m.def("memories", [] {
        py::list all;
        for (uint32_t i = 0; const sid_info *c = sid_memory_at(i); i++) all.append(describe(*c, sid_has_cuda(c) != 0));
        return all;
    });
    m.def("exchanges", [] {
        py::list all;
        for (uint32_t i = 0; const sid_info *e = sid_exchange_at(i); i++)
            all.append(describe(*e, sid_has_cuda(e) != 0));
        return all;
    });
    m.def("algorithms", [] {
        py::list all;
        for (uint32_t i = 0; const sid_algorithm *a = sid_algorithm_at(i); i++) all.append(describe(*a));
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
    py::class_<Exchange>(m, "Exchange")
        .def(py::init<const string &, const string &, const string &, int64_t, const string &, uint32_t, uint32_t,
                      const py::dict &, const std::optional<string> &>(),
             arg("exchange"), arg("codec"), arg("memory"), arg("n"), arg("dtype"), arg("rank"), arg("world"),
             arg("settings") = py::dict(), arg("isa") = py::none())
        .def_readonly("n", &Exchange::n)
        .def_readonly("rank", &Exchange::rank)
        .def_readonly("world", &Exchange::world)
        .def_property_readonly("k", [](const Exchange &x) { return x.sizes.k; })
        .def_property_readonly("state_bytes", [](const Exchange &x) { return x.sizes.state; })
        .def_property_readonly("work_bytes", [](const Exchange &x) { return x.sizes.work; })
        .def_property_readonly("wire_bytes", [](const Exchange &x) { return x.sizes.wire; })
        .def_property_readonly("sent_bytes", [](const Exchange &x) { return x.sizes.sent; })
        .def_property_readonly("control_bytes", [](const Exchange &x) { return x.sizes.control; })
        .def_property_readonly("rounds", [](const Exchange &x) { return x.sizes.rounds; })
        .def_property_readonly("vectors", [](const Exchange &x) { return x.sizes.vectors; })
        .def_property_readonly("shares",
                               [](const Exchange &x) {
                                   py::list all;
                                   for (uint32_t i = 0;; i++) {
                                       const sid_share s = sid_exchange_share(x.get(), i);
                                       if (!s.valid) return all;
                                       all.append(py::make_tuple(s.state, s.start, s.n, s.common != 0));
                                   }
                               })
        .def("messages", &Exchange::messages, arg("round"), arg("receive"))
        .def("advance", &Exchange::advance, arg("round"), arg("segments"), arg("state"), arg("work"), arg("wire"),
             py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("carry") = 1.0f, arg("origin") = 0)
        .def_property_readonly("has_meanwhile", &Exchange::has_meanwhile)
        .def("meanwhile", &Exchange::meanwhile, arg("round"), arg("segments"), arg("state"), arg("work"), arg("wire"),
             py::kw_only(), arg("step"), arg("seed"), arg("group"))
        .def("cuda_work_bytes", &Exchange::cuda_work_bytes)
        .def("cuda_advance", &Exchange::cuda_advance, arg("round"), arg("segments"), arg("n_segments"), arg("state"),
             arg("work"), arg("wire"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("carry") = 1.0f,
             arg("origin") = 0, arg("stats"), arg("report"), arg("device"), arg("stream"))
        .def("cuda_settle", &Exchange::cuda_settle, arg("segments"), arg("n_segments"), arg("state"), arg("work"),
             arg("wire"), py::kw_only(), arg("device"), arg("stream"))
        .def("cuda_unsend", &Exchange::cuda_unsend, arg("state"), py::kw_only(), arg("device"), arg("stream"))
        .def("cuda_checksum", &Exchange::cuda_checksum, arg("segments"), arg("n_segments"), arg("work"), py::kw_only(),
             arg("report"), arg("sum"), arg("device"), arg("stream"))
        .def("abandon", &Exchange::abandon, arg("segments"), arg("state"), arg("work"), arg("wire"), py::kw_only(),
             arg("step"), arg("seed"), arg("group"))
        .def("residual_out", &Exchange::residual_out, arg("state"), arg("out"))
        .def("residual_in", &Exchange::residual_in, arg("state"), arg("values"))
        .def("unsend", &Exchange::unsend, arg("state"))
        .def("forget", &Exchange::forget, arg("state"))
        .def("rescale", &Exchange::rescale, arg("state"), arg("factor"));

    m.attr("nccl_least") = static_cast<int>(SID_NCCL_LEAST);
    py::class_<Nccl>(m, "Nccl")
        .def(py::init<const std::optional<string> &>(), arg("path") = py::none())
        .def_property_readonly("version", [](const Nccl &n) { return sid_nccl_version(n.get()); })
        .def("unique_id", &Nccl::unique_id);

    py::class_<Communicator>(m, "Communicator")
        .def(py::init<const Nccl &, const py::bytes &, uint32_t, uint32_t, int, double>(), arg("nccl"), arg("id"),
             arg("rank"), arg("world"), py::kw_only(), arg("device"), arg("limit"), py::keep_alive<1, 2>())
        .def_readonly("rank", &Communicator::rank)
        .def_readonly("world", &Communicator::world)
        .def_readonly("device", &Communicator::device)
        .def("all_gather", &Communicator::all_gather, arg("mine"), arg("all"), arg("nbytes"), py::kw_only(),
             arg("stream"))
        .def("all_reduce", &Communicator::all_reduce, arg("mine"), arg("sum"), arg("count"), arg("dtype"),
             py::kw_only(), arg("stream"))
        .def("reduce_scatter", &Communicator::reduce_scatter, arg("all"), arg("mine"), arg("count"), arg("dtype"),
             py::kw_only(), arg("stream"))
        .def("messages", &Communicator::messages, arg("wire"), arg("sends"), arg("receives"), py::kw_only(),
             arg("stream"))
        .def("poll", &Communicator::poll)
        .def("leave", &Communicator::leave)
        .def("abort", &Communicator::abort, arg("why"));

    m.def("loopback", &loopback, arg("exchanges"), arg("segments"), arg("state"), arg("work"), arg("wire"),
          py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("carry") = 1.0f);

    py::class_<Plan>(m, "Plan")
        .def(py::init<const string &, const string &, int64_t, const string &, const py::dict &,
                      const std::optional<string> &, bool,
                      const std::optional<std::vector<std::pair<uint64_t, uint64_t>>> &>(),
             arg("codec"), arg("memory"), arg("n"), arg("dtype"), arg("settings") = py::dict(), arg("isa") = py::none(),
             arg("flush") = false, arg("shapes") = py::none())
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
        .def_property_readonly("body_dtype", [](const Plan &p) { return name_of(bodies, p.sizes.body_dtype); })
        .def_property_readonly("state_bytes", [](const Plan &p) { return p.sizes.state; })
        .def_property_readonly("work_bytes", [](const Plan &p) { return p.sizes.work; })
        .def_property_readonly("extra_bytes", [](const Plan &p) { return sid_plan_extra(p.get()); })
        .def_property_readonly("rounds", [](const Plan &p) { return p.sizes.rounds; })
        .def_property_readonly("ranks", [](const Plan &p) { return p.sizes.ranks; })
        .def_property_readonly("slices",
                               [](const Plan &p) {
                                   py::list all;
                                   for (uint32_t i = 0; p.has(SID_LINEAR) && i < p.sizes.rounds; i++) {
                                       const sid_slice s = sid_plan_round(p.get(), i);
                                       all.append(py::make_tuple(s.offset, s.count));
                                   }
                                   return all;
                               })
        .def_property_readonly("vectors", &Plan::vectors)
        .def("encode", &Plan::encode, arg("segments"), arg("state"), arg("work"), arg("payload"), py::kw_only(),
             arg("step"), arg("seed"), arg("group"), arg("rank"), arg("world"), arg("carry") = 1.0f, arg("origin") = 0)
        .def("next_round", &Plan::next_round, arg("round"), arg("segments"), arg("state"), arg("work"), arg("payload"),
             py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"), arg("world"))
        .def("decode", &Plan::decode, arg("payloads"), arg("stride"), arg("count"), arg("scale"), arg("segments"),
             arg("state"), py::kw_only(), arg("step"), arg("group"))
        .def("learn", &Plan::learn, arg("state"), arg("payload"))
        .def("check", &Plan::check_payload, arg("payload"), arg("nbytes"), py::kw_only(), arg("step") = -1,
             arg("group") = 0)
        .def("residual_out", &Plan::residual_out, arg("state"), arg("out"))
        .def("residual_in", &Plan::residual_in, arg("state"), arg("values"))
        .def("unsend", &Plan::unsend, arg("state"))
        .def("forget", &Plan::forget, arg("state"))
        .def("rescale", &Plan::rescale, arg("state"), arg("factor"))
        .def("cuda_work_bytes", &Plan::cuda_work_bytes)
        .def("cuda_encode", &Plan::cuda_encode, arg("segments"), arg("n_segments"), arg("state"), arg("work"),
             arg("payload"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"), arg("world"),
             arg("carry") = 1.0f, arg("origin") = 0, arg("stats"), arg("device"), arg("stream"))
        .def("cuda_next_round", &Plan::cuda_next_round, arg("round"), arg("segments"), arg("n_segments"), arg("state"),
             arg("work"), arg("payload"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"),
             arg("world"), arg("device"), arg("stream"))
        .def("cuda_decode", &Plan::cuda_decode, arg("payloads"), arg("stride"), arg("count"), arg("scale"),
             arg("segments"), arg("n_segments"), arg("state"), arg("work"), py::kw_only(), arg("step"), arg("group"),
             arg("report"), arg("device"), arg("stream"))
        .def("cuda_settle", &Plan::cuda_settle, arg("segments"), arg("n_segments"), arg("state"), arg("work"),
             arg("payload"), py::kw_only(), arg("device"), arg("stream"))
        .def("cuda_unsend", &Plan::cuda_unsend, arg("state"), py::kw_only(), arg("device"), arg("stream"))
        .def("cuda_checksum", &Plan::cuda_checksum, arg("segments"), arg("n_segments"), arg("work"), py::kw_only(),
             arg("report"), arg("sum"), arg("device"), arg("stream"));
    m.def(
        "cuda_show",
        [](Address report, uint32_t mark, Address seen, int device, Address stream) {
            sid_error err{};
            check(sid_cuda_show(pointer(report), mark, pointer(seen), device, pointer(stream), &err), err);
        },
        arg("report"), arg("mark"), arg("seen"), py::kw_only(), arg("device"), arg("stream"));
    m.attr("cuda_kept_bytes") = sizeof(sid_cuda_kept);
    m.def(
        "cuda_cancel",
        [](Address kept, uint32_t count, bool always, int device, Address stream) {
            sid_error err{};
            check(sid_cuda_cancel(pointer<const sid_cuda_kept>(kept), count, always, device, pointer(stream), &err),
                  err);
        },
        arg("kept"), arg("count"), py::kw_only(), arg("always"), arg("device"), arg("stream"));

    py::class_<DeviceGroup>(m, "DeviceGroup")
        .def(py::init<const Plan &, Address, uint32_t, Address, Address, Address, Address, Address, Address, Address>(),
             arg("plan"), arg("segments"), arg("n_segments"), arg("state"), arg("work"), arg("payload"),
             arg("incoming"), arg("stats"), arg("report"), arg("seen"), py::keep_alive<1, 2>())
        .def(py::init<const Exchange &, Address, uint32_t, Address, Address, Address, Address, Address, Address>(),
             arg("exchange"), arg("segments"), arg("n_segments"), arg("state"), arg("work"), arg("wire"), arg("stats"),
             arg("report"), arg("seen"), py::keep_alive<1, 2>())
        .def("step", &DeviceGroup::step, arg("communicator"), py::kw_only(), arg("step"), arg("seed"), arg("group"),
             arg("carry") = 1.0f, arg("origin") = 0, arg("stream"))
        .def("kept", &DeviceGroup::kept);

    py::class_<Instance>(m, "Instance", "A planning problem (csrc/fusion.h).")
        .def(py::init<int64_t, std::vector<int64_t>, std::vector<int64_t>, const std::vector<Instance::Method> &,
                      int64_t, const std::vector<uint32_t> &, uint32_t, uint32_t, bool>(),
             arg("forward_ps"), arg("backward_ps"), arg("bytes"), arg("methods"), arg("max_group_bytes") = 0,
             arg("cut_before") = std::vector<uint32_t>(), arg("overlap_permille") = 0, arg("stolen_permille") = 0,
             arg("decode_main") = false)
        .def("fuse", &Instance::fuse, arg("algorithm"), arg("options") = py::dict())
        .def("evaluate", &Instance::evaluate, arg("ends"), arg("methods"));

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
