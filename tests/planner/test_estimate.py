"""`sidcomp estimate`: the shapes of models, what is predicted for them, and what it says of wrong input."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sidcomp.cli.app import app
from sidcomp.cli.common import COMPARED, codecs_of, gbit_of, link_of
from sidcomp.config import accuracy
from sidcomp.errors import ArgumentError, SetupError
from sidcomp.standalone.assumed_profile import assumed_profile
from sidcomp.standalone.estimate import GPU, OPTIMIZERS, Estimate, Way, candidates, estimate
from sidcomp.standalone.model_shapes import Model, Parameter, of_json, of_module, read_model
from sidcomp.standalone.simulation import Compute, Link, Measured, simulate
from typer.testing import CliRunner

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
BERT = {
    "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072,
    "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip


# ---- models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, elements",
    [
        (GPT2, 124_439_808),
        (BERT, 109_482_240),
        (LLAMA, 6_738_415_616),
        # as published: Mistral 7B v0.1, Qwen2 0.5B (tied), Qwen3 0.6B (tied), RoBERTa base with its pooler
        (
            {**LLAMA, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8},
            7_241_732_096,
        ),
        (
            {
                "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
                "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
                "tie_word_embeddings": True,
            },
            494_032_768,
        ),
        (
            {
                "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
                "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
            },
            596_049_920,
        ),
        (
            {
                **BERT, "model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514,
                "type_vocab_size": 1,
            },
            124_645_632,
        ),
    ],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else str(x),
)  # fmt: skip
def test_known_models_have_as_many_parameters_as_published(config: dict[str, Any], elements: int) -> None:
    model = of_json(config)
    assert model.elements == elements
    assert len({p.name for p in model.parameters}) == len(model.parameters)


def test_a_tied_output_layer_is_counted_once_and_its_work_stays() -> None:
    """Tied: the matrix product remains, the second weight does not."""
    tied, own = (of_json({**LLAMA, "tie_word_embeddings": t}) for t in (True, False))
    assert own.elements - tied.elements == 32000 * 4096
    assert sum(p.work for p in own.parameters) == sum(p.work for p in tied.parameters)


@pytest.mark.parametrize(
    "data",
    [
        {"a": [3, 4], "b": []},
        [{"name": "a", "shape": [3, 4]}, {"name": "b", "shape": []}],
        [["a", [3, 4]], ["b", []]],
    ],
)  # fmt: skip
def test_parameters_are_read_in_three_forms(data: Any, tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps(data))
    found = read_model(path).parameters
    assert [(p.name, p.shape, p.elements) for p in found] == [("a", (3, 4), 12), ("b", (), 1)]


@pytest.mark.parametrize(
    "data, words",
    [
        ({"model_type": "mamba"}, "model_type 'mamba' are not known here.*named_parameters"),
        ({"model_type": 3}, "not known here"),
        ({"hidden_size": 3}, "neither the shapes.*nor a model_type.*named_parameters"),
        ({}, "neither"),
        ({k: v for k, v in GPT2.items() if k != "n_embd"}, "lacks 'n_embd', which model_type 'gpt2' needs"),
        ({**GPT2, "n_layer": -1}, "n_layer must be"),
        ({**GPT2, "n_layer": 2**32}, "n_layer must be 1 to 65536, not 4294967296"),
        ({**BERT, "num_hidden_layers": 10**6}, "num_hidden_layers must be 1 to 65536"),
        ({**LLAMA, "num_hidden_layers": 10**6}, "num_hidden_layers must be 1 to 65536"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention is True.*named_parameters"),
        ({**BERT, "add_cross_attention": True}, "add_cross_attention is True"),
        ({**BERT, "position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({**GPT2, "n_embd": "768"}, "n_embd must be an integer"),
        ({**LLAMA, "tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"a": [3, -1]}, r"'a'\[1\] must be"),
        ({"a": [1.5]}, "integer"),
        ([["a", [1]], ["a", [2]]], "'a' twice"),
        ([7], "must be"),
        (7, "must be a list"),
        ({"a": [0]}, "0 elements"),
        ({"a": [2**40, 2**40]}, "elements: 1 to"),
    ],
)
def test_a_wrong_model_is_refused_with_what_to_change(data: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        of_json(data)


def test_a_zoo_that_is_not_installed_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("torchvision", "torchvision.models", "timm"):
        monkeypatch.setitem(sys.modules, name, None)
    for source in ("torchvision:resnet50", "timm:resnet50"):
        with pytest.raises(SetupError, match=r"pip install (torchvision|timm), or give the parameters"):
            read_model(source)
    with pytest.raises(ArgumentError, match=r"nowhere\.json.*give a file of parameters"):
        read_model("nowhere.json")


@pytest.mark.parametrize("zoo, maker", [("torchvision", "get_model"), ("timm", "create_model")])
def test_a_model_of_a_zoo_is_built_without_numbers(
    zoo: str, maker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    import sys
    from types import ModuleType

    made = []

    def make(name: str, **options: Any) -> Any:
        if name != "small":
            raise ValueError(f"Unknown model {name}")
        made.append(
            torch.nn.Sequential(torch.nn.Conv2d(3, 4, 224), torch.nn.Flatten(), torch.nn.Linear(4, 2))
        )
        assert options in ({"weights": None}, {"pretrained": False})
        return made[-1]

    library = ModuleType("zoo")
    library.__dict__[maker] = make
    for name in ("torchvision", "torchvision.models", "timm"):
        monkeypatch.setitem(sys.modules, name, library)
    model = read_model(f"{zoo}:small")
    assert all(p.is_meta for p in made[0].parameters())
    assert [p.work for p in model.parameters] == [4 * 3 * 224 * 224, 0, 8, 0]
    with pytest.raises(ArgumentError, match="cannot make a model 'large': Unknown model large"):
        read_model(f"{zoo}:large")


def test_the_work_of_a_module_is_what_its_forward_pass_multiplies() -> None:
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        module = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 16 * 16, 10),
        )
    found = {p.name: p for p in of_module(module, (1, 3, 32, 32)).parameters}
    assert {n: p.work for n, p in found.items() if n.endswith("weight")} == {
        "0.weight": 8 * 3 * 9 * 16 * 16,
        "2.weight": 8 * 16 * 16 * 10,
    }
    assert of_module(module, (1, 3, 8, 8)).parameters[0].work == 8 * 3 * 9  # does not fit: by elements


# ---- predictions -------------------------------------------------------------------------------------------

SMALL = of_json({f"layer{i}.weight": [1024, 1024] for i in range(12)})
FREE = dict.fromkeys(candidates(COMPARED), Measured.assumed(Compute()))
ON_GPU = dict.fromkeys(candidates(COMPARED), Measured.assumed(GPU))


def predict(
    gbit: float,
    model: Model = SMALL,
    step_ms: float = 100,
    ranks: int = 8,
    latency_us: float = 50,
    **changes: Any,
) -> Estimate:
    arguments = {"compute": ON_GPU, "codecs": COMPARED, **changes}
    return estimate(model, ranks, step_ms, Link(gbit, latency_us), **arguments)


def test_a_slower_link_never_gains_less() -> None:
    found = [predict(gbit) for gbit in (400, 100, 25, 10, 2.5, 1, 0.1)]
    for fast, slow in pairwise(found):
        assert slow.dense_ms >= fast.dense_ms
        for name in OPTIMIZERS:
            assert slow.auto[name].way.speedup >= 0.99 * fast.auto[name].way.speedup
        assert all(b.step_ms >= a.step_ms for a, b in zip(fast.ways, slow.ways, strict=True))
    for name in OPTIMIZERS:
        assert found[0].auto[name].way.speedup < 1.03 < found[-1].auto[name].way.speedup


def test_nothing_beats_computation_and_auto_nothing_of_its_own_loses() -> None:
    for gbit in (100, 1, 0.1):
        found = predict(gbit)
        own = [auto.way for auto in found.auto.values()]
        assert all(way.step_ms <= found.dense_ms * 1.0001 for way in own)
        assert found.ceiling_ms == 100
        assert min(found.dense_ms, *(w.step_ms for w in (*own, *found.ways, *found.local))) >= 100


def test_plain_ddp_takes_what_can_be_computed_by_hand() -> None:
    """One tensor: nothing overlaps, so the step is the computation, the ring's 2 (W - 1) / W vectors, and the
    copies into DDP's bucket and back."""
    found = predict(10, of_json({"w": [25_000_000]}), ranks=8)
    ring = 2 * 7 / 8 * 25_000_000 * 32 / 10e9 * 1e3 + 14 * 50e-3
    assert found.dense_ms == pytest.approx(100 + ring + 0.016e-6 * 25_000_000, rel=1e-4)
    assert found.dense_bytes == pytest.approx(2 * 7 / 8 * 25_000_000 * 4, rel=1e-3)


