"""The parameters of a model that nobody needs to build: from a list of shapes, a configuration, or a zoo.

The shapes of a Hugging Face configuration are computed here, from the published architectures, without
transformers. The models of torchvision and timm are built on torch's meta device, which holds no numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from sidcomp import files
from sidcomp.errors import ArgumentError, SetupError
from sidcomp.planner import fusion

WRITE = (
    "json.dump({n: list(p.shape) for n, p in model.named_parameters() if p.requires_grad}, "
    'open("parameters.json", "w"))'
)
_MOST = 2**40  # elements of a model
_MOST_LAYERS = 2**16
_ZOOS = ("torchvision", "timm")


@dataclass(frozen=True)
class Parameter:
    """One parameter. work: what the backward pass computes for it, relative to the other parameters."""

    name: str
    shape: tuple[int, ...]
    work: float

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Model:
    """Parameters in the order of the forward pass, which is that of named_parameters() in most models.

    about   what they are, and what was assumed, as a sentence
    """

    parameters: tuple[Parameter, ...]
    about: str

    @property
    def elements(self) -> int:
        return sum(p.elements for p in self.parameters)


def read_model(source: str | Path) -> Model:
    """The model of a JSON file (parameters, or a Hugging Face configuration), or "torchvision:resnet50".

    Raises ArgumentError or SetupError, which say what to give instead.
    """
    zoo, colon, name = str(source).partition(":")
    if colon and zoo in _ZOOS:
        return _of_zoo(zoo, name)
    try:
        text = files.read(source, "the model")
    except ArgumentError as e:
        raise ArgumentError(
            f"{e}; give a file of parameters, a Hugging Face config.json, torchvision:NAME or timm:NAME"
        ) from None
    return of_json(files.parse_json(text, str(source)), str(source))


def of_json(data: Any, name: str = "the model") -> Model:
    """A model from parsed JSON: {name: shape}, a list of {"name", "shape"}, or a configuration."""
    if isinstance(data, Mapping) and "model_type" in data:
        return _of_config(data, name)
    if isinstance(data, Mapping) and (not data or not all(isinstance(v, list) for v in data.values())):
        raise ArgumentError(
            f"{name} has neither the shapes of parameters nor a model_type: give "
            f'{{"name": [shape], ...}}, which this writes: {WRITE}'
        )
    pairs = list(data.items()) if isinstance(data, Mapping) else _pairs(data, name)
    shapes = [_shape(f"{name}, {key!r}", key, value) for key, value in pairs]
    model = Model(
        tuple(Parameter(key, shape, float(prod(shape))) for key, shape in shapes),
        "backward work in proportion to the elements of each parameter",
    )
    return _checked(model, name)


def _pairs(data: Any, name: str) -> list[tuple[Any, Any]]:
    pairs = []
    for i, item in enumerate(fusion._list(name, data)):
        if isinstance(item, Mapping):
            fusion._fields(f"{name}[{i}]", item, {"name", "shape"})
            pairs.append((item["name"], item["shape"]))
        elif isinstance(item, list) and len(item) == 2:
            pairs.append((item[0], item[1]))
        else:
            raise ArgumentError(f'{name}[{i}] must be {{"name": ..., "shape": [...]}} or [name, shape]')
    return pairs


def _shape(where: str, key: Any, value: Any) -> tuple[str, tuple[int, ...]]:
    fusion._string(where, key)
    sizes = fusion._list(where, value)
    return key, tuple(fusion._within(f"{where}[{i}]", size, 0, _MOST) for i, size in enumerate(sizes))


def _checked(model: Model, name: str) -> Model:
    if (again := files.twice(p.name for p in model.parameters)) is not None:
        raise ArgumentError(f"{name} has {again!r} twice: name each parameter once")
    if not 0 < model.elements <= _MOST:
        raise ArgumentError(f"{name} has {model.elements} elements: 1 to 2**40 are supported")
    return model


# ---- configurations of Hugging Face ------------------------------------------------------------------------


class _Config:
    """The fields of a configuration, checked when they are read."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data, self.name = data, name

    def size(self, field: str, default: int | None = None, most: int = 2**32) -> int:
        value = self.data.get(field)
        if value is None:
            value = default
        if value is None:
            raise ArgumentError(
                f"{self.name} lacks {field!r}, which model_type {self.data['model_type']!r} needs"
            )
        return fusion._within(f"{self.name}: {field}", value, 1, most)

    def layers(self, field: str) -> range:
        return range(self.size(field, most=_MOST_LAYERS))

    def flag(self, field: str, default: bool) -> bool:
        value = self.data.get(field, default)
        if not isinstance(value, bool):
            raise ArgumentError(f"{self.name}: {field} must be true or false, not {value!r}")
        return value

    def refuse(self, field: str, usual: Any) -> None:
        """Refuses any other value, for which the model has parameters that are not counted here."""
        value = self.data.get(field)
        if value not in (None, usual):
            raise ArgumentError(
                f"{self.name}: {field} is {value!r}, whose parameters are not known here, only those of "
                f"{usual!r}: give the parameters in place of the configuration; this writes them: {WRITE}"
            )


