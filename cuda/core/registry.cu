/* The table of codecs that have kernels: codecs.def, included twice, declares and lists them. No other file on this
 * side knows all codecs. No kernel is here. */
#include "codec.cuh"

#define CUDA_0(symbol)
#define CUDA_1(symbol)                                                                                                 \
    extern "C" const sid_codec sid_codec_##symbol;                                                                     \
    extern "C" const sid_cuda_codec sid_cuda_codec_##symbol;
#define SID_CODEC(symbol, cuda) CUDA_##cuda(symbol)
#include "codecs.def"
#undef CUDA_1

#define CUDA_1(symbol) {&sid_codec_##symbol, &sid_cuda_codec_##symbol},
static const struct {
    const sid_codec *codec;
    const sid_cuda_codec *cuda;
} codecs[] = {
#include "codecs.def"
};

const sid_cuda_codec *sid_cuda_codec_of(const sid_codec *c) {
    for (const auto &row : codecs)
        if (row.codec == c) return row.cuda;
    return nullptr;
}
