"""Checks that a strategy supports the settings and arguments of a run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from paceline.comm.reduction.narrow import FLOAT8
from paceline.data.recurrent.carried import takes_state
from paceline.environments import env
from paceline.errors import ConfigError
from paceline.settings import Settings
from paceline.step.gradients.fixed_point import TYPES
from paceline.step.gradients.floats import DTYPES
from paceline.strategies.base import Capabilities
from paceline.system.wires import ADAPTIVE, OUTER, PARTIAL_WIRES, formats_in

_EXACT = ("allreduce", "stealing")  # exact strategies to recommend in error messages


def check(
    settings: Settings,
    capabilities: Capabilities,
    forward: object,
    model: nn.Module,
    batch_loss: object = None,
    located: bool = False,
) -> None:
    """Raise ConfigError if settings or arguments ask for more than the strategy supports.

    Args:
        forward: ``forward`` argument of the script. None if the script gave a loss instead.
        located: whether a worker has only some of the samples.
    """
    _check_data(settings, capabilities, forward, located)
    if batch_loss is not None and not capabilities.batch_losses:
        raise ConfigError(
            f"strategy {settings.strategy!r} cannot train with batch_loss=, which needs the outputs of the whole batch "
            f"before the first gradient: use 'allreduce', 'stealing', 'sharded', or 'pipeline' with pipeline.schedule "
            f"= '1f1b'."
        )
    others = " or ".join(repr(one) for one in _EXACT if one != settings.strategy)
    cure, which = f"use strategy {others}", repr(settings.strategy)
    if capabilities.exact_with:
        cure, which = f"set {capabilities.exact_with}, or {cure}", f"{which} with these settings"
    if settings.exact and not capabilities.exact:
        raise ConfigError(
            f"strategy {which} cannot give the same bits for any number of workers: leave out exact=True, "
            f"{'' if capabilities.exact_with else 'or '}{cure}."
        )
    if settings.average.kind is not None and not capabilities.averages:
        raise ConfigError(
            f"strategy {settings.strategy!r} cannot keep an average of the weights (average = "
            f"{settings.average.kind!r}), because each worker sees only its own updates: leave it out, or use "
            f"'parameter-server' with server.mode = 'async'."
        )
    if settings.autocast == "float16" and not capabilities.scales_loss:
        raise ConfigError(
            f"strategy {settings.strategy!r} cannot scale losses, which autocast = 'float16' needs: use 'bfloat16', or "
            f"strategy 'allreduce' or 'stealing'."
        )
    _check_memory(settings)
    _check_wires(settings, capabilities, forward, model)
    _check_communication(settings, capabilities, forward)
    if settings.fixed_point:
        _check_fixed_point(settings, capabilities, model)
    if env.trace() is not None:
        _check_verified(settings, capabilities, f"strategy {which} does not: {cure}.")
    if settings.checkpoint.every == "auto" and (settings.keeps_errors or not capabilities.replicated):
        what = f"wire = {settings.wire!r}" if settings.keeps_errors else f"strategy {settings.strategy!r}"
        raise ConfigError(
            f"checkpoint.every = 'auto' needs workers that all hold the same state after each step, which {what} does "
            f"not give: save after a number of steps, such as checkpoint.every = 100."
        )


def _check_data(settings: Settings, capabilities: Capabilities, forward: object, located: bool) -> None:
    if takes_state(forward) and not capabilities.carries:
        raise ConfigError(
            f"forward(model, microbatch, state) hands a state from batch to batch, which strategy "
            f"{settings.strategy!r} cannot carry: use 'allreduce' or 'stealing'."
        )
    local = settings.local
    if local.sites and (env.path(env.PROFILE) is not None or env.tried_steps() is not None):
        raise ConfigError(
            "local.sites = True: paceline plan compares ways to divide the same batches, but each site trains on data "
            "of its own, which no other strategy does. Compare runs with paceline run instead, for example with "
            "other values of local.every and local.sampled."
        )
    private = next((key for key in ("sites", "masked", "clip", "noise") if getattr(local, key)), None)
    if private and not (capabilities.replicas and local.sites):
        raise ConfigError(
            f"local.{private} = {getattr(local, private)} protects data only with strategy 'local-sgd' or 'diloco' and "
            f"local.sites = True, but the strategy is {settings.strategy!r} and local.sites = {local.sites}: set both, "
            f"or leave out local.{private}."
        )
    if located and (settings.keeps_errors or not capabilities.located):
        what, cure = f"strategy {settings.strategy!r}", "use strategy 'allreduce', 'stealing' or 'sharded'"
        if capabilities.replicas:
            cure = f"set local.sites = True to train replicas on the shards, or {cure}"
        if capabilities.located:
            what, cure = f"wire = {settings.wire!r}", "use another format, such as wire = 'int8'"
        raise ConfigError(
            f"{what} decides which worker computes which microbatch, but with Located data each worker computes the "
            f"samples that it has: {cure}."
        )


def _check_verified(settings: Settings, capabilities: Capabilities, because: str) -> None:
    if not capabilities.exact:
        raise ConfigError(
            f"paceline verify is for strategies that compute the same function on any number of workers, which "
            f"{because}"
        )
    if capabilities.replicas:
        raise ConfigError(
            f"paceline verify compares the loss of each step, and strategy {settings.strategy!r} has one only after "
            f"outer steps, because each worker trains its own replicas: compare the fingerprints of runs instead."
        )


def _check_memory(settings: Settings) -> None:
    if settings.recompute == "auto" and settings.memory_gigabytes is None:
        raise ConfigError(
            "recompute = 'auto' chooses the blocks to recompute by the memory of a worker: set memory_gigabytes, or "
            "name module classes in recompute."
        )
    if settings.memory_gigabytes is not None and settings.compile:
        raise ConfigError(
            "memory_gigabytes needs the activations of the model, which are unknown for a compiled model: leave out "
            "compile=True, or memory_gigabytes."
        )


def _check_wires(settings: Settings, capabilities: Capabilities, forward: object, model: nn.Module) -> None:
    for wire in dict.fromkeys(settings.wires.values()):
        _check_wire(wire, settings, capabilities, forward)
    present = {type(module).__name__ for module in model.modules()}
    if missing := [kind for kind in settings.wires if kind not in (*present, "default")]:
        raise ConfigError(
            f"wire = {settings.wire!r}: the model has no module of class {missing[0]!r}; it has "
            f"{', '.join(sorted(present))}."
        )


def _check_wire(wire: str, settings: Settings, capabilities: Capabilities, forward: object) -> None:
    if wire not in capabilities.wires:
        of_local = "'diloco' without local.sites"
        other = "'allreduce'" if wire in PARTIAL_WIRES else of_local if wire == OUTER else "'allreduce' or 'sharded'"
        raise ConfigError(
            f"strategy {settings.strategy!r} cannot send gradients as {wire} (wire = {settings.wire!r}): it sends "
            f"{' and '.join(capabilities.wires)}. Leave out wire, or use {other}."
        )
    if wire in (*PARTIAL_WIRES, ADAPTIVE) and isinstance(forward, Mapping):
        raise ConfigError(
            f"wire = {wire!r} keeps {'the bits' if wire == ADAPTIVE else 'a part'} of each gradient for the next step, "
            f"and cannot train with a forward for each optimizer, whose steps have different gradients: use wire = "
            f"'int8'."
        )
    if wire in (*DTYPES, *PARTIAL_WIRES) and settings.exact == "fixed-point":
        raise ConfigError(
            f"wire = {wire!r} rounds the sums that exact='fixed-point' adds up as whole numbers: set exact=True, which "
            f"rounds every sum of the tree alike, or use wire = 'int8'."
        )
    if wire in DTYPES and DTYPES[wire] in FLOAT8 and settings.reduction == "collective":
        raise ConfigError(
            f"wire = {wire!r} needs sums along the tree, because the all-reduce of a back end does not add up 8-bit "
            f"floats: leave out reduction, or use wire = 'int8'."
        )


def _check_communication(settings: Settings, capabilities: Capabilities, forward: object) -> None:
    asked, chooses = f"communication = {settings.communication!r}", settings.communication == "auto"
    if settings.communication == "fixed":
        if settings.tolerance != "bits":
            raise ConfigError(
                f"tolerance = {settings.tolerance!r} limits the changes by communication = 'auto', but {asked}: set "
                f"communication = 'auto', or leave out tolerance."
            )
        return
    if not capabilities.communication or isinstance(forward, Mapping):
        what = "a forward for each optimizer" if capabilities.communication else f"strategy {settings.strategy!r}"
        raise ConfigError(
            f"{asked} changes buckets and formats between two steps, which {what} cannot: use strategy 'allreduce' "
            f"or 'sharded' with one forward, or leave it out."
        )
    for wire in formats_in(settings.communication).values():
        _check_wire(wire, settings, capabilities, forward)
    if chooses and settings.bucket_megabytes is not None:
        raise ConfigError(
            f"{asked} chooses the size of buckets, but bucket_megabytes = {settings.bucket_megabytes:g}: leave out one."
        )
    if settings.keeps_errors or (settings.chooses_wire and settings.wire != "float32"):
        cure = ", or set tolerance = 'bits'" if chooses and not settings.keeps_errors else ""
        raise ConfigError(f"{asked} cannot be combined with wire = {settings.wire!r}: leave out one{cure}.")
    collective = settings.reduction == "collective" and not settings.fixed_point
    if chooses and settings.tolerance == "bits" and collective:
        raise ConfigError(
            f"{asked} with tolerance = 'bits' changes only buckets, but with reduction = 'collective' they determine "
            f"the order of additions: leave out reduction, or set tolerance = 'rounding'."
        )
    if chooses and settings.tolerance != "bits" and env.trace() is not None:
        raise ConfigError(
            f"{asked} with tolerance = {settings.tolerance!r} chooses different formats in each run, which paceline "
            f"verify would find: set tolerance = 'bits', or communication to the formats that a run has chosen."
        )


def _check_fixed_point(settings: Settings, capabilities: Capabilities, model: nn.Module) -> None:
    if not capabilities.fixed_point:
        raise ConfigError(
            f"strategy {settings.strategy!r} cannot add up gradients in fixed point: set exact=True, or use "
            f"'allreduce', 'sharded' or 'stealing'."
        )
    asked, cure = (
        ("exact='fixed-point'", "Set exact=True")
        if settings.wire == "float32"
        else (f"wire={settings.wire!r}", "Use wire='float32'")
    )
    for name, value in model.named_parameters():
        if value.dtype not in TYPES:
            raise ConfigError(
                f"The parameter {name!r} is of type {value.dtype}, whose gradients {asked} cannot add up: it takes "
                f"float16, bfloat16, float32 and float64. {cure}."
            )
