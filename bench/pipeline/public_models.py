"""Cuts models of public packages into 2 and 3 stages, and compares their gradients with those of the whole model.

Each stage has a copy of the model of its own, without the parameters of the others, as a worker has; two microbatches
pass through. What is compared are bits: of the losses and of all gradients. Weights are random, nothing is loaded::

    pip install timm transformers torchvision snntorch
    python bench/pipeline/public_models.py                 all
    python bench/pipeline/public_models.py timm bert       those with this in their names
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline.errors import PacelineError
from paceline.partition.backward import backward
from paceline.partition.cut import layers_of
from paceline.system.torch_internals import tree_leaves

Made = tuple[nn.Module, Callable[[], Any]]


class Named(nn.Module):
    """Gives a model its input by names, as Hugging Face's take it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: dict[str, torch.Tensor]) -> Any:
        return self.model(**given)


def image(build: Callable[[], nn.Module], size: int = 64) -> Callable[[], Made]:
    return lambda: (build(), lambda: torch.randn(4, 3, size, size))


def vision(name: str, size: int = 64, **more: Any) -> Callable[[], Made]:
    def make() -> Made:
        from torchvision import models

        return image(lambda: models.get_model(name, weights=None, num_classes=10, **more), size)()

    return make


def timm(name: str, size: int = 64, **more: Any) -> Callable[[], Made]:
    def make() -> Made:
        import timm as package

        return image(lambda: package.create_model(name, pretrained=False, num_classes=10, **more), size)()

    return make