def _weight(name: str, *shape: int) -> Parameter:
    return Parameter(f"{name}.weight", shape, float(prod(shape)))


def _linear(name: str, inputs: int, outputs: int, bias: bool = True) -> Iterator[Parameter]:
    yield _weight(name, outputs, inputs)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,), float(outputs))


def _biased(name: str, *shape: int) -> Iterator[Parameter]:
    """A norm, or GPT-2's linear layer, whose weight is transposed."""
    yield _weight(name, *shape)
    yield Parameter(f"{name}.bias", shape[-1:], float(shape[-1]))


def _embedding(name: str, rows: int, width: int) -> Parameter:
    """A table in which the backward pass computes next to nothing."""
    return replace(_weight(name, rows, width), work=0.0)


def _decoder(c: _Config, *, bias: bool, normed: bool, names: str = "model.") -> Iterator[Parameter]:
    """Llama and its relatives: grouped keys and values, gated MLP, norms without a bias.

    bias: of query, key and value. normed: query and key are normalized by head.
    """
    width, heads, vocabulary = c.size("hidden_size"), c.size("num_attention_heads"), c.size("vocab_size")
    head = c.size("head_dim", 128 if normed else max(1, width // heads))
    values, inner = c.size("num_key_value_heads", heads) * head, c.size("intermediate_size")
    out, mlp = c.flag("attention_bias", False), c.flag("mlp_bias", False)
    yield _embedding(f"{names}embed_tokens", vocabulary, width)
    for i in c.layers("num_hidden_layers"):
        layer = f"{names}layers.{i}."
        yield from _linear(f"{layer}self_attn.q_proj", width, heads * head, bias or out)
        yield from _linear(f"{layer}self_attn.k_proj", width, values, bias or out)
        yield from _linear(f"{layer}self_attn.v_proj", width, values, bias or out)
        yield from _linear(f"{layer}self_attn.o_proj", heads * head, width, out)
        if normed:
            yield from (_weight(f"{layer}self_attn.{x}_norm", head) for x in "qk")
        yield from _linear(f"{layer}mlp.gate_proj", width, inner, mlp)
        yield from _linear(f"{layer}mlp.up_proj", width, inner, mlp)
        yield from _linear(f"{layer}mlp.down_proj", inner, width, mlp)
        yield _weight(f"{layer}input_layernorm", width)
        yield _weight(f"{layer}post_attention_layernorm", width)
    last = _weight(f"{names}norm", width)
    if c.flag("tie_word_embeddings", False):
        yield replace(last, work=last.work + vocabulary * width)
    else:
        yield last
        yield _weight("lm_head", vocabulary, width)


def _gpt2(c: _Config) -> Iterator[Parameter]:
    width, vocabulary = c.size("n_embd"), c.size("vocab_size")
    inner = c.size("n_inner", 4 * width)
    c.refuse("add_cross_attention", False)
    yield _embedding("transformer.wte", vocabulary, width)
    yield _embedding("transformer.wpe", c.size("n_positions"), width)
    for i in c.layers("n_layer"):
        layer = f"transformer.h.{i}."
        yield from _biased(f"{layer}ln_1", width)
        yield from _biased(f"{layer}attn.c_attn", width, 3 * width)
        yield from _biased(f"{layer}attn.c_proj", width, width)
        yield from _biased(f"{layer}ln_2", width)
        yield from _biased(f"{layer}mlp.c_fc", width, inner)
        yield from _biased(f"{layer}mlp.c_proj", inner, width)
    weight, shift = _biased("transformer.ln_f", width)
    tied = c.flag("tie_word_embeddings", True)
    yield from (weight, replace(shift, work=shift.work + vocabulary * width) if tied else shift)
    if not tied:
        yield _weight("lm_head", vocabulary, width)


def _bert(c: _Config) -> Iterator[Parameter]:
    width, inner = c.size("hidden_size"), c.size("intermediate_size")
    c.refuse("add_cross_attention", False)
    c.refuse("position_embedding_type", "absolute")
    yield _embedding("embeddings.word_embeddings", c.size("vocab_size"), width)
    yield _embedding("embeddings.position_embeddings", c.size("max_position_embeddings"), width)
    yield _embedding("embeddings.token_type_embeddings", c.size("type_vocab_size"), width)
    yield from _biased("embeddings.LayerNorm", width)
    for i in c.layers("num_hidden_layers"):
        layer = f"encoder.layer.{i}."
        for part in ("query", "key", "value"):
            yield from _linear(f"{layer}attention.self.{part}", width, width)
        yield from _linear(f"{layer}attention.output.dense", width, width)
        yield from _biased(f"{layer}attention.output.LayerNorm", width)
        yield from _linear(f"{layer}intermediate.dense", width, inner)
        yield from _linear(f"{layer}output.dense", inner, width)
        yield from _biased(f"{layer}output.LayerNorm", width)
    weight, shift = _linear("pooler.dense", width, width)
    yield replace(weight, work=0.0)  # one token of the sequence passes through it
    yield shift


_Family = tuple[Callable[[_Config], Iterator[Parameter]], str]

_PLAIN: _Family = (lambda c: _decoder(c, bias=False, normed=False), "a decoder with its output layer")
_ENCODER: _Family = (_bert, "an encoder with its pooler, without a head for a task")
_FAMILIES: dict[str, _Family] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": (lambda c: _decoder(c, bias=True, normed=False), _PLAIN[1]),
    "qwen3": (lambda c: _decoder(c, bias=False, normed=True), _PLAIN[1]),
    "gpt2": (_gpt2, _PLAIN[1]),
    "bert": _ENCODER,
    "roberta": _ENCODER,
}


def _of_config(data: Mapping[str, Any], name: str) -> Model:
    kind = data["model_type"]
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ArgumentError(
            f"{name}: the shapes of model_type {kind!r} are not known here (known: {', '.join(_FAMILIES)}): "
            f"give the parameters in place of the configuration; this writes them: {WRITE}"
        )
    make, about = _FAMILIES[kind]
    parameters = tuple(make(_Config(data, name)))
    note = f"{kind}: {about}; backward work in proportion to the elements of each weight, none for embeddings"
    return _checked(Model(parameters, note), name)


# ---- zoos --------------------------------------------------------------------------------------------------


def _of_zoo(zoo: str, name: str) -> Model:
    """A model of torchvision or timm. Raises SetupError where it is not installed."""
    try:
        library = import_module(f"{zoo}.models" if zoo == "torchvision" else zoo)
        import torch
    except ImportError as e:
        raise SetupError(
            f"{zoo}:{name} needs {zoo} and torch ({e}): pip install {zoo}, or give the parameters as a file; "
            f"this writes them: {WRITE}"
        ) from None
    try:
        with torch.device("meta"):
            if zoo == "torchvision":
                module = library.get_model(name, weights=None)
            else:
                module = library.create_model(name, pretrained=False)
    except (RuntimeError, ValueError, KeyError, TypeError) as e:
        raise ArgumentError(f"{zoo} cannot make a model {name!r}: {e}") from None
    size = getattr(module, "default_cfg", {}).get("input_size", (3, 224, 224))
    return of_module(module, (1, *size), f"{zoo}:{name}")


def of_module(module: Any, input_shape: Sequence[int], name: str = "the model") -> Model:
    """A model from a torch module on the meta device. Its forward pass with an input of this shape, which
    computes nothing there, tells how often each weight is applied; where it fails, the work is in proportion
    to the elements."""
    import torch

    positions: dict[str, float] = {}
    handles = []

    def watch(prefix: str, inner: Any) -> None:
        def note(_: Any, __: Any, out: Any) -> None:
            wide = inner.weight.shape[0]
            positions[f"{prefix}.weight"] = positions.get(f"{prefix}.weight", 0.0) + out.numel() / wide

        handles.append(inner.register_forward_hook(note))

    convolutions = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    for prefix, inner in module.named_modules():
        if isinstance(inner, (*convolutions, torch.nn.Linear)):
            watch(prefix, inner)
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    try:
        with torch.no_grad():
            module.eval()(torch.empty(*input_shape, dtype=dtype, device="meta"))
        about = "backward work in proportion to the multiplications of an input of " + " x ".join(
            map(str, input_shape[1:])
        )
    except Exception:  # whatever a model's own code raises for this input
        positions, about = {}, "backward work in proportion to the elements of each parameter"
    finally:
        for handle in handles:
            handle.remove()
    parameters = tuple(
        Parameter(key, tuple(p.shape), p.numel() * (positions.get(key, 0.0) if positions else 1.0))
        for key, p in module.named_parameters()
        if p.requires_grad
    )
    return _checked(Model(parameters, about), name)
