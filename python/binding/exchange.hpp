// One rank's part in an exchange of messages, and its calls on the host.
#ifndef SID_BINDING_EXCHANGE_HPP
#define SID_BINDING_EXCHANGE_HPP

#include <tuple>

#include "buffers.hpp"

namespace binding {

using Message = std::tuple<uint32_t, uint64_t, uint64_t>; // peer, offset and bytes in the wire block

class Exchange {
  public:
    Exchange(const string &name, const string &codec, const string &memory, int64_t count, const string &dtype,
             uint32_t of, uint32_t all, const py::dict &settings, const std::optional<string> &isa);

    const sid_exchange *get() const { return static_cast<const sid_exchange *>(memory_.get()); }

    // Room for as many segments as `n_seg`, which a call cuts into slices; kept, so that steps do not allocate.
    sid_segment *cut(uint32_t n_seg);
    py::list shares() const;
    std::vector<Message> messages(uint32_t round, bool receive) const;
    uint32_t vectors() const { return sizes.vectors; }
    bool has_meanwhile() const { return sid_exchange_has_meanwhile(get()) != 0; }

    bool advance(uint32_t round, const Buffers &b, const sid_step &step);
    void meanwhile(uint32_t round, const Buffers &b, const sid_step &step);
    void abandon(const Buffers &b, const sid_step &step);
    void *needed(Address state) const;

    sid_exchange_sizes sizes{};
    uint64_t n = 0;
    uint32_t rank = 0, world = 1;

  private:
    Block memory_;
    std::vector<sid_segment> cut_;
};

} // namespace binding

#endif
