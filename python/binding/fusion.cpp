// The fusion planner: a planning problem, its solution, and the listing of algorithms.
#include "fusion.h"

#include <tuple>
#include <utility>

#include "common.hpp"

namespace binding {

namespace {

void check_fuse(sid_fuse_status s, const sid_fuse_error &err) {
    if (s != SID_FUSE_OK) fail(SID_E_ARG, err.text);
}

const sid_algorithm &find_algorithm(const string &name) {
    std::vector<string> valid;
    for (uint32_t i = 0; const sid_algorithm *a = sid_algorithm_at(i); i++) {
        if (name == a->name) return *a;
        valid.emplace_back(a->name);
    }
    fail(SID_E_ARG, "unknown algorithm '" + name + "'; there are: " + joined(valid));
}

void need_option(const sid_algorithm &a, const string &name) {
    if (name == "seed_ends" || name == "seed_methods") return;
    std::vector<string> valid;
    for (uint32_t i = 0; i < a.n_options; i++) {
        if (name == a.options[i].name) return;
        valid.emplace_back(a.options[i].name);
    }
    fail(SID_E_ARG, string(a.name) + " has no option '" + name + "'; it has: " + joined(valid));
}

class Instance {
  public:
    using Knots = std::vector<std::pair<int64_t, int64_t>>;
    using Method = std::tuple<std::optional<Knots>, Knots, std::optional<Knots>, std::optional<Knots>>;

    Instance(int64_t forward_ps, std::vector<int64_t> backward_ps, std::vector<int64_t> bytes,
             const std::vector<Method> &methods, int64_t max_group_bytes, const std::vector<uint32_t> &cut_before,
             uint32_t slowdown_permille, bool decode_main)
        : backward_(std::move(backward_ps)), bytes_(std::move(bytes)), cuts_(backward_.size()) {
        if (backward_.size() != bytes_.size())
            fail(SID_E_ARG, "there are " + std::to_string(backward_.size()) + " times of tensors, but " +
                                std::to_string(bytes_.size()) + " sizes");
        if (bytes_.size() > SID_FUSE_MAX_TENSORS || methods.size() > SID_FUSE_MAX_METHODS)
            fail(SID_E_ARG, "an instance has at most " + std::to_string(SID_FUSE_MAX_TENSORS) + " tensors and " +
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
        knots_.reserve(4 * methods.size());
        for (size_t m = 0; m < methods.size(); m++) {
            const auto &[encode, exchange, decode, delay] = methods[m];
            methods_.push_back({encode ? curve(*encode, m, "encode") : sid_curve{}, curve(exchange, m, "exchange"),
                                decode ? curve(*decode, m, "decode") : sid_curve{},
                                delay ? curve(*delay, m, "delay") : sid_curve{}});
        }
        in_.n = static_cast<uint32_t>(bytes_.size());
        in_.backward_ps = backward_.data();
        in_.bytes = bytes_.data();
        in_.cut_before = cuts_.data();
        in_.forward_ps = forward_ps;
        in_.max_group_bytes = max_group_bytes;
        in_.n_methods = static_cast<uint32_t>(methods_.size());
        in_.methods = methods_.data();
        in_.slowdown_permille = slowdown_permille;
        in_.decode_main = decode_main;
        sid_fuse_error err{};
        check_fuse(sid_fuse_check(&in_, &err), err);
    }
    Instance(const Instance &) = delete;
    Instance &operator=(const Instance &) = delete;

    py::dict fuse(const string &algorithm, const py::dict &options) const {
        const sid_algorithm &chosen = find_algorithm(algorithm);
        std::vector<string> names; // keeps the settings' names alive
        std::vector<sid_fuse_setting> settings;
        std::vector<uint32_t> seed_ends;
        std::vector<uint8_t> seed_methods;
        names.reserve(options.size());
        for (const auto &[key, value] : options) {
            names.push_back(py::str(key));
            const string &name = names.back();
            need_option(chosen, name);
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
        check_fuse(sid_fuse(&in_, &what, nullptr, nullptr, &bytes, &err), err);
        const Block scratch = make_block(bytes);
        check_fuse(without_gil([&] { return sid_fuse(&in_, &what, &out, scratch.get(), &bytes, &err); }), err);
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
        check_fuse(sid_fuse_evaluate(&in_, static_cast<uint32_t>(ends.size()), ends.data(), methods.data(), &time,
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
            fail(SID_E_ARG, "there are " + std::to_string(ends.size()) + " ends, but " +
                                std::to_string(methods.size()) + " methods: give one of each per group");
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
    return d;
}

} // namespace

void bind_fusion(py::module_ &m) {
    using py::arg;
    m.def("algorithms", [] {
        py::list all;
        for (uint32_t i = 0; const sid_algorithm *a = sid_algorithm_at(i); i++) all.append(describe(*a));
        return all;
    });
    py::class_<Instance>(m, "Instance", "A planning problem (csrc/fusion.h).")
        .def(py::init<int64_t, std::vector<int64_t>, std::vector<int64_t>, const std::vector<Instance::Method> &,
                      int64_t, const std::vector<uint32_t> &, uint32_t, bool>(),
             arg("forward_ps"), arg("backward_ps"), arg("bytes"), arg("methods"), arg("max_group_bytes") = 0,
             arg("cut_before") = std::vector<uint32_t>(), arg("slowdown_permille") = 0, arg("decode_main") = false)
        .def("fuse", &Instance::fuse, arg("algorithm"), arg("options") = py::dict())
        .def("evaluate", &Instance::evaluate, arg("ends"), arg("methods"));
}

} // namespace binding