def test_the_cost_of_a_codec_is_counted() -> None:
    slow = dict.fromkeys(ON_GPU, Measured.assumed(Compute(50.0, 5.0, 0.0)))
    found = predict(10, compute=slow)
    assert all(a.step_ms > b.step_ms for a, b in zip(found.ways, predict(10, compute=FREE).ways, strict=True))
    encode_ms = 50e-6 * SMALL.elements
    assert all(w.step_ms > 100 + encode_ms for w in found.ways)  # an encode stops the backward pass
    assert {auto.way.codec for auto in found.auto.values()} == {"dense"}
    assert set(found.choice.values()) == {None}


def test_auto_gains_nothing_by_groups_that_compress_nothing() -> None:
    """It continues as plain DDP, over DDP's buckets, even where other uncompressed groups would be faster."""
    found = predict(10, compute=dict.fromkeys(ON_GPU, Measured.assumed(Compute(50.0, 5.0, 0.0))))
    for auto in found.auto.values():
        assert auto.way.step_ms == found.dense_ms and auto.way.speedup == 1 and auto.groups == 2


def test_launches_cost_the_same_for_a_group_of_any_size_so_that_groups_are_merged() -> None:
    """Over a link on which a message costs next to nothing, nothing else speaks for large groups."""
    many = of_json({f"layer{i}.weight": [64, 64] for i in range(100)})
    free, gpu = (
        predict(5, many, 1, latency_us=0, compute=dict.fromkeys(ON_GPU, Measured.assumed(compute)))
        for compute in (replace(GPU, encode_us=0.0, decode_us=0.0), GPU)
    )
    for name in OPTIMIZERS:
        assert gpu.auto[name].groups < free.auto[name].groups
    whole = [predict(1, of_json({"w": [10**5]}), compute=of).ways for of in (FREE, ON_GPU)]
    for alone, launched in zip(*whole, strict=True):
        assert launched.step_ms - alone.step_ms >= (GPU.encode_us + GPU.decode_us) * 1e-3


