// The extension sidcomp._core: each part enters its concept's classes and functions. All are one translation unit, because
// reading and instantiating pybind11's templates in each takes several times as long.
#include "buffers.cpp"
#include "cuda.cpp"
#include "delta.cpp"
#include "errors.cpp"
#include "exchange.cpp"
#include "fusion.cpp"
#include "nccl.cpp"
#include "plan.cpp"
#include "registry.cpp"

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
    binding::bind_cuda(m); // after plan and exchange, whose classes it completes
    binding::bind_nccl(m);
    binding::bind_fusion(m);
}
