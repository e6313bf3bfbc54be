// One codec with one memory over one group, and its calls on the host.
#ifndef SID_BINDING_PLAN_HPP
#define SID_BINDING_PLAN_HPP

#include <utility>

#include "buffers.hpp"

namespace binding {

// The step and group that a payload must be of; step < 0: any.
class Expected {
  public:
    Expected(int64_t step, uint32_t group) : any_(step < 0) {
        at_.step = any_ ? 0 : static_cast<uint64_t>(step);
        at_.group = group;
        at_.world = 1;
    }
    const sid_step *get() const { return any_ ? nullptr : &at_; }

  private:
    sid_step at_{};
    bool any_;
};

// The payloads of a decode, in the order of their ranks.
struct Payloads {
    Address first;
    uint64_t stride; // bytes from one to the next
    uint32_t count;
    float scale; // of their sum
};

class Plan {
  public:
    using Shapes = std::vector<std::pair<uint64_t, uint64_t>>; // elements and columns of each tensor

    Plan(const string &codec, const string &memory, int64_t count, const string &dtype_name, const py::dict &settings,
         const std::optional<string> &isa, bool flush, const std::optional<Shapes> &shapes);

    const sid_plan *get() const { return static_cast<const sid_plan *>(memory_.get()); }
    bool has(uint32_t trait) const { return (sid_plan_codec(get())->traits & trait) != 0; }
    uint32_t vectors() const { return sid_memory_vectors(get()); }
    py::list slices() const;

    sid_stats encode(const Buffers &b, const sid_step &step) const;
    void next_reduction(uint32_t reduction, const Buffers &b, const sid_step &step) const;
    bool decode(const Payloads &from, const Buffers &b, const Expected &step) const; // b: work and payload are not used
    bool decode_list(const std::vector<Address> &payloads, float scale, const Buffers &b, const Expected &step) const;
    void learn(Address state, Address payload) const;
    void check_payload(Address payload, uint64_t bytes, const Expected &step) const;
    void *needed(Address state) const;

    sid_sizes sizes{};
    uint64_t n = 0;
    sid_dtype dtype = SID_F32;

  private:
    void need_all(const Buffers &b) const; // raises if it lacks anything that a step works on

    Block memory_;
};

} // namespace binding

#endif
