// NCCL, found at run time: the library, a rank's end of a communicator, and steps that are enqueued through it.
#include "exchange.hpp"
#include "plan.hpp"
#include "registry.hpp"
#include "sidcomp_nccl.h"

namespace binding {

namespace {

class Nccl {
  public:
    explicit Nccl(const std::optional<string> &path) {
        const char *file = path ? path->c_str() : nullptr;
        sid_error err{};
        size_t bytes = 0;
        check(sid_nccl_open(file, nullptr, &bytes, &err), err);
        memory_ = make_block(bytes);
        check(without_gil([&] { return sid_nccl_open(file, memory_.get(), &bytes, &err); }), err);
    }
    const sid_nccl *get() const { return static_cast<const sid_nccl *>(memory_.get()); }

    py::bytes unique_id() const {
        char id[SID_NCCL_ID_BYTES];
        run([&](sid_error *err) { return sid_nccl_unique_id(get(), id, err); });
        return {id, sizeof id};
    }

  private:
    Block memory_;
};

class Communicator {
  public:
    Communicator(const Nccl &nccl, const py::bytes &id, uint32_t of, uint32_t all, int on, double limit)
        : rank(of), world(all), device(on) {
        const string bytes_of_id = id;
        if (bytes_of_id.size() != SID_NCCL_ID_BYTES)
            fail(SID_E_ARG, "an id has " + std::to_string(SID_NCCL_ID_BYTES) + " bytes, not " +
                                std::to_string(bytes_of_id.size()));
        if (!(limit >= 0.001))
            fail(SID_E_ARG, "the time limit is " + std::to_string(limit) + " s: it must be at least 0.001");
        const uint32_t ms = limit < 4e6 ? static_cast<uint32_t>(limit * 1000) : UINT32_MAX;
        sid_error err{};
        size_t bytes = 0;
        check(sid_nccl_join(nccl.get(), bytes_of_id.data(), rank, world, device, ms, nullptr, &bytes, &err), err);
        memory_ = make_block(bytes);
        run([&](sid_error *e) {
            return sid_nccl_join(nccl.get(), bytes_of_id.data(), rank, world, device, ms, memory_.get(), &bytes, e);
        });
    }
    sid_nccl_comm *get() { return static_cast<sid_nccl_comm *>(memory_.get()); }

    void all_gather(Address in, Address out, uint64_t bytes, Address stream) {
        run([&](sid_error *err) {
            return sid_nccl_all_gather(get(), pointer(in), pointer(out), bytes, pointer(stream), err);
        });
    }
    using Reduction = sid_status (*)(sid_nccl_comm *, const void *, void *, uint64_t, sid_dtype, void *, sid_error *);
    void reduce(Reduction how, Address in, Address out, uint64_t count, const string &dtype, Address stream) {
        const sid_dtype d = dtype_of(dtype);
        run([&](sid_error *err) { return how(get(), pointer(in), pointer(out), count, d, pointer(stream), err); });
    }
    void messages(Address wire, const std::vector<Message> &sends, const std::vector<Message> &receives,
                  Address stream) {
        const auto table = [](const std::vector<Message> &from) {
            std::vector<sid_message> out;
            for (const auto &[peer, offset, bytes] : from) out.push_back({offset, bytes, peer, 0});
            return out;
        };
        const std::vector<sid_message> out = table(sends), in = table(receives);
        run([&](sid_error *err) {
            return sid_nccl_messages(get(), pointer(wire), out.data(), static_cast<uint32_t>(out.size()), in.data(),
                                     static_cast<uint32_t>(in.size()), pointer(stream), err);
        });
    }
    void poll() {
        run([&](sid_error *err) { return sid_nccl_poll(get(), err); });
    }
    void leave() {
        run([&](sid_error *err) { return sid_nccl_leave(get(), err); });
    }
    void abort(const string &why) {
        without_gil([&] { sid_nccl_abort(get(), why.c_str()); });
    }

    uint32_t rank, world;
    int device;

  private:
    Block memory_; // what NCCL has of it ends with leave or abort, or with the process
};

// A group's places on the device, so that a step takes three numbers.
class DeviceGroup {
  public:
    struct Places { // besides the buffers
        Address incoming, stats, report, shown;
    };
    DeviceGroup(const Plan &plan, const DeviceBuffers &b, const Places &also, bool in_place) : DeviceGroup(b, also) {
        group_.plan = plan.get();
        group_.in_place = in_place;
    }
    DeviceGroup(const Exchange &exchange, const DeviceBuffers &b, const Places &also) : DeviceGroup(b, also) {
        group_.exchange = exchange.get();
        room_.resize(2 * exchange.sizes.messages + 1);
        group_.room = room_.data();
    }
    DeviceGroup(const DeviceGroup &) = delete;
    DeviceGroup &operator=(const DeviceGroup &) = delete;

