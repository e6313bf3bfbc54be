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


def test_reports_are_a_view_of_live_memory() -> None:
    block = Block(_core.cuda_shown_bytes)
    reports = _core.Reports(block.ptr)
    assert reports.upto(2**32 - 1) == reports.upto(3) == (False, 0, 0, 0)
    last = 2**32 - 1
    for mark in (last - 2, last - 1, last, 1, 2):  # as cuda_show writes them
        at = mark % 4 * 16
        block.data[at : at + 16] = list(struct.pack("<IIiI", mark % 2, 5, -4, mark))
    assert reports.upto(2) == reports.upto(3) == (False, 5, -4, 2)
    assert reports.upto(1) == (True, 5, -4, 1)
    assert reports.upto(0) == reports.upto(last) == (True, 5, -4, last)
    assert reports.upto(last - 1) == (False, 0, 0, 0), "the entry is that of mark 2"
    with pytest.raises(_core.ArgumentError, match="reports is NULL"):
        _core.Reports(0)


@pytest.mark.parametrize("n", [0, 1, 16, 1000])
def test_a_state_is_a_header_then_vectors_then_what_the_codec_keeps(n: int) -> None:
    vector = 4 * (-(-n // 16) * 16 + 16)  # sid_state_stride: floats, with slack
    for codec in _core.codecs():
        plan = _core.Plan(codec["name"], codec["memory"], n, "float32")
        rest = plan.state_bytes - _core.state_header_bytes - plan.vectors * vector
        assert rest == plan.extra_bytes, codec["name"]


def test_residual_in_leaves_the_lasting_parts_of_a_header() -> None:
    for codec in _core.codecs():
        plan = _core.Plan(codec["name"], codec["memory"], 64, "float32")
        state, values = Block(plan.state_bytes), Block(4 * 64 * max(plan.vectors, 1))
        header = state.data[: _core.state_header_bytes]
        before = bytes(i % 251 + 1 for i in range(len(header)))
        header[:] = list(before)
        plan.residual_in(state.ptr, values.ptr)
        for first, end in _core.state_lasting:
            assert bytes(header[first:end]) == before[first:end], codec["name"]
        assert plan.extra_bytes % _core.extra_unit_bytes == 0 and plan.vectors <= _core.max_vectors


def test_the_lasting_parts_are_the_step_count_and_the_statistics() -> None:
    plan = _core.Plan("topk", "residual", 1000, "float32", {"density": 0.01})
    state, work = Block(plan.state_bytes), Block(plan.work_bytes)
    payload, gradient = Block(plan.payload_bytes), Block(4 * 1000)
    gradient.data.view("float32")[:] = range(1000)
    segments = _core.Segments([gradient.ptr], [1000])
    buffers = _core.Buffers(segments, state.ptr, work.ptr, payload.ptr)
    plan.encode(buffers, step=0, seed=0, group=0, rank=0, world=1)
    (first, end), (own, own_end) = _core.state_lasting
    assert int.from_bytes(state.data[first:end], "little") == 1
    assert any(state.data[own:own_end])  # what topk has learned of its threshold
    kept = [e for pair in _core.state_lasting for e in pair]
    assert kept == sorted(kept) and own_end <= _core.state_header_bytes


def test_the_first_vector_lies_right_behind_the_header() -> None:
    plan = _core.Plan("topk", "residual", 64, "float32")
    state, values = Block(plan.state_bytes), Block(4 * 64)
    values.data.view("float32")[:] = range(1, 65)
    plan.residual_in(state.ptr, values.ptr)
    at = _core.state_header_bytes
    assert bytes(state.data[at : at + 4 * 64]) == bytes(values.data)
