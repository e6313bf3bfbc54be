"""`sidcomp doctor`: what this machine has, what of sidcomp works on it, and what to change, without torch."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Literal

import typer
from rich.console import Console

from sidcomp import core as _core
from sidcomp.cli.common import Json
from sidcomp.config.registry import codecs

Status = Literal["ok", "note", "problem"]
TORCH_NEEDED = (2, 4)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `advice` says what to change and is empty where nothing needs to."""

    name: str
    value: str
    status: Status = "ok"
    advice: str = ""


@dataclass(frozen=True)
class Use:
    """One way of using sidcomp: whether it works here, and if not, why."""

    name: str
    works: bool
    reason: str = ""
    ddp: bool = False


def examine(attempt: bool = False) -> tuple[list[Finding], list[Use]]:
    """Looks at the machine. attempt: also let two ranks take compressed steps over Gloo (some seconds)."""
    torch, torch_finding = _torch()
    found = [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("sidcomp", f"{_core.version}; {len(codecs())} codecs: {', '.join(c.name for c in codecs())}"),
        _processor(),
        torch_finding,
    ]
    if torch is not None:
        found += [_gloo(torch), _nccl(torch), _torch_cuda(torch)]
    found.append(_kernels())
    step = _two_ranks() if attempt and torch is not None else None
    if step is not None:
        found.append(step)
    return found, _uses(torch, {f.name: f for f in found})


def _torch() -> tuple[ModuleType | None, Finding]:
    try:
        import torch
    except Exception as e:  # OSError where a library of CUDA is missing, and what else a broken one raises
        again = "" if isinstance(e, ModuleNotFoundError) else "--force-reinstall "
        return None, Finding("torch", f"not importable ({e})", "problem", f"pip install {again}'torch>=2.4'")
    version = str(torch.__version__)
    number = tuple(int(x) for x in version.split("+")[0].split(".")[:2])
    if number < TORCH_NEEDED:
        return None, Finding(
            "torch", version, "problem", "sidcomp's hook needs 2.4 or newer: pip install -U torch"
        )
    return torch, Finding("torch", version)


def _processor() -> Finding:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            name = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), name)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("processor", f"{name}, {cores} cores for this process, instruction set {_core.isa_best()}")


def _gloo(torch: ModuleType) -> Finding:
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        return Finding("Gloo", "available" + (f", on interface {interface}" if interface else ""))
    return Finding("Gloo", "not in this torch", "problem", "install a torch built with distributed support")


def _nccl(torch: ModuleType) -> Finding:
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    return Finding("NCCL", "not in this torch", "note", "needed for GPUs only: install a CUDA build of torch")


def _torch_cuda(torch: ModuleType) -> Finding:
    if torch.version.cuda is None:
        return Finding(
            "CUDA in torch", "a CPU build", "note", "needed for GPUs only: install a CUDA build of torch"
        )
    if not torch.cuda.is_available():
        return Finding(
            "CUDA in torch",
            f"{torch.version.cuda}, no usable GPU",
            "note",
            "check the driver with nvidia-smi",
        )
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("CUDA in torch", f"{torch.version.cuda}: {', '.join(names)}")


def _kernels() -> Finding:
    if not _core.cuda_built:
        return Finding(
            "CUDA kernels", "not built", "note", "needed for GPUs only: install where nvcc is on the PATH"
        )
    have = [c.name for c in codecs() if c.cuda]
    devices, reason = _core.cuda_devices()
    value = f"built for {_core.cuda_archs}, for the codecs {', '.join(have)}; "
    if devices:
        return Finding("CUDA kernels", value + f"{devices} usable GPU(s)")
    return Finding(
        "CUDA kernels", value + f"no usable GPU: {reason}", "note", "needed for GPUs only: check the driver"
    )


_STEP = """
import gc, sys
from datetime import timedelta
import torch, torch.distributed as dist, sidcomp
rank = int(sys.argv[1])
soon = timedelta(seconds=30)
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2, timeout=soon)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
state = sidcomp.State()
ddp.register_comm_hook(state, sidcomp.hook)
for _ in range(3):
    ddp(torch.randn(4, 64)).square().sum().backward()
state.close()
del ddp
gc.collect()
dist.destroy_process_group()
"""


def _two_ranks() -> Finding:
    name = "two ranks"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _STEP]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), f"file://{folder}/store"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        try:
            ends = [(p.communicate(timeout=120)[1], p.returncode) for p in ranks]
        except subprocess.TimeoutExpired:
            return Finding(name, "no answer within 120 s", "problem", _NETWORK)
        finally:
            for p in ranks:
                p.kill()
    failed = [text.strip().splitlines()[-1:] for text, code in ends if code]
    if failed:
        return Finding(name, f"failed: {' '.join(failed[0]) or 'without a message'}", "problem", _NETWORK)
    return Finding(name, "took three compressed steps together over Gloo")


_NETWORK = (
    "Gloo listens on the address that the host's name resolves to: set GLOO_SOCKET_IFNAME to an interface "
    "that all ranks can reach (lo on one machine), and see that no firewall stands between them"
)


def _uses(torch: ModuleType | None, found: dict[str, Finding]) -> list[Use]:
    def lacks(*names: str) -> str:
        return ", ".join(n for n in names if n in found and found[n].status != "ok")

    cpu = lacks("torch", "Gloo", "two ranks")
    gpu = lacks("torch", "NCCL", "CUDA in torch", "CUDA kernels")
    uses = [
        Use("codecs on the CPU: sidcomp.Compressor", True),
        Use("DDP on CPUs, over Gloo", not cpu, cpu and f"see {cpu}", ddp=True),
        Use("DDP on GPUs, over NCCL", not gpu, gpu and f"see {gpu}", ddp=True),
    ]
    without = [c.name for c in codecs() if not c.cuda]
    if not gpu and without:
        uses.append(Use(f"on GPUs: {', '.join(without)}", False, "no CUDA kernels in this build"))
    return uses


def doctor_command(
    attempt: Annotated[
        bool, typer.Option("--try", help="Also let two ranks take compressed steps over Gloo.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What works on this machine, what does not, and what to do about it. Exit status 1: no DDP here."""
    findings, uses = examine(attempt)
    if as_json:
        print(
            json.dumps({"findings": [vars(f) for f in findings], "uses": [vars(u) for u in uses]}, indent=1)
        )
    else:
        console = Console(highlight=False, soft_wrap=True)  # colours on a terminal only
        colors = {"ok": "green", "note": "yellow", "problem": "red"}
        for f in findings:
            console.print(f"{f.status:<9}", style=colors[f.status], end="")
            console.print(f"{f.name:<14}{f.value}", markup=False)
            if f.advice:
                console.print(f"{'':<23}{f.advice}", markup=False)
        console.print()
        for u in uses:
            console.print(
                "works    " if u.works else "does not ", style="green" if u.works else "red", end=""
            )
            console.print(u.name + (f" ({u.reason})" if u.reason else ""), markup=False)
    if not any(u.works for u in uses if u.ddp):
        raise typer.Exit(1)