    void step(Communicator &c, const sid_step &step, Address stream) const {
        run([&](sid_error *err) { return sid_nccl_step(c.get(), &group_, &step, pointer(stream), err); });
    }

    py::bytes kept() const {
        std::vector<sid_cuda_kept> entries(sid_cuda_kept_by(&group_, nullptr, 0));
        sid_cuda_kept_by(&group_, entries.data(), static_cast<uint32_t>(entries.size()));
        return {reinterpret_cast<const char *>(entries.data()), entries.size() * sizeof entries[0]};
    }

  private:
    DeviceGroup(const DeviceBuffers &b, const Places &also) {
        group_.segs_dev = b.segs;
        group_.n_seg = b.n_seg;
        group_.state = b.state;
        group_.work = b.work;
        group_.payload = b.payload;
        group_.incoming = pointer(also.incoming);
        group_.stats_dev = pointer(also.stats);
        group_.report_dev = pointer(also.report);
        group_.shown = pointer(also.shown);
    }

    std::vector<sid_message> room_;
    sid_cuda_group group_{};
};

} // namespace

void bind_nccl(py::module_ &m) {
    using py::arg;
    py::class_<Nccl>(m, "Nccl")
        .def(py::init<const std::optional<string> &>(), arg("path") = py::none())
        .def_property_readonly("version", [](const Nccl &n) { return sid_nccl_version(n.get()); })
        .def("unique_id", &Nccl::unique_id);

    py::class_<Communicator> communicator(m, "Communicator");
    communicator
        .def(py::init<const Nccl &, const py::bytes &, uint32_t, uint32_t, int, double>(), arg("nccl"), arg("id"),
             arg("rank"), arg("world"), py::kw_only(), arg("device"), arg("limit"), py::keep_alive<1, 2>())
        .def_readonly("rank", &Communicator::rank)
        .def_readonly("world", &Communicator::world)
        .def_readonly("device", &Communicator::device)
        .def("all_gather", &Communicator::all_gather, arg("mine"), arg("all"), arg("nbytes"), py::kw_only(),
             arg("stream"))
        .def("messages", &Communicator::messages, arg("wire"), arg("sends"), arg("receives"), py::kw_only(),
             arg("stream"))
        .def("poll", &Communicator::poll)
        .def("leave", &Communicator::leave)
        .def("abort", &Communicator::abort, arg("why"));
    for (const auto &[name, how, in, out] : {std::make_tuple("all_reduce", sid_nccl_all_reduce, "mine", "sum"),
                                             std::make_tuple("average", sid_nccl_average, "mine", "mean"),
                                             std::make_tuple("reduce_scatter", sid_nccl_reduce_scatter, "all", "mine")})
        communicator.def(
            name,
            [how = how](Communicator &c, Address from, Address to, uint64_t count, const string &dtype,
                        Address stream) { c.reduce(how, from, to, count, dtype, stream); },
            arg(in), arg(out), arg("count"), arg("dtype"), py::kw_only(), arg("stream"));

    py::class_<DeviceGroup>(m, "DeviceGroup")
        .def(py::init([](const Plan &plan, const DeviceBuffers &buffers, Address incoming, Address stats,
                         Address report, Address shown, bool in_place) {
                 return std::make_unique<DeviceGroup>(plan, buffers,
                                                      DeviceGroup::Places{incoming, stats, report, shown}, in_place);
             }),
             arg("plan"), arg("buffers"), arg("incoming"), arg("stats"), arg("report"), arg("shown"),
             arg("in_place") = false, py::keep_alive<1, 2>())
        .def(py::init([](const Exchange &exchange, const DeviceBuffers &buffers, Address stats, Address report,
                         Address shown) {
                 return std::make_unique<DeviceGroup>(exchange, buffers, DeviceGroup::Places{0, stats, report, shown});
             }),
             arg("exchange"), arg("buffers"), arg("stats"), arg("report"), arg("shown"), py::keep_alive<1, 2>())
        .def(
            "step",
            [](const DeviceGroup &g, Communicator &c, uint64_t step, uint64_t seed, uint32_t group, float carry,
               int64_t origin,
               Address stream) { g.step(c, {step, seed, group, c.rank, c.world, carry, origin}, stream); },
            arg("communicator"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("carry") = 1.0f,
            arg("origin") = 0, arg("stream"))
        .def("kept", &DeviceGroup::kept);
}

} // namespace binding
