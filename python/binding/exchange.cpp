#include "exchange.hpp"

#include <algorithm>
#include <functional>

#include "registry.hpp"

namespace binding {

Exchange::Exchange(const string &name, const string &codec, const string &memory, int64_t count, const string &dtype,
                   uint32_t of, uint32_t all, const py::dict &settings, const std::optional<string> &isa)
    : rank(of), world(all) {
    const sid_info &e = find(sid_exchange_at, name, "exchange");
    const Config given(codec, memory, count, dtype, settings, isa, &e);
    const sid_exchange_config config{e.name, &given.it, of, all};
    sid_error err{};
    size_t bytes = 0;
    check(sid_exchange_make(&config, nullptr, &bytes, &err), err);
    memory_ = make_block(bytes);
    check(sid_exchange_make(&config, memory_.get(), &bytes, &err), err);
    sizes = sid_exchange_sizes_of(get());
    n = given.it.n;
}

sid_segment *Exchange::cut(uint32_t n_seg) {
    if (cut_.size() < n_seg) cut_.resize(n_seg);
    return cut_.data();
}

py::list Exchange::shares() const {
    py::list all;
    for (uint32_t i = 0;; i++) {
        const sid_share s = sid_exchange_share(get(), i);
        if (!s.valid) return all;
        all.append(py::make_tuple(s.state, s.start, s.n, s.common != 0));
    }
}

std::vector<Message> Exchange::messages(uint32_t round, bool receive) const {
    std::vector<sid_message> room(sizes.messages + 1);
    const uint32_t count = sid_exchange_messages(get(), round, receive, room.data());
    std::vector<Message> out;
    for (uint32_t i = 0; i < count; i++) out.emplace_back(room[i].peer, room[i].offset, room[i].bytes);
    return out;
}

void *Exchange::needed(Address state) const {
    need(pointer(state), sizes.state, "state");
    return pointer(state);
}

// ---- a step ------------------------------------------------------------------------------------------------------

bool Exchange::advance(uint32_t round, const Buffers &b, const sid_step &step) {
    sid_report report{};
    sid_error err{};
    sid_segment *room = cut(b.n_seg);
    const sid_status s = without_gil([&] {
        return sid_exchange_advance(get(), round, b.segs, b.n_seg, room, b.state, b.work, &step, b.payload, &report,
                                    &err);
    });
    check(s, err, report.culprit);
    return report.nonfinite != 0;
}

void Exchange::meanwhile(uint32_t round, const Buffers &b, const sid_step &step) {
    sid_segment *room = cut(b.n_seg);
    check(without_gil([&] {
        return sid_exchange_meanwhile(get(), round, b.segs, b.n_seg, room, b.state, b.work, &step, b.payload);
    }));
}

void Exchange::abandon(const Buffers &b, const sid_step &step) {
    sid_segment *room = cut(b.n_seg);
    check(without_gil(
        [&] { return sid_exchange_abandon(get(), b.segs, b.n_seg, room, b.state, b.work, &step, b.payload); }));
}

// ---- all ranks in this process -----------------------------------------------------------------------------------

namespace {

template <class T> using Each = std::vector<std::reference_wrapper<T>>; // one of each rank; none is None

// One step: whether it was not finite, what each rank sent, and how much of that was control messages.
py::tuple loopback(const Each<Exchange> &ranks, const Each<Buffers> &buffers, sid_step step) {
    std::vector<sid_rank> all;
    uint32_t most = 0;
    for (size_t r = 0; r < ranks.size(); r++) {
        Exchange &x = ranks[r];
        const Buffers &b = buffers[r];
        sid_rank one{};
        one.exchange = x.get();
        one.seg = b.segs;
        one.n_seg = b.n_seg;
        one.cut = x.cut(b.n_seg);
        one.state = b.state;
        one.work = b.work;
        one.wire = b.payload;
        all.push_back(one);
        most = std::max(most, x.sizes.messages);
    }
    std::vector<sid_message> room(2 * (most + 1));
    step.world = static_cast<uint32_t>(ranks.size());
    sid_report report{};
    sid_error err{};
    const sid_status s = without_gil([&] { return sid_loopback(all.data(), room.data(), &step, &report, &err); });
    check(s, err, report.culprit);
    std::vector<uint64_t> sent, control;
    for (const sid_rank &one : all) {
        sent.push_back(one.sent);
        control.push_back(one.control);
    }
    return py::make_tuple(report.nonfinite != 0, sent, control);
}

} // namespace

void bind_exchange(py::module_ &m) {
    using py::arg;
    py::class_<Exchange> exchange(m, "Exchange");
    exchange
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
        .def_property_readonly("encoded", [](const Exchange &x) { return x.sizes.encoded; })
        .def_property_readonly("decoded", [](const Exchange &x) { return x.sizes.decoded; })
        .def_property_readonly("merged", [](const Exchange &x) { return x.sizes.merged; })
        .def_property_readonly("in_node", [](const Exchange &x) { return x.sizes.in_node; })
        .def_property_readonly("ring_passes", [](const Exchange &x) { return x.sizes.ring_passes; })
        .def_property_readonly("rounds", [](const Exchange &x) { return x.sizes.rounds; })
        .def_property_readonly("vectors", &Exchange::vectors)
        .def_property_readonly("shares", &Exchange::shares)
        .def("messages", &Exchange::messages, arg("round"), arg("receive"))
        .def(
            "advance",
            [](Exchange &x, uint32_t round, const Buffers &buffers, uint64_t step, uint64_t seed, uint32_t group,
               float carry, int64_t origin) {
                return x.advance(round, buffers, {step, seed, group, x.rank, x.world, carry, origin});
            },
            arg("round"), arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("carry") = 1.0f,
            arg("origin") = 0)
        .def_property_readonly("has_meanwhile", &Exchange::has_meanwhile)
        .def(
            "meanwhile",
            [](Exchange &x, uint32_t round, const Buffers &buffers, uint64_t step, uint64_t seed, uint32_t group) {
                // advance(0) has applied its carry to what is kept
                x.meanwhile(round, buffers, {step, seed, group, x.rank, x.world, 1, 0});
            },
            arg("round"), arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"))
        .def(
            "abandon",
            [](Exchange &x, const Buffers &buffers, uint64_t step, uint64_t seed, uint32_t group) {
                x.abandon(buffers, {step, seed, group, x.rank, x.world, 1, 0});
            },
            arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"));
    bind_kept(exchange, sid_exchange_residual_out, sid_exchange_residual_in, sid_exchange_unsend, sid_exchange_forget,
              sid_exchange_rescale);

    m.def(
        "loopback",
        [](const Each<Exchange> &exchanges, const Each<Buffers> &buffers, uint64_t step, uint64_t seed, uint32_t group,
           float carry) {
            if (exchanges.empty() || buffers.size() != exchanges.size())
                fail(SID_E_ARG, "a loopback needs at least one rank, and Buffers for each rank");
            return loopback(exchanges, buffers, {step, seed, group, 0, 1, carry, 0});
        },
        arg("exchanges"), arg("buffers"), py::kw_only(), arg("step"), arg("seed"), arg("group"), arg("carry") = 1.0f);
}

} // namespace binding