def test_bytes_are_those_of_the_simulation_and_exchanges_those_of_a_state() -> None:
    for ranks, exchange in ((2, "allgather"), (8, "twoshot")):
        for way in predict(1, ranks=ranks).ways:
            if way.codec == "int4":
                assert way.exchange == exchange
            own = dict(candidates(COMPARED))[way.name][1]
            row = simulate(SMALL.elements, way.codec, worlds=[ranks], exchange=[way.exchange], **own).rows[-1]
            assert way.bytes == row.bytes


def test_gradients_are_ready_in_reverse_and_embeddings_cost_no_time() -> None:
    """A gradient that is ready last cannot hide; one that is ready first can."""
    work, table = Parameter("work", (7000, 1000), 1.0), Parameter("table", (7000, 1000), 0.0)
    ready_last = predict(10, Model((table, work), ""), step_ms=30).dense_ms
    ready_first = predict(10, Model((work, table), ""), step_ms=30).dense_ms
    assert ready_last > ready_first + 10


def test_nodes_share_a_link() -> None:
    alone, shared = (predict(10, ranks=16, ranks_per_node=r) for r in (1, 8))
    assert shared.ways[0].step_ms > alone.ways[0].step_ms
    assert shared.dense_ms < alone.dense_ms * 1.01  # the ring crosses the link once


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_auto_is_predicted_with_the_codecs_that_it_may_choose_beside_the_optimizer(optimizer: str) -> None:
    """GPT-2 over 1 Gbit/s between 4 ranks, where top-k promises most."""
    found = predict(1, of_json(GPT2), step_ms=120, ranks=4)
    allowed = {name for name, _ in accuracy.candidates("dense", OPTIMIZERS[optimizer])}
    assert found.auto[optimizer].way.codec in allowed
    assert found.auto["SGD"].way.speedup > 2 * found.auto["Adam"].way.speedup
    for way in found.ways:
        assert (optimizer in way.loss) == (way.name in KNOWN[optimizer])
    (alone,) = predict(1, of_json(GPT2), step_ms=120, ranks=4, optimizers=[optimizer]).auto.values()
    assert alone == found.auto[optimizer]
    assert f"with {optimizer} " in found.sentence


