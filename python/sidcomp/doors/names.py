"""The names of a module's parameters, the same whether torch.compile wraps the module or not, and those for
which a State may have rules."""

from collections.abc import Iterator

import torch

from sidcomp.runtime.checkpoint_reader import without_wrapper


def named_parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields the parameters as `module.named_parameters()` does. torch.compile's wrapper adds "_orig_mod." to
    the names of what is inside of it; this is left out, so that a compiled module and a plain one have the
    same names."""
    for name, p in module.named_parameters():
        yield without_wrapper(name), p


def roles(module: torch.nn.Module) -> dict[str, frozenset[str]]:
    """The names of the parameters that are embeddings, and of those of the last layer that has a matrix."""
    names = {id(p): name for name, p in named_parameters(module)}
    tables, last = [], []
    for m in module.modules():
        own = list(m.parameters(recurse=False))
        if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag):
            tables += own
        elif any(p.dim() > 1 for p in own):
            last = own
    return {
        "embedding": frozenset(names[id(p)] for p in tables),
        "output": frozenset(names[id(p)] for p in last),
    }
