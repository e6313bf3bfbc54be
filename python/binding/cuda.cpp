// The device's calls: those of plans and exchanges, which they complete, and those of a whole step.
#include "exchange.hpp"
#include "plan.hpp"
#include "sidcomp_cuda.h"

namespace binding {

namespace {

// What a plan's and an exchange's class have alike; the functions are the core's of the one or of the other.
template <class T, class Work, class Settle, class Unsend, class Checksum>
void bind_alike(py::class_<T> &c, Work work, Settle settle, Unsend unsend, Checksum checksum) {
    using py::arg;
    c.def("cuda_work_bytes", [work](const T &t) {
        uint64_t bytes = 0;
        sid_error err{};
        check(work(t.get(), &bytes, &err), err);
        return bytes;
    });
    c.def(
        "cuda_settle", // the segments are not used
        [settle](const T &t, const DeviceBuffers &b, int device, Address stream) {
            run([&](sid_error *err) {
                return settle(t.get(), b.state, b.work, b.payload, device, pointer(stream), err);
            });
        },
        arg("buffers"), py::kw_only(), arg("device"), arg("stream"));
    c.def(
        "cuda_unsend",
        [unsend](const T &t, Address state, int device, Address stream) {
            run([&](sid_error *err) { return unsend(t.get(), pointer(state), device, pointer(stream), err); });
        },
        arg("state"), py::kw_only(), arg("device"), arg("stream"));
    c.def(
        "cuda_checksum", // state and payload are not used
        [checksum](const T &t, const DeviceBuffers &b, Address report, Address sum, int device, Address stream) {
            run([&](sid_error *err) {
                return checksum(t.get(), b.segs, b.n_seg, b.work, pointer(report), pointer(sum), device,
                                pointer(stream), err);
            });
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

// A view of the last ones in host memory that the device writes, and which therefore change between two looks at them.
struct Reports {
    explicit Reports(Address address) : entry(pointer<const volatile ReportWords>(address)) {
        need(pointer(address), SID_CUDA_SHOWN * sizeof(ReportWords), "reports");
    }
    // The one with the highest mark up to `mark`; or one of zeros.
    ReportWords upto(uint32_t mark) const {
        ReportWords best{};
        uint32_t least = UINT32_MAX / 2; // behind it are marks above
        for (int i = 0; i < SID_CUDA_SHOWN; i++) {
            const ReportWords x{entry[i].nonfinite, entry[i].culprit, entry[i].status, entry[i].mark};
            if (!x.mark || mark - x.mark > least) continue;
            least = mark - x.mark;
            best = x;
        }
        return best;
    }
    const volatile ReportWords *entry;
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
    bind_alike(plan, sid_cuda_work, sid_cuda_settle, sid_cuda_unsend, sid_cuda_checksum);
    plan.def(
        "cuda_encode",
        [](const Plan &p, const DeviceBuffers &b, uint64_t step, uint64_t seed, uint32_t group, uint32_t rank,
           uint32_t world, float carry, int64_t origin, Address stats, int device, Address stream) {
            const sid_step at{step, seed, group, rank, world, carry, origin};
            run([&](sid_error *err) {
                return sid_cuda_encode(p.get(), b.segs, b.n_seg, b.state, b.work, &at, b.payload, pointer(stats),
                                       device, pointer(stream), err);
            });
        },
        arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"), arg("world"),
        arg("carry") = 1.0f, arg("origin") = 0, arg("stats"), arg("device"), arg("stream"));
    plan.def(
        "cuda_next_reduction",
        [](const Plan &p, uint32_t reduction, const DeviceBuffers &b, uint64_t step, uint64_t seed, uint32_t group,
           uint32_t rank, uint32_t world, int device, Address stream) {
            const sid_step at{step, seed, group, rank, world, 1, 0};
            run([&](sid_error *err) {
                return sid_cuda_next_reduction(p.get(), reduction, b.segs, b.n_seg, b.state, b.work, &at, b.payload,
                                               device, pointer(stream), err);
            });
        },
        arg("reduction"), arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("rank"),
        arg("world"), arg("device"), arg("stream"));
    plan.def(
        "cuda_decode", // the buffers' payload is not used
        [](const Plan &p, Address payloads, uint64_t stride, uint32_t count, float scale, const DeviceBuffers &b,
           int64_t step, uint32_t group, Address report, int device, Address stream) {
            const Expected at(step, group);
            run([&](sid_error *err) {
                return sid_cuda_decode(p.get(), pointer(payloads), stride, count, scale, b.segs, b.n_seg, b.state,
                                       b.work, at.get(), pointer(report), device, pointer(stream), err);
            });
        },
        arg("payloads"), arg("stride"), arg("count"), arg("scale"), arg("buffers"), py::kw_only(), arg("step"),
        arg("group"), arg("report"), arg("device"), arg("stream"));

    py::class_<Exchange> exchange(m.attr("Exchange"));
    bind_alike(exchange, sid_cuda_exchange_work, sid_cuda_exchange_settle, sid_cuda_exchange_unsend,
               sid_cuda_exchange_checksum);
    for (const auto &[name, call] : {std::pair{"cuda_advance", &sid_cuda_exchange_advance},
                                     std::pair{"cuda_meanwhile", &sid_cuda_exchange_meanwhile}})
        exchange.def(
            name,
            [call = call](const Exchange &x, uint32_t round, const DeviceBuffers &b, uint64_t step, uint64_t seed,
                          uint32_t group, float carry, int64_t origin, Address stats, Address report, int device,
                          Address stream) {
                const sid_step at{step, seed, group, x.rank, x.world, carry, origin};
                run([&](sid_error *err) {
                    return call(x.get(), round, b.segs, b.n_seg, b.state, b.work, &at, b.payload, pointer(stats),
                                pointer(report), device, pointer(stream), err);
                });
            },
            arg("round"), arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("carry") = 1.0f,
            arg("origin") = 0, arg("stats"), arg("report"), arg("device"), arg("stream"));

    m.attr("cuda_report_bytes") = sizeof(ReportWords);
    m.attr("cuda_shown_bytes") = SID_CUDA_SHOWN * sizeof(ReportWords);
    py::class_<Reports>(m, "Reports", "What the last steps have reported to host memory that the device writes.")
        .def(py::init<Address>(), arg("address"))
        .def(
            "upto",
            [](const Reports &r, uint32_t mark) {
                const ReportWords x = r.upto(mark);
                return std::make_tuple(x.nonfinite != 0, x.culprit, x.status, x.mark);
            },
            arg("mark"));
    m.def(
        "cuda_show",
        [](Address report, uint32_t mark, Address shown, int device, Address stream) {
            sid_error err{};
            check(sid_cuda_show(pointer(report), mark, pointer(shown), device, pointer(stream), &err), err);
        },
        arg("report"), arg("mark"), arg("shown"), py::kw_only(), arg("device"), arg("stream"));
    m.def(
        "cuda_upload",
        [](Address to, const py::bytes &data, int device, Address stream) {
            const std::string_view from = data;
            sid_error err{};
            check(sid_cuda_upload(pointer(to), from.data(), from.size(), device, pointer(stream), &err), err);
        },
        arg("to"), arg("data"), py::kw_only(), arg("device"), arg("stream"));
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
