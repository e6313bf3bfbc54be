"""The names of a module's parameters, the same whether torch.compile wraps the module or not."""

from collections.abc import Iterator

import torch

from sidcomp.runtime.checkpoint_reader import without_wrapper


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields the parameters as `module.named_parameters()` does. torch.compile's wrapper adds "_orig_mod." to
    the names of what is inside of it; this is left out, so that a compiled module and a plain one have the
    same names."""
    for name, p in module.named_parameters():
        yield without_wrapper(name), p
