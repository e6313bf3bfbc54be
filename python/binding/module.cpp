// The extension sidcomp._core: each file enters its own part (common.hpp).
#include "common.hpp"

PYBIND11_MODULE(_core, m) {
    m.doc() = "The C core of sidcomp. Pointers and CUDA streams are integers; calls release the GIL.";
    m.attr("version") = std::to_string(SID_VERSION / 10000) + "." + std::to_string(SID_VERSION / 100 % 100) + "." +
                        std::to_string(SID_VERSION % 100);
    binding::bind_errors(m);
    binding::bind_registry(m);
    binding::bind_buffers(m);
    binding::bind_delta(m);
    binding::bind_plan(m);
    binding::bind_exchange(m);
    binding::bind_cuda(m);
    binding::bind_nccl(m);
    binding::bind_fusion(m);
}