KNOWN: dict[str, set[str]] = {
    "SGD": {"topk density=0.084 values=log4 indices=packed", "fp16"},
    "Adam": {"topk density=0.084 values=log4 indices=packed", "fp16", "int4"},
}


def test_the_choice_is_the_fastest_within_the_budget() -> None:
    chosen: dict[str, list[Way]] = {name: [] for name in OPTIMIZERS}
    for budget in (0.1, 0.5, 6.0):
        found = predict(0.1, ranks=4, budget=budget)
        for name, way in found.choice.items():
            assert way is not None and way.loss[name].percent <= budget
            chosen[name].append(way)
            for other in (*found.ways, *found.local):
                if name in other.loss and other.loss[name].percent <= budget:
                    least = 2 if name == "SGD" else 4  # the ranks on which most was measured
                    fits = other.loss[name].ranks in (0, least)
                    assert not fits or other.step_ms > 0.96 * way.step_ms, (name, budget, other.name)
    assert [way.codec for way in chosen["SGD"]] == ["fp16", "topk", "topk"]
    assert [way.sends for way in chosen["SGD"]] == ["gradients", "updates", "updates"]
    assert [way.every for way in chosen["Adam"]] == [1, 1, 16], "rarer exchanges cost 3.9 %"
    assert chosen["Adam"][0].call.startswith('sidcomp.compress(module, optimizer, "topk", density=0.084, ')
    assert chosen["Adam"][2].call.endswith("every=16)")


def test_where_communication_is_short_the_choice_is_plain_ddp_or_the_simplest() -> None:
    short = predict(100, ranks=2)
    assert set(short.choice.values()) == {None} and "hides behind" in short.sentence
    fine = predict(25, ranks=2, budget=0.0, optimizers=["SGD"])
    assert "with SGD nothing that was measured within 0 % of plain DDP's loss is faster" in fine.sentence
    both = predict(25, ranks=2, optimizers=["SGD"])
    assert both.choice["SGD"] is not None and both.choice["SGD"].sends == "gradients"
    assert any(way.step_ms < 1.03 * both.choice["SGD"].step_ms for way in both.local), "no faster, but rarer"


def test_losses_of_fewer_ranks_count_only_where_there_are_no_others() -> None:
    """1/200 was measured on two ranks, 1/100 on up to eight."""
    for ranks in (2, 4):
        way = predict(0.1, ranks=ranks, budget=0.1, optimizers=["Adam"]).choice["Adam"]
        assert way is not None and ("ratio=200" in way.call) is (ranks == 2)
    many = predict(0.1, ranks=64, budget=2.0).sentence
    assert "; on 8 ranks its loss was" in many and "; on 2 ranks its loss was" in many  # Adam's, SGD's


