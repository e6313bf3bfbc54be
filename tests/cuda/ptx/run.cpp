/* Launches one translated kernel with its arguments as bytes, for the tests of single instructions. */
#include "order.h"

extern "C" void ptx_run(emulate::translated kernel, const void *arguments, uint64_t bytes, uint32_t blocks,
                        uint32_t threads, uint64_t dynamic_bytes, int together) {
    auto *const call = new emulate::translated_call(kernel);
    memcpy(call->arguments, arguments, bytes);
    cudaLaunchAttribute cooperative = {cudaLaunchAttributeCooperative, {together, 0}};
    const cudaLaunchConfig_t config = {dim3(blocks), dim3(threads), dynamic_bytes, nullptr, &cooperative, 1};
    emulate::launch(config, call);
}
