"""Finds the embeddings and the output layer of a module, for which a State may have rules."""

import torch

from sidcomp.doors.names import named_parameters


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
