"""The flags of train.py, and the presets that they override."""

import argparse
from pathlib import Path
from typing import Any

import sidcomp
import torch
from sidcomp.config import presets
from tasks import TASKS

HERE = Path(__file__).resolve().parent
DEFAULTS: dict[str, Any] = {
    "task": None, "memory": None, "groups": None, "exclude": [], "policy": [], "full_every": 0, "seed": 0,
    "clip": None, "exchange": None, "follow": True,
}  # fmt: skip


def parse(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """Defaults, then the preset, then the flags: the later win. `parameters`: those of codec and memory."""
    p = argparse.ArgumentParser(description=description)
    add = p.add_argument_group("what is trained").add_argument
    add(
        "--config",
        help=f"preset: {', '.join(presets.names())}, or a .toml file; none unless given",
    )
    add(
        "--task",
        choices=sorted(TASKS),
        help="gpt: bytes of Python's own library, by a transformer and AdamW, unless --config or --codec is "
        "given; lm: the same by a GRU and SGD, if it is; "
        "digits, mlp, cnn: handwritten digits, by 1 to 6 M weights; and others",
    )
    add("--steps", type=int, help="optimizer steps of each run; the task's unless given")
    add("--batch", type=int, help="examples for each rank and step; the task's unless given")
    add("--lr", type=float, help="peak learning rate; the task's unless given")
    add("--momentum", type=float, help="of the optimizer; the task's unless given")
    add(
        "--adamw",
        action=argparse.BooleanOptionalAction,
        help="AdamW in place of SGD; the task's unless given, and with --adamw also give --lr",
    )
    add(
        "--autocast",
        action=argparse.BooleanOptionalAction,
        help="forward and backward pass in bfloat16, of all runs; unless given, of the transformer where the "
        "processor computes in bfloat16",
    )
    add("--seed", type=int, help="of the weights, and of codecs that draw random numbers; 0 unless given")
    add(
        "--seeds", type=int, default=1, metavar="N", help="train with N seeds, from --seed on; 1 unless given"
    )
    add = p.add_argument_group("how it is compressed").add_argument
    add("--codec", help="one that `sidcomp codecs` lists; the preset's unless given, and auto without one")
    add("--density", type=float, help="share of the elements that is sent; short for --param density=...")
    add(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="parameter of codec or memory, or a schedule of it, 0.25@0,0.01@100 (value@step); repeat it",
    )
    add("--memory", help="what is kept from step to step; the codec's own unless given")
    add(
        "--clip",
        type=float,
        metavar="NORM",
        help="clip_grad_norm_ of what the optimizer is handed; unless given, what corresponds to plain "
        "DDP's 1.0 (run.clip_grad_norm_)",
    )
    add(
        "--updates",
        action=argparse.BooleanOptionalAction,
        help="send updates, what each rank's optimizer does, and not gradients; unless given, so with AdamW "
        "if neither --config nor --codec is given",
    )
    add(
        "--every",
        type=int,
        default=1,
        metavar="H",
        help="with --updates: steps between two exchanges; 1 unless given",
    )
    add(
        "--delay",
        type=int,
        choices=[0, 1],
        default=0,
        help="with --updates: 1 exchanges beside the steps up to the next exchange; 0 unless given",
    )
    add(
        "--noise-correction",
        action=argparse.BooleanOptionalAction,
        help="with --updates: lengthen what the noise of a rank's own gradient shortens; so with AdamW",
    )
    add(
        "--noise-by-rows",
        action="store_const",
        const="rows",
        dest="noise_correction",
        help="with --updates: the same, row by row",
    )
    add(
        "--shards",
        type=int,
        default=1,
        metavar="N",
        help="with --updates: FSDP2 shards the model over N ranks each, as inside a node, and sidcomp "
        "exchanges between nodes; computed bytes are those between nodes; 1, no shards, unless given",
    )
    add("--groups", help="bucket, model, a size such as 4MB, auto; bucket unless given")
    add(
        "--exclude",
        action="append",
        metavar="RULE",
        help="kept dense: a name, a pattern, 1-D, a number; repeat it",
    )
    add(
        "--exchange",
        help="how payloads travel: one that sidcomp.exchanges() lists; the process group's own unless given",
    )
    add(
        "--full-every",
        type=int,
        metavar="K",
        help="every K-th step in full precision; 0 for none; the preset's unless given",
    )
    add(
        "--follow",
        action=argparse.BooleanOptionalAction,
        help="what is owed follows the learning rate (State.follow), or not; it does, but in the presets of "
        "papers that do not have it",
    )
    add = p.add_argument_group("where and for how long").add_argument
    add(
        "--link",
        metavar="RATE",
        help="the network between the ranks: 100mbit, 1gbit, or none for loopback as it is; "
        "1gbit unless given (launch.py builds it)",
    )
    add(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for table.md, table.json, train.png; out/ unless given",
    )
    add("--checkpoint", type=Path, metavar="DIR", help="save there, a file for each run and rank")
    add(
        "--checkpoint-every",
        type=int,
        default=100,
        metavar="N",
        help="steps between checkpoints; 100 unless given",
    )
    add("--resume", action="store_true", help="go on from what lies in --checkpoint")
    add("--stop-at", type=int, metavar="STEP", help="save after this step and stop, as if interrupted")
    add("--threads", type=int, help="of torch in each rank; the cores shared among the ranks unless given")
    add(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cuda: a GPU for each rank, over NCCL; cpu unless given",
    )
    args = p.parse_args(argv)
    if (args.resume or args.stop_at is not None) and not args.checkpoint:
        p.error("--resume and --stop-at need --checkpoint DIR")

    plain = not args.config and args.codec is None
    parameters: dict[str, Any] = {}
    preset = dict(DEFAULTS)
    if plain:
        args.codec = "auto"
    elif args.config:
        try:
            loaded = presets.load(args.config)
        except sidcomp.ArgumentError as e:
            p.error(f"--config {args.config}: {e}")
        preset |= {**loaded.arguments, **loaded.program}
        if unknown := sorted(set(preset) - {"policy", *vars(args)}):
            p.error(f"--config {args.config}: unknown keys {', '.join(unknown)}")
        parameters = dict(loaded.parameters)
        if args.codec not in (None, preset["codec"]):
            parameters = {}  # they are another codec's, as these are
            preset |= {"memory": None, "full_every": 0, "policy": []}
    args.policy = preset.pop("policy")
    if args.codec != "auto" and not args.updates:
        preset["groups"] = preset["groups"] or "bucket"
    for key, value in preset.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    args.task = args.task or ("gpt" if plain else "lm")
    for key in ("steps", "batch", "lr", "momentum", "adamw"):
        if getattr(args, key) is None:
            setattr(args, key, getattr(TASKS[args.task], key))
    if args.updates is None:
        args.updates = plain and args.adamw
    if args.shards < 1 or (args.shards > 1 and not args.updates):
        p.error(f"--shards {args.shards}: give --updates, and ranks of a node, at least 1")
    if args.shards > 1 and args.checkpoint:
        p.error("--shards: --checkpoint saves whole models; leave one of them out")
    if args.seeds < 1 or (args.seeds > 1 and args.checkpoint):
        p.error(f"--seeds {args.seeds}: give at least 1, and with --checkpoint no more")
    if args.autocast is None:
        args.autocast = args.task == "gpt" and computes_in_bfloat16(args.device)
    for text in [*args.param, *([] if args.density is None else [f"density={args.density}"])]:
        name, equals, value = text.partition("=")
        if not equals:
            p.error(f"--param {text}: write NAME=VALUE")
        parameters[name] = _number(value)
        if "@" in value:
            marks = [mark.rpartition("@") for mark in value.split(",")]
            parameters[name] = sidcomp.Schedule([(int(step), _number(v)) for v, _, step in marks])
    args.parameters = parameters
    args.exclude = [_number(rule) for rule in args.exclude]
    return args


def computes_in_bfloat16(device: str) -> bool:
    """Whether a product of bfloat16 matrices is faster there than one of float32."""
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # older torch: not known
    return any(getattr(torch.cpu, name, bool)() for name in names)


def _number(text: str | int) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
