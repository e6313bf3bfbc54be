#include "plan.hpp"

#include "registry.hpp"

namespace binding {

Plan::Plan(const string &codec, const string &memory, int64_t count, const string &dtype_name, const py::dict &settings,
           const std::optional<string> &isa, bool flush, const std::optional<Shapes> &shapes) {
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
    memory_ = make_block(bytes);
    check(sid_plan_make(&config, memory_.get(), &bytes, &err), err);
    sizes = sid_plan_sizes(get());
    n = config.n;
    dtype = config.dtype;
}

py::list Plan::slices() const {
    py::list all;
    for (uint32_t i = 0; has(SID_LINEAR) && i < sizes.reductions; i++) {
        const sid_slice s = sid_plan_slice(get(), i);
        all.append(py::make_tuple(s.offset, s.count));
    }
    return all;
}

void Plan::need_all(const Buffers &b) const {
    need(b.state, sizes.state, "state");
    need(b.work, sizes.work, "work");
    need(b.payload, sizes.payload, "payload");
}

void *Plan::needed(Address state) const {
    need(pointer(state), sizes.state, "state");
    return pointer(state);
}

// ---- a step ------------------------------------------------------------------------------------------------------

sid_stats Plan::encode(const Buffers &b, const sid_step &step) const {
    need_all(b);
    sid_stats stats{};
    check(without_gil([&] { return sid_encode(get(), b.segs, b.n_seg, b.state, b.work, &step, b.payload, &stats); }));
    return stats;
}

void Plan::next_reduction(uint32_t reduction, const Buffers &b, const sid_step &step) const {
    need_all(b);
    check(without_gil(
        [&] { return sid_next_reduction(get(), reduction, b.segs, b.n_seg, b.state, b.work, &step, b.payload); }));
}

bool Plan::decode(const Payloads &from, const Buffers &b, const Expected &at) const {
    need(pointer(from.first), from.count ? sizes.payload : 0, "payloads");
    sid_report report{};
    sid_error err{};
    const sid_status s = without_gil([&] {
        return sid_decode(get(), pointer(from.first), from.stride, from.count, from.scale, b.segs, b.n_seg, b.state,
                          at.get(), &report, &err);
    });
    check(s, err, report.culprit);
    return report.nonfinite != 0;
}

bool Plan::decode_list(const std::vector<Address> &payloads, float scale, const Buffers &b, const Expected &at) const {
    std::vector<const void *> places;
    for (const Address a : payloads) {
        need(pointer(a), sizes.payload, "payload");
        places.push_back(pointer(a));
    }
    sid_report report{};
    sid_error err{};
    const sid_status s = without_gil([&] {
        return sid_decode_list(get(), places.data(), static_cast<uint32_t>(places.size()), scale, b.segs, b.n_seg,
                               b.state, at.get(), &report, &err);
    });
    check(s, err, report.culprit);
    return report.nonfinite != 0;
}

void Plan::learn(Address state, Address payload) const {
    void *const of = needed(state);
    need(pointer(payload), sizes.payload, "payload");
    check(without_gil([&] { return sid_learn(get(), of, pointer(payload)); }));
}

void Plan::check_payload(Address payload, uint64_t bytes, const Expected &at) const {
    need(pointer(payload), bytes, "payload");
    sid_error err{};
    const sid_status s = without_gil([&] { return sid_check(get(), pointer(payload), bytes, at.get(), &err); });
    check(s, err, 0u);
}

void bind_plan(py::module_ &m) {
    using py::arg;
    py::class_<Plan> plan(m, "Plan");
    plan.def(py::init<const string &, const string &, int64_t, const string &, const py::dict &,
                      const std::optional<string> &, bool, const std::optional<Plan::Shapes> &>(),
             arg("codec"), arg("memory"), arg("n"), arg("dtype"), arg("settings") = py::dict(), arg("isa") = py::none(),
             arg("flush") = false, arg("shapes") = py::none())
        .def_property_readonly("codec", [](const Plan &p) { return sid_plan_codec(p.get())->name; })
        .def_property_readonly("memory", [](const Plan &p) { return sid_plan_memory(p.get())->name; })
        .def_readonly("n", &Plan::n)
        .def_property_readonly("k", [](const Plan &p) { return p.sizes.k; })
        .def_property_readonly("dtype", [](const Plan &p) { return name_of_dtype(p.dtype); })
        .def_property_readonly("isa", [](const Plan &p) { return sid_plan_isa(p.get()); })
        .def_property_readonly("linear", [](const Plan &p) { return p.has(SID_LINEAR); })
        .def_property_readonly("lossless", [](const Plan &p) { return p.has(SID_LOSSLESS); })
        .def_property_readonly("payload_bytes", [](const Plan &p) { return p.sizes.payload; })
        .def_property_readonly("body_offset", [](const Plan &p) { return p.sizes.body_offset; })
        .def_property_readonly("body_count", [](const Plan &p) { return p.sizes.body_count; })
        .def_property_readonly("body_dtype", [](const Plan &p) { return name_of_body(p.sizes.body_dtype); })
        .def_property_readonly("state_bytes", [](const Plan &p) { return p.sizes.state; })
        .def_property_readonly("work_bytes", [](const Plan &p) { return p.sizes.work; })
        .def_property_readonly("conserves", [](const Plan &p) { return sid_plan_conserves(p.get()) != 0; })
        .def_property_readonly("extra_bytes", [](const Plan &p) { return sid_plan_extra(p.get()); })
        .def_property_readonly("reductions", [](const Plan &p) { return p.sizes.reductions; })
        .def_property_readonly("ranks", [](const Plan &p) { return p.sizes.ranks; })
        .def_property_readonly("slices", &Plan::slices)
        .def_property_readonly("vectors", &Plan::vectors)
        .def(
            "encode",
            [](const Plan &p, const Buffers &buffers, uint64_t step, uint64_t seed, uint32_t group, uint32_t rank,
               uint32_t world, float carry,
               int64_t origin) { return p.encode(buffers, {step, seed, group, rank, world, carry, origin}); },
            arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"), arg("world"),
            arg("carry") = 1.0f, arg("origin") = 0)
        .def(
            "next_reduction",
            [](const Plan &p, uint32_t reduction, const Buffers &buffers, uint64_t step, uint64_t seed, uint32_t group,
               uint32_t rank,
               uint32_t world) { p.next_reduction(reduction, buffers, {step, seed, group, rank, world, 1, 0}); },
            arg("reduction"), arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"),
            arg("world"))
        .def(
            "decode",
            [](const Plan &p, Address payloads, uint64_t stride, uint32_t count, float scale, const Buffers &buffers,
               int64_t step,
               uint32_t group) { return p.decode({payloads, stride, count, scale}, buffers, {step, group}); },
            arg("payloads"), arg("stride"), arg("count"), arg("scale"), arg("buffers"), py::kw_only(), arg("step"),
            arg("group"))
        .def(
            "decode_list",
            [](const Plan &p, const std::vector<Address> &payloads, float scale, const Buffers &buffers, int64_t step,
               uint32_t group) { return p.decode_list(payloads, scale, buffers, {step, group}); },
            arg("payloads"), arg("scale"), arg("buffers"), py::kw_only(), arg("step"), arg("group"))
        .def("learn", &Plan::learn, arg("state"), arg("payload"))
        .def(
            "check",
            [](const Plan &p, Address payload, uint64_t nbytes, int64_t step, uint32_t group) {
                p.check_payload(payload, nbytes, {step, group});
            },
            arg("payload"), arg("nbytes"), py::kw_only(), arg("step") = -1, arg("group") = 0);
    bind_kept(plan, sid_residual_out, sid_residual_in, sid_unsend, sid_forget, sid_rescale);
}

} // namespace binding