@pytest.mark.parametrize("every", [1, 7, 100])
def test_updates_take_what_can_be_computed_by_hand(every: int) -> None:
    """One tensor. The codecs cost nothing: a step is the computation, and the whole exchange in one of
    `every` steps, or in each."""
    model, step = of_json({"w": [25_000_000]}), 100
    own = [("int4", {}), ("int8", {})]  # of which the first is known if every step has an exchange
    found = predict(10, model, step_ms=step, ranks=4, compute=FREE, every=every, updates=own)
    *known, averaged, outer = found.local
    assert [way.every for way in known if way.name == "int8"] == [every]
    assert {way.every for way in known if way.name == "int4"} == {1, 4, every}
    (error,) = [way for way in known if "ratio=100 values=log2" in way.name]
    ring = 2 * 3 / 4 * 25_000_000 * 32 / 10e9 * 1e3 + 6 * 50e-3
    assert averaged.step_ms == pytest.approx(step + ring / every, rel=1e-3)
    assert averaged.bytes == pytest.approx(2 * 3 / 4 * 100_000_000 / every, rel=1e-3)
    assert error.bytes == pytest.approx(1.5 * 100_000_000 / 100, rel=0.02)  # two-shot, each step
    assert error.step_ms == pytest.approx(step + error.bytes * 8 / 10e9 * 1e3 + 2 * 50e-3, rel=1e-3)
    sent = 1.5 * 25_000_000 / 64
    assert 10 * sent / 8 < outer.bytes * every < 14 * sent / 8  # 4 bits of value, and packed indices
    assert outer.step_ms == pytest.approx(step + outer.bytes * 8 / 10e9 * 1e3 + 2 * 50e-3 / every, rel=1e-3)
    assert averaged.every == outer.every == every
    for way in known:
        expected = step + way.bytes * 8 / 10e9 * 1e3 + 2 * 50e-3 / way.every
        assert way.step_ms == pytest.approx(expected, rel=1e-3)


def test_updates_pass_over_their_vectors_once_in_an_exchange() -> None:
    passing = dict.fromkeys(ON_GPU, Measured.assumed(Compute(update_ns=5.0)))
    for free, way in zip(predict(1, compute=FREE).local, predict(1, compute=passing).local, strict=True):
        assert way.step_ms - free.step_ms == pytest.approx(5e-6 * SMALL.elements / way.every)


def test_each_step_between_two_exchanges_is_lengthened() -> None:
    lengthening = dict.fromkeys(ON_GPU, Measured.assumed(Compute(step_ns=5.0)))
    for free, way in zip(predict(1, compute=FREE).local, predict(1, compute=lengthening).local, strict=True):
        assert way.step_ms - free.step_ms == pytest.approx(5e-6 * SMALL.elements * (way.every > 1))


def test_ddp_copies_gradients_into_its_buckets_and_back() -> None:
    copying = dict.fromkeys(ON_GPU, Measured.assumed(Compute(bucket_ns=5.0)))
    free, found = predict(1, compute=FREE), predict(1, compute=copying)
    longer = pytest.approx(5e-6 * SMALL.elements)
    assert found.dense_ms - free.dense_ms == longer
    for a, b in zip((*free.ways, free.auto["SGD"].way), (*found.ways, found.auto["SGD"].way), strict=True):
        assert b.step_ms - a.step_ms == longer
    assert [way.step_ms for way in found.local] == [way.step_ms for way in free.local]


