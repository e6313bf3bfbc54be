"""The layouts in memory that _core exports, so that Python need not repeat the C structs by hand."""

import struct

import pytest
from buffers import Block
from sidcomp import _core


def test_read_stats_reads_what_an_encode_writes() -> None:
    data = struct.pack("<QQQfII", 2**40 + 1, 7, 3, 0.5, 4, 2).ljust(_core.stats_bytes, b"\x99")
    stats = _core.read_stats(data)
    found = (stats.count, stats.found, stats.nonfinite, stats.threshold, stats.stages, stats.passes)
    assert found == (2**40 + 1, 7, 3, 0.5, 4, 2)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_read_stats_wants_the_whole_struct(wrong: int) -> None:
    with pytest.raises(_core.ArgumentError, match=f"{_core.stats_bytes} bytes, not"):
        _core.read_stats(bytes(_core.stats_bytes + wrong))


def test_a_report_is_a_view_of_live_memory() -> None:
    block = Block(_core.cuda_report_bytes)
    report = _core.Report(block.ptr)
    assert (report.nonfinite, report.culprit, report.status, report.mark) == (False, 0, 0, 0)
    block.data[:] = list(struct.pack("<IIiI", 1, 5, -4, 2**32 - 1))
    assert (report.nonfinite, report.culprit, report.status, report.mark) == (True, 5, -4, 2**32 - 1)
    with pytest.raises(_core.ArgumentError, match="report is NULL"):
        _core.Report(0)


@pytest.mark.parametrize("n", [0, 1, 16, 1000])
def test_a_state_is_a_header_then_vectors_then_what_the_codec_keeps(n: int) -> None:
    vector = 4 * (-(-n // 16) * 16 + 16)  # sid_state_stride: floats, with slack
    for codec in _core.codecs():
        plan = _core.Plan(codec["name"], codec["memory"], n, "float32")
        rest = plan.state_bytes - _core.state_header_bytes - plan.vectors * vector
        assert rest == plan.extra_bytes, codec["name"]


def test_the_first_vector_lies_right_behind_the_header() -> None:
    plan = _core.Plan("topk", "residual", 64, "float32")
    state, values = Block(plan.state_bytes), Block(4 * 64)
    values.data.view("float32")[:] = range(1, 65)
    plan.residual_in(state.ptr, values.ptr)
    at = _core.state_header_bytes
    assert bytes(state.data[at : at + 4 * 64]) == bytes(values.data)
