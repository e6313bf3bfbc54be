"""The shapes that `sidcomp estimate` computes from a configuration are those of transformers' own models."""

import json
from typing import Any

import pytest
from sidcomp.standalone.model_shapes import of_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 101, "max_position_embeddings": 40,
}  # fmt: skip
GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 40}


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("Llama", {**SMALL, "num_key_value_heads": 2}),
        ("Llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Mistral", {**SMALL, "num_key_value_heads": 2, "head_dim": 32}),
        ("Qwen2", {**SMALL, "num_key_value_heads": 2}),
        ("Qwen3", {**SMALL, "num_key_value_heads": 2}),
        ("GPT2", GPT2),
        ("GPT2", {**GPT2, "n_inner": 80, "tie_word_embeddings": False}),
        ("Bert", SMALL),
        ("Roberta", SMALL),
    ],
)
def test_shapes_are_those_of_the_library(kind: str, fields: dict[str, Any]) -> None:
    config = getattr(transformers, f"{kind}Config")(**fields)
    encoder = kind in ("Bert", "Roberta")
    make = transformers.AutoModel if encoder else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        module = make.from_config(config)
    theirs = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert {p.name: p.shape for p in of_json(json.loads(config.to_json_string())).parameters} == theirs
