"""Models of timm and transformers: tiny ones, with random weights; nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

Arguments = dict[str, Any]

TIMM = (
    *("test_byobnet", "test_convnext", "test_convnext2", "test_convnext3", "test_efficientnet", "test_efficientnet_gn"),
    *("test_efficientnet_evos", "test_mambaout", "test_nfnet", "test_resnet", "test_vit", "test_vit2"),
    *("mobilenetv3_small_050", "lcnet_050", "tinynet_e", "mnasnet_small", "ghostnet_050", "edgenext_xx_small"),
    *("mobilevit_xxs", "regnetx_002"),
)
IMAGE_SIZE = 64

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
START = {"decoder_start_token_id": 0}
HUGGING: dict[str, tuple[str, Arguments]] = {
    "Albert": ("MaskedLM", {"embedding_size": 16}),
    "Bert": ("MaskedLM", {}),
    "Bloom": ("CausalLM", {"n_layer": 2, "n_head": 4}),
    "Deberta": ("MaskedLM", {}),
    "DistilBert": ("MaskedLM", {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    "Electra": ("MaskedLM", {"embedding_size": 16}),
    "Falcon": ("CausalLM", {}),
    "Gemma": ("CausalLM", {"head_dim": 8}),
    "GPT2": ("LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "GPTNeoX": ("CausalLM", {}),
    "Llama": ("CausalLM", {}),
    "Mamba": ("CausalLM", {"state_size": 4}),
    "Mistral": ("CausalLM", {}),
    "Mixtral": ("CausalLM", {"num_local_experts": 4}),
    "OPT": ("CausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "Phi": ("CausalLM", {}),
    "Qwen2": ("CausalLM", {}),
    "Roberta": ("MaskedLM", {"max_position_embeddings": 70}),
    "T5": ("ConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **START}),
}


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def loss_of_tokens(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**given).loss
    return loss


def of_timm(name: str) -> Arguments:
    import timm

    values = torch.randn(48, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(values, torch.arange(48) % 4)
    model = timm.create_model(name, pretrained=False, num_classes=4, drop_rate=0.1)
    return {"model": model, "optimizer": adam, "data": data, "loss": functional.cross_entropy}


def of_transformers(name: str, task: str, more: Arguments) -> Arguments:
    import transformers

    made = getattr(transformers, f"{name}Config")(**{**SMALL, **more})
    model = getattr(transformers, f"{name}For{task}" if task != "LMHeadModel" else f"{name}{task}")(made)
    return {"model": model.train(), "optimizer": adam, "data": Tokens(), "forward": loss_of_tokens}


def subjects() -> dict[str, Callable[[], Arguments]]:
    """All of them, by their names."""
    found: dict[str, Callable[[], Arguments]] = {f"model timm {name}": partial(of_timm, name) for name in TIMM}
    for name, (task, more) in HUGGING.items():
        found[f"model transformers {name}"] = partial(of_transformers, name, task, more)
    return found
