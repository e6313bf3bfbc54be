// The device's calls: those of plans and exchanges, which they complete, and those of a whole step.
#include "exchange.hpp"
#include "plan.hpp"
#include "sidcomp_cuda.h"

namespace binding {

namespace {

// ---- plans -------------------------------------------------------------------------------------------------------

uint64_t work_bytes(const Plan &p) {
    uint64_t bytes = 0;
    sid_error err{};
    check(sid_cuda_work(p.get(), &bytes, &err), err);
    return bytes;
}

void encode(const Plan &p, const DeviceBuffers &b, const sid_step &step, Address stats, Stream to) {
    run([&](sid_error *err) {
        return sid_cuda_encode(p.get(), b.segs, b.n_seg, b.state, b.work, &step, b.payload, pointer(stats), to.device,
                               to.get(), err);
    });
}

void next_reduction(const Plan &p, uint32_t reduction, const DeviceBuffers &b, const sid_step &step, Stream to) {
    run([&](sid_error *err) {
        return sid_cuda_next_reduction(p.get(), reduction, b.segs, b.n_seg, b.state, b.work, &step, b.payload,
                                       to.device, to.get(), err);
    });
}

// b: the payload is not used
void decode(const Plan &p, const Payloads &from, const DeviceBuffers &b, const Expected &at, Address report,
            Stream to) {
    run([&](sid_error *err) {
        return sid_cuda_decode(p.get(), pointer(from.first), from.stride, from.count, from.scale, b.segs, b.n_seg,
                               b.state, b.work, at.get(), pointer(report), to.device, to.get(), err);
    });
}

// b: the segments are not used
void settle(const Plan &p, const DeviceBuffers &b, Stream to) {
    run([&](sid_error *err) { return sid_cuda_settle(p.get(), b.state, b.work, b.payload, to.device, to.get(), err); });
}

void unsend(const Plan &p, Address state, Stream to) {
    run([&](sid_error *err) { return sid_cuda_unsend(p.get(), pointer(state), to.device, to.get(), err); });
}

// b: state and payload are not used
void checksum(const Plan &p, const DeviceBuffers &b, Address report, Address sum, Stream to) {
    run([&](sid_error *err) {
        return sid_cuda_checksum(p.get(), b.segs, b.n_seg, b.work, pointer(report), pointer(sum), to.device, to.get(),
                                 err);
    });
}

// ---- exchanges ---------------------------------------------------------------------------------------------------

uint64_t work_bytes(const Exchange &x) {
    uint64_t bytes = 0;
    sid_error err{};
    check(sid_cuda_exchange_work(x.get(), &bytes, &err), err);
    return bytes;
}

void advance(const Exchange &x, uint32_t round, const DeviceBuffers &b, const sid_step &step, Address stats,
             Address report, Stream to) {
    run([&](sid_error *err) {
        return sid_cuda_exchange_advance(x.get(), round, b.segs, b.n_seg, b.state, b.work, &step, b.payload,
                                         pointer(stats), pointer(report), to.device, to.get(), err);
    });
}

void meanwhile(const Exchange &x, uint32_t round, const DeviceBuffers &b, const sid_step &step, Address stats,
               Address report, Stream to) {
    run([&](sid_error *err) {
        return sid_cuda_exchange_meanwhile(x.get(), round, b.segs, b.n_seg, b.state, b.work, &step, b.payload,
                                           pointer(stats), pointer(report), to.device, to.get(), err);
    });
}

void settle(const Exchange &x, const DeviceBuffers &b, Stream to) {
    run([&](sid_error *err) {
        return sid_cuda_exchange_settle(x.get(), b.state, b.work, b.payload, to.device, to.get(), err);
    });
}

void unsend(const Exchange &x, Address state, Stream to) {
    run([&](sid_error *err) { return sid_cuda_exchange_unsend(x.get(), pointer(state), to.device, to.get(), err); });
}

void checksum(const Exchange &x, const DeviceBuffers &b, Address report, Address sum, Stream to) {
    run([&](sid_error *err) {
        return sid_cuda_exchange_checksum(x.get(), b.segs, b.n_seg, b.work, pointer(report), pointer(sum), to.device,
                                          to.get(), err);
    });
}

// What a plan's and an exchange's class have alike.
template <class T> void bind_alike(py::class_<T> &c) {
    using py::arg;
    c.def("cuda_work_bytes", [](const T &t) { return work_bytes(t); });
    c.def(
        "cuda_settle",
        [](const T &t, const DeviceBuffers &buffers, int device, Address stream) {
            settle(t, buffers, {device, stream});
        },
        arg("buffers"), py::kw_only(), arg("device"), arg("stream"));
    c.def(
        "cuda_unsend",
        [](const T &t, Address state, int device, Address stream) { unsend(t, state, {device, stream}); }, arg("state"),
        py::kw_only(), arg("device"), arg("stream"));
    c.def(
        "cuda_checksum",
        [](const T &t, const DeviceBuffers &buffers, Address report, Address sum, int device, Address stream) {
            checksum(t, buffers, report, sum, {device, stream});
        },
        arg("buffers"), py::kw_only(), arg("report"), arg("sum"), arg("device"), arg("stream"));
}

// ---- a step's end ------------------------------------------------------------------------------------------------

// sidcomp.h, report_dev and sid_cuda_show: what a decode has reported.
struct ReportWords {
    uint32_t nonfinite, culprit;
    int32_t status;
    uint32_t mark;
};
static_assert(sizeof(ReportWords) == 16, "as sid_cuda_show writes it");

// A view of one in host memory that the device writes, and which therefore changes between two looks at it.
struct Report {
    explicit Report(Address address) : words(pointer<const volatile ReportWords>(address)) {
        need(pointer(address), sizeof(ReportWords), "report");
    }
    const volatile ReportWords *words;
};

std::pair<int, string> devices() {
    int count = 0;
    sid_error err{};
    const sid_status s = sid_cuda_devices(&count, &err);
    const bool usable = s == SID_OK && count > 0;
    const string reason = usable ? "" : err.text[0] ? err.text : sid_status_text(s);
    return {usable ? count : 0, reason};
}

} // namespace

void bind_cuda(py::module_ &m) {
    using py::arg;
    m.attr("cuda_built") = sid_cuda_built() != 0;
    m.attr("cuda_early") = SID_CUDA_EARLY;
    m.attr("cuda_beside") = SID_CUDA_BESIDE;
#ifdef SID_WITH_CUDA
    m.attr("cuda_archs") = SID_CUDA_ARCH;
#else
    m.attr("cuda_archs") = "";
#endif
    m.def("cuda_devices", devices);

    py::class_<Plan> plan(m.attr("Plan"));
    bind_alike(plan);
    plan.def(
        "cuda_encode",
        [](const Plan &p, const DeviceBuffers &buffers, uint64_t step, uint64_t seed, uint32_t group, uint32_t rank,
           uint32_t world, float carry, int64_t origin, Address stats, int device, Address stream) {
            encode(p, buffers, {step, seed, group, rank, world, carry, origin}, stats, {device, stream});
        },
        arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"), arg("world"),
        arg("carry") = 1.0f, arg("origin") = 0, arg("stats"), arg("device"), arg("stream"));
    plan.def(
        "cuda_next_reduction",
        [](const Plan &p, uint32_t reduction, const DeviceBuffers &buffers, uint64_t step, uint64_t seed,
           uint32_t group, uint32_t rank, uint32_t world, int device, Address stream) {
            next_reduction(p, reduction, buffers, {step, seed, group, rank, world, 1, 0}, {device, stream});
        },
        arg("reduction"), arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"),
        arg("world"), arg("device"), arg("stream"));
    plan.def(
        "cuda_decode",
        [](const Plan &p, Address payloads, uint64_t stride, uint32_t count, float scale, const DeviceBuffers &buffers,
           int64_t step, uint32_t group, Address report, int device, Address stream) {
            decode(p, {payloads, stride, count, scale}, buffers, {step, group}, report, {device, stream});
        },
        arg("payloads"), arg("stride"), arg("count"), arg("scale"), arg("buffers"), py::kw_only(), arg("step"),
        arg("group"), arg("report"), arg("device"), arg("stream"));

    py::class_<Exchange> exchange(m.attr("Exchange"));
    bind_alike(exchange);
    exchange.def(
        "cuda_advance",
        [](const Exchange &x, uint32_t round, const DeviceBuffers &buffers, uint64_t step, uint64_t seed,
           uint32_t group, float carry, int64_t origin, Address stats, Address report, int device, Address stream) {
            advance(x, round, buffers, {step, seed, group, x.rank, x.world, carry, origin}, stats, report,
                    {device, stream});
        },
        arg("round"), arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("carry") = 1.0f,
        arg("origin") = 0, arg("stats"), arg("report"), arg("device"), arg("stream"));
    exchange.def(
        "cuda_meanwhile",
        [](const Exchange &x, uint32_t round, const DeviceBuffers &buffers, uint64_t step, uint64_t seed,
           uint32_t group, float carry, int64_t origin, Address stats, Address report, int device, Address stream) {
            meanwhile(x, round, buffers, {step, seed, group, x.rank, x.world, carry, origin}, stats, report,
                      {device, stream});
        },
        arg("round"), arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("carry") = 1.0f,
        arg("origin") = 0, arg("stats"), arg("report"), arg("device"), arg("stream"));

    m.attr("cuda_report_bytes") = sizeof(ReportWords);
    py::class_<Report>(m, "Report", "What a step has reported to host memory that the device writes.")
        .def(py::init<Address>(), arg("address"))
        .def_property_readonly("nonfinite", [](const Report &r) { return r.words->nonfinite != 0; })
        .def_property_readonly("culprit", [](const Report &r) { return r.words->culprit; })
        .def_property_readonly("status", [](const Report &r) { return r.words->status; })
        .def_property_readonly("mark", [](const Report &r) { return r.words->mark; });
    m.def(
        "cuda_show",
        [](Address report, uint32_t mark, Address shown, int device, Address stream) {
            sid_error err{};
            check(sid_cuda_show(pointer(report), mark, pointer(shown), device, pointer(stream), &err), err);
        },
        arg("report"), arg("mark"), arg("shown"), py::kw_only(), arg("device"), arg("stream"));
    m.attr("cuda_kept_bytes") = sizeof(sid_cuda_kept);
    m.def(
        "cuda_cancel",
        [](Address kept, uint32_t count, bool always, int device, Address stream) {
            sid_error err{};
            check(sid_cuda_cancel(pointer<const sid_cuda_kept>(kept), count, always, device, pointer(stream), &err),
                  err);
        },
        arg("kept"), arg("count"), py::kw_only(), arg("always"), arg("device"), arg("stream"));
}

} // namespace binding