def hugging(kind: str, task: str, inputs: str = "text", **more: Any) -> Callable[[], Made]:
    """A tiny model of a class of transformers; ``inputs``: text, masked, both (two texts), image or sound."""

    def make() -> Made:
        transformers: Any = importlib.import_module("transformers")
        small = {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        values = more if inputs == "image" and "depths" in more else small | more
        config = getattr(transformers, f"{kind}Config")(**values)
        model = Named(getattr(transformers, f"{kind}{task}")(config))
        return model, lambda: given(inputs)

    def given(inputs: str) -> dict[str, torch.Tensor]:
        tokens = torch.randint(3, 64, (4, 12))
        if inputs == "image":
            return {"pixel_values": torch.randn(4, 3, 32, 32)}
        if inputs == "sound":
            return {"input_values": torch.randn(4, 8000)}
        values = {"input_ids": tokens}
        if inputs != "text":
            mask = torch.ones_like(tokens)
            mask[0, 9:] = 0
            values["attention_mask"] = mask
        if inputs == "both":
            values["decoder_input_ids"] = torch.randint(3, 64, (4, 7))
        return values

    return make


def _names(text: str) -> list[str]:
    return text.split()


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -gradients[0]


class Adversarial(nn.Module):
    """Ganin et al. 2016: a gradient is reversed between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, values: torch.Tensor) -> Any:
        values = self.body(values).relu()
        return self.label(values), self.domain(_Reverse.apply(values))


class Hooked(nn.Module):
    """Hooks on activations, a straight-through estimator and a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.second.register_full_backward_hook(lambda module, given, made: tuple(3 * one for one in given))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        if values.requires_grad:
            values.register_hook(lambda gradient: 0.5 * gradient)
        rounded = values + (values.round() - values).detach()
        with torch.no_grad():
            teacher = self.third(values)
        return self.last(self.third(self.second(rounded)) + teacher + values)


class Routed(nn.Module):
    """Each layer decides by the data what it does, and one is left early."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            choice = self.gate(values).softmax(-1)
            output = torch.zeros_like(values)
            for number, expert in enumerate(self.experts):
                (rows,) = (choice.argmax(-1) == number).nonzero(as_tuple=True)
                if rows.numel():
                    output = output.index_add(0, rows, expert(values[rows]) * choice[rows, number, None])
            return values + output

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Routed.Block() for _ in range(4)), nn.Linear(8, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
            if values.isnan().any():
                raise ValueError("not a number")
        return self.head(values)


def spiking(neuron: str) -> Callable[[], Made]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            package: Any = importlib.import_module("snntorch")
            self.first, self.spike = nn.Linear(8, 16), getattr(package, neuron)(**_NEURONS[neuron])
            self.second, self.again = nn.Linear(16, 4), getattr(package, neuron)(**_NEURONS[neuron])

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            left, right = self.spike.reset_mem(), self.again.reset_mem()
            left, right = (one if isinstance(one, tuple) else (one,) for one in (left, right))
            outputs = []
            for _ in range(3):
                spikes, *left = self.spike(self.first(values), *left)
                spikes, *right = self.again(self.second(spikes), *right)
                outputs.append(right[-1])
            return torch.stack(outputs)

    return lambda: (Net(), lambda: torch.randn(4, 8))


_NEURONS: dict[str, dict[str, Any]] = {
    "Leaky": {"beta": 0.9},
    "Synaptic": {"alpha": 0.9, "beta": 0.8},
    "Lapicque": {"beta": 0.9},
}

MODELS: dict[str, Callable[[], Made]] = {
    **{
        f"torchvision {name}": vision(name)
        for name in _names(
            "resnet18 resnet50 resnext50_32x4d wide_resnet50_2 vgg11_bn alexnet squeezenet1_1 densenet121 "
            "mobilenet_v2 mobilenet_v3_small shufflenet_v2_x0_5 efficientnet_b0 mnasnet0_5 regnet_y_400mf convnext_tiny"
        )
    },
    "torchvision googlenet": vision("googlenet", init_weights=False),
    "torchvision inception_v3": vision("inception_v3", 299, init_weights=False),
    "torchvision vit_b_16": vision("vit_b_16", image_size=64),
    "torchvision swin_t": vision("swin_t"),
    "torchvision maxvit_t": vision("maxvit_t", 224),
    **{
        f"timm {name}": timm(name)
        for name in _names(
            "resnet18 resnet26d seresnet18 ghostnet_100 efficientnet_lite0 mobilenetv3_small_050 hrnet_w18_small dla34 "
            "dpn48b res2net50_14w_8s cspresnet50 regnetx_002 repvgg_a0 xcit_nano_12_p8_224 poolformer_s12 "
            "convnextv2_atto edgenext_xx_small mobilevit_xxs resnetv2_50 tresnet_m levit_128s"
        )
    },
    **{
        f"timm {name}": timm(name, img_size=64)
        for name in _names("vit_tiny_patch16_224 deit_tiny_distilled_patch16_224 cait_xxs24_224 mixer_s32_224")
    },
    "hugging Bert": hugging("Bert", "ForSequenceClassification", "masked"),
    "hugging Bert masked LM": hugging("Bert", "ForMaskedLM"),
    "hugging Roberta": hugging("Roberta", "ForSequenceClassification", "masked", pad_token_id=1),
    "hugging Albert": hugging("Albert", "ForSequenceClassification", embedding_size=16),
    "hugging Electra": hugging("Electra", "ForSequenceClassification", embedding_size=16),
    "hugging DistilBert": hugging("DistilBert", "ForSequenceClassification", dim=32, n_layers=4, n_heads=4),
    "hugging DebertaV2": hugging("DebertaV2", "ForSequenceClassification"),
    "hugging MPNet": hugging("MPNet", "ForSequenceClassification"),
    "hugging ModernBert": hugging("ModernBert", "ForSequenceClassification"),
    "hugging GPT2": hugging("GPT2", "LMHeadModel", n_embd=32, n_layer=4, n_head=4, n_positions=64),
    "hugging GPTNeo": hugging("GPTNeo", "ForCausalLM", num_layers=4, num_heads=4, attention_types=[[["global"], 4]]),
    "hugging GPTNeoX": hugging("GPTNeoX", "ForCausalLM"),
    "hugging OPT": hugging("OPT", "ForCausalLM", ffn_dim=48, word_embed_proj_dim=32),
    "hugging Bloom": hugging("Bloom", "ForCausalLM", n_layer=4, n_head=4),
    "hugging Llama": hugging("Llama", "ForCausalLM"),
    "hugging Llama masked": hugging("Llama", "ForCausalLM", "masked"),
    "hugging Mistral": hugging("Mistral", "ForCausalLM"),
    "hugging Qwen2": hugging("Qwen2", "ForCausalLM"),
    "hugging Qwen3": hugging("Qwen3", "ForCausalLM"),
    "hugging Gemma": hugging("Gemma", "ForCausalLM", head_dim=8),
    "hugging Phi": hugging("Phi", "ForCausalLM"),
    "hugging Falcon": hugging("Falcon", "ForCausalLM"),
    "hugging Mixtral": hugging("Mixtral", "ForCausalLM", num_local_experts=4),
    "hugging Mamba": hugging("Mamba", "ForCausalLM"),
    "hugging T5": hugging("T5", "ForConditionalGeneration", "both", d_model=32, d_ff=48, num_layers=3, d_kv=8),
    "hugging Bart": hugging(
        "Bart",
        "ForConditionalGeneration",
        "both",
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    ),
    "hugging ViT": hugging("ViT", "ForImageClassification", "image", image_size=32, patch_size=8),
    "hugging DeiT": hugging("DeiT", "ForImageClassification", "image", image_size=32, patch_size=8),
    "hugging BEiT": hugging("Beit", "ForImageClassification", "image", image_size=32, patch_size=8),
    "hugging Dinov2": hugging("Dinov2", "ForImageClassification", "image", image_size=32, patch_size=8),
    "hugging Swin": hugging(
        "Swin",
        "ForImageClassification",
        "image",
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 2],
        num_heads=[2, 2],
        window_size=4,
    ),
    "hugging ConvNext": hugging(
        "ConvNext", "ForImageClassification", "image", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2
    ),
    "hugging ResNet": hugging(
        "ResNet", "ForImageClassification", "image", hidden_sizes=[8, 16], depths=[1, 2], embedding_size=8
    ),
    "hugging Segformer": hugging(
        "Segformer", "ForImageClassification", "image", depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32]
    ),
    "hugging Wav2Vec2": hugging("Wav2Vec2", "ForSequenceClassification", "sound", layerdrop=0.0, mask_time_prob=0.0),
    "hugging Wav2Vec2 LayerDrop": hugging("Wav2Vec2", "ForSequenceClassification", "sound"),
    **{f"snntorch {neuron}": spiking(neuron) for neuron in _NEURONS},
    "own gradient reversal": lambda: (Adversarial(), lambda: torch.randn(4, 8)),
    "own hooks": lambda: (Hooked(), lambda: torch.randn(4, 8)),
    "own experts": lambda: (Routed(), lambda: torch.randn(16, 8)),
}


def scalar(output: Any) -> torch.Tensor:
    """A loss of all that a model returns first: logits, or the tensors of a tuple."""
    output = getattr(output, "logits", output)
    values = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([functional.mse_loss(value.float(), torch.ones_like(value).float()) for value in values]).sum()


def in_stages(models: list[nn.Module], stages: list[Any], data: Any) -> torch.Tensor:
    """One microbatch through stages, each with its own copy of the model."""
    entered: list[Any] = []
    left: list[Any] = []
    values = data
    for place, stage in enumerate(stages):
        if place:
            values = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in left[-1])
        entered.append(values)
        left.append(stage(values))
    loss = scalar(left[-1])
    backward([loss], None, entered[-1])
    for place in reversed(range(len(stages) - 1)):
        backward(left[place], [value.grad for value in entered[place + 1]], entered[place] if place else [])
    return loss.detach()


def compare(model: nn.Module, give: Callable[[], Any], count: int) -> str:
    """Return the result of a cut into ``count`` stages: ok and the first layers of the stages, or the difference."""
    torch.manual_seed(1)
    pairs = [give(), give()]
    models = [copy.deepcopy(model) for _ in range(count)]
    layers = [layers_of(one, copy.deepcopy(pairs[0])) for one in models]
    names = layers[0].names
    if len(names) < count:
        return f"refused: only {len(names)} layers"
    places = [len(names) * stage // count for stage in range(count + 1)]
    stages = [one.stage(places[n], places[n + 1]) for n, one in enumerate(layers)]
    for one, stage in zip(models, stages, strict=True):
        for name, parameter in one.named_parameters():
            if name not in stage.parameters:
                parameter.data = parameter.new_empty(0)
    for number, data in enumerate(pairs):
        torch.manual_seed(number)
        whole = scalar(model(copy.deepcopy(data)))
        whole.backward()
        torch.manual_seed(number)
        loss = in_stages(models, stages, copy.deepcopy(data))
        if not torch.equal(loss, whole.detach()):
            return f"DIFFERENT: the loss of microbatch {number}: {loss.item()} for {whole.item()}"
        for name, parameter in model.named_parameters():
            users = [n for n, stage in enumerate(stages) if name in stage.parameters]
            found = [dict(models[n].named_parameters())[name].grad for n in users]
            found = [gradient for gradient in found if gradient is not None]
            total = None if not found else torch.stack(found).sum(0)
            same = total is parameter.grad or (
                total is not None
                and parameter.grad is not None
                and (torch.equal if len(found) < 2 else torch.allclose)(total, parameter.grad)
            )
            if not same:
                return f"DIFFERENT: the gradient of {name}, of stages {users}"
        for one in [model, *models]:
            one.zero_grad()
    return f"ok: {len(names)} layers, cut at {', '.join(names[place] for place in places[1:-1])}"


def main() -> None:
    """Print a line for each model and number of stages, and how many there are of each kind."""
    warnings.simplefilter("ignore")
    kinds: Counter[str] = Counter()
    for name, make in MODELS.items():
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        results = []
        for count in (2, 3):
            try:
                torch.manual_seed(0)
                model, give = make()
            except Exception as error:  # noqa: BLE001 - a package that is missing, or another version of it
                results.append(f"not built: {type(error).__name__}: {error}")
                break
            try:
                results.append(compare(model, give, count))
            except PacelineError as error:
                results.append(f"refused: {error}")
            except Exception as error:  # noqa: BLE001 - of any kind, and the next model is to be tried
                results.append(f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        kinds[max(result.partition(":")[0] for result in results)] += 1
        for result in dict.fromkeys(results):
            print(f"{name:40} {result[:300]}", flush=True)
    print(dict(kinds))


main()