def test_the_spread_of_what_was_measured_is_that_of_the_prediction() -> None:
    copies = GPU.bucket_ns
    least, most = Compute(bucket_ns=copies), Compute(20.0, 2.0, bucket_ns=copies)
    alike, apart = Measured.assumed(GPU), Measured(GPU, least, most)
    assert not any(way.spread.wide for way in predict(1).ways)
    for way in predict(1, compute=dict.fromkeys(ON_GPU, alike)).ways:
        assert way.spread == (way.speedup, way.speedup)
    found = predict(1, compute=dict.fromkeys(ON_GPU, apart))
    for slow, free, way in zip(
        predict(1, compute=dict.fromkeys(ON_GPU, Measured.assumed(most))).ways,
        predict(1, compute=dict.fromkeys(ON_GPU, Measured.assumed(least))).ways,
        found.ways,
        strict=True,
    ):
        assert way.spread == (slow.speedup, free.speedup)
    assert found.auto["SGD"].way.spread.wide and found.local[0].spread.wide


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"every": 0}, "every=0: give the steps"),
        ({"budget": -1}, "budget=-1: give the percent"),
        ({"budget": float("nan")}, "budget=nan: give the percent"),
        ({"optimizers": ["Adagrad"]}, "give some of SGD, Adam"),
        ({"optimizers": []}, "give some of SGD, Adam"),
        ({"ranks": 1}, "ranks=1: 2 to 4096"),
        ({"step_ms": 0}, "give the milliseconds"),
        ({"step_ms": float("nan")}, "give the milliseconds"),
        ({"codecs": [("topkk", {})]}, "did you mean 'topk'"),
        ({"codecs": [("topk", {"density": 7})]}, "density"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        predict(1, **changes)


def test_a_codec_without_such_an_exchange_is_left_out_by_name() -> None:
    codecs = [("powersgd", {}), ("int8", {})]
    found = predict(1, codecs=codecs, compute=dict.fromkeys(candidates(codecs), Measured.assumed(GPU)))
    assert [w.codec for w in found.ways] == ["int8"] and "powersgd" in found.refused


# ---- the command -------------------------------------------------------------------------------------------


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["estimate", *map(str, words)])


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    return path


def test_it_answers_in_one_sentence_and_says_what_it_assumes(gpt2: Path) -> None:
    common = ("--model", gpt2, "--ranks", 8, "--device", "gpu")
    slow = run(*common, "--link", "10gbit", "--step-ms", 120)
    assert slow.exit_code == 0, slow.stderr
    last = slow.stdout.strip().splitlines()[-1]
    assert last.startswith("At 10 Gbit/s with 8 ranks: with SGD sidcomp.compress(") and "; with Adam " in last
    rows = {tuple(re.split(r"  +", line.strip())[:2]): line.split() for line in slow.stdout.splitlines()}
    assert rows["gradients", "int4"][-2:] == ["+0.2", "%"], "the worst of two models on 8 ranks"
    assert rows["gradients", "topk density=0.01"][-1] != "%", "not measured"
    assert rows["gradients", "fp16"][-2:] == ["rounding", "rounding"]
    assert ("updates", "topk ratio=100 values=log2 indices=packed") in rows
    one = run(*common, "--link", "10gbit", "--step-ms", 120, "--optimizer", "adam", "--every", "1e2")
    assert "with SGD" not in one.stdout and " 100 " in one.stdout
    none = run(*common, "--link", "10gbit", "--step-ms", 120, "--optimizer", "sgd", "--loss-budget", "0 %")
    assert 'with SGD sidcomp.compress(ddp, optimizer, "fp16") would take' in none.stdout
    assert "124,439,808 parameters" in slow.stdout and "not measured" in slow.stdout
    assert "This is a model, not a measurement" in slow.stdout
    fast = run(*common, "--link", "400gbit", "--step-ms", 1200).stdout.strip().splitlines()[-1]
    assert fast == (
        "At 400 Gbit/s with 8 ranks communication hides behind the backward pass: compression gains nothing."
    )


def test_json_holds_what_the_table_shows_and_cpus_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps({"w": [100_000]}))
    command = ("--model", path, "--link", "100mbit", "--ranks", 2, "--step-ms", 5, "--codec", "int8 block=64")
    found = json.loads(run(*command, "--json").stdout)
    assert found["link"]["gbit"] == 0.1 and found["elements"] == 100_000
    assert [w["codec"] for w in found["ways"]] == ["int8"]
    assert any("measured" in text and "int8" in text for text in found["assumed"])
    assert found["auto"].keys() == found["choice"].keys() == OPTIMIZERS.keys()
    for way in (*found["ways"], *found["local"], *(auto["way"] for auto in found["auto"].values())):
        assert way["spread"][0] <= way["speedup"] <= way["spread"][1]
    said = " ".join(run(*command).stdout.split())
    assert " to " in said and "measured in turns" in said


@pytest.mark.parametrize(
    "text, gbit",
    [
        ("10gbit", 10),
        ("100mbit", 0.1),
        ("2.5 Gbit/s", 2.5),
        ("25Gbps", 25),
        ("0.4tbit", 400),
        ("25gbps", 25),
        ("10 GBIT/S", 10),
        ("1Gb/s", 1),
        ("1GB/s", 8),  # an upper-case B means bytes
        ("125MB/s", 1),
        ("1.25 GBps", 10),
        ("500 kB/s", 0.004),
        ("1GB", None),  # no rate
        ("1gb", None),
        ("1gb/s", None),  # who writes all letters alike may mean either
        ("1GBPS", None),
        ("1g", None),
        ("fast", None),
    ],
)
def test_links_are_read_with_their_unit(text: str, gbit: float | None) -> None:
    if gbit is not None:
        assert gbit_of(text) == pytest.approx(gbit)
        return
    with pytest.raises(ValueError, match=r"number and a unit, such as 10gbit"):
        gbit_of(text)


def test_the_slower_direction_of_a_link_counts() -> None:
    """A rank sends as many bytes as it receives."""
    for text in ("500mbit/110mbit", "110 Mbit/s / 500 Mbit/s", "0.5gbit/110mbit", "13.75MB/s/1GB/s"):
        link, origin = link_of(text)
        assert link.gbit == pytest.approx(0.11) and "slower" in origin
    assert link_of("10gbit", 7.0) == (Link(10.0, 7.0), "given")
    assert link_of("1GB/s") == (Link(8.0, 50.0), "given")
    with pytest.raises(ValueError, match="such as 10gbit"):
        link_of("500/110mbit")


@pytest.mark.parametrize("world", [2, 4])
def test_a_measured_link_is_that_of_the_ring(world: int, tmp_path: Path) -> None:
    """What `sidcomp bench` saves: the costs of an all-reduce over 2 Gbit/s, with 80 us a round."""
    rounds = 2 * (world - 1)
    knots = [[n, round(rounds * (80e6 + n / world * 8 / 2e9 * 1e12))] for n in (0, 2**16, 2**24)]
    dense = {"name": "dense", "codec": "none", "exchange": "allreduce"}
    dense |= {"encode": None, "exchange_curve": {"knots": knots}, "decode": None}
    found = {"methods": [dense], "contention": {}, "threads": 1, "measured_s": 1.0}
    path = tmp_path / ("lan" if world == 2 else "profile.json")  # `bench --save` takes any name
    profile = assumed_profile(SMALL, 100, world, found)
    profile.save(path)
    link, origin = link_of(str(path), node_gbit=100.0)
    assert link.gbit == pytest.approx(2.0, rel=1e-3) and link.latency_us == pytest.approx(80, rel=1e-2)
    assert link.node_gbit == 100.0 and str(path) in origin and link_of(str(path), 9.0)[0].latency_us == 9.0


def test_a_bad_command_line_says_what_to_change(gpt2: Path) -> None:
    good = {"--model": gpt2, "--link": "10gbit", "--ranks": 8, "--step-ms": 120, "--device": "gpu"}
    for option, value, words in (
        ("--link", "10", "such as 10gbit"),
        ("--model", gpt2.parent / "no.json", "cannot read the model"),
        ("--ranks", 1, "2 to 4096"),
        ("--optimizer", "lion", "lion"),
        ("--every", 0, "every=0"),
        ("--loss-budget", "some", "is not a percentage"),
        ("--link", "no.json", "no.json"),
        ("--step-ms", -1, "give the milliseconds"),
        ("--codec", "int8 block", "is not NAME=VALUE"),
        ("--codec", "inte8", "did you mean 'int8'"),
        ("--codec", "auto", "always included"),
        ("--device", "tpu", "tpu"),
    ):
        done = run(*(word for pair in {**good, option: value}.items() for word in pair))
        assert done.exit_code == 2, option
        assert words in done.stderr, done.stderr
    assert codecs_of(["topk density=0.5"]) == [("topk", {"density": 0.5})]
