"""What can be set: precedence, kinds, and what a mistake says."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from paceline.config import (
    check_strategy,
    describe,
    environment_settings,
    flat_keys,
    parse_command_line,
    parse_value,
    read_plan,
    resolve,
)
from paceline.errors import ConfigError
from paceline.settings import GROUPS, STRATEGIES, CheckpointSettings, Settings
from paceline.strategies import registry
from paceline.training.setup import Arguments


def test_the_upper_layer_wins() -> None:
    layers: list[dict[str, Any]] = [{"seed": 1}, {"seed": 2}, {"seed": "3"}, {"seed": "4"}]
    names = ["script", "plan file", "environment", "command line"]
    for count in range(1, 5):
        given = layers[:count] + [{}] * (4 - count)
        found = resolve(*given)
        assert found.settings.seed == count
        assert found.sources["seed"] == names[count - 1]
    assert resolve({}).sources["seed"] == "default"


def test_batch_and_batch_per_worker_replace_each_other() -> None:
    found = resolve({"batch": 64}, command_line={"batch_per_worker": "16"}).settings
    assert (found.batch, found.batch_per_worker) == (None, 16)
    found = resolve({"batch_per_worker": 16}, command_line={"batch": "64"}).settings
    assert (found.batch, found.batch_per_worker) == (64, None)


@pytest.mark.parametrize(
    "given", ["here", Path("here"), {"directory": "here"}, CheckpointSettings(directory=Path("here"))]
)
def test_a_checkpoint_may_be_a_folder(given: Any) -> None:
    found = resolve({"checkpoint": given}, command_line={"checkpoint.every": "5"}).settings.checkpoint
    assert found == CheckpointSettings(directory=Path("here"), every=5)


def test_a_group_is_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"server = 'async' cannot be used: .* such as {'mode': 'async'}"):
        resolve({"server": "async"})


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'batchs'.*Did you mean 'batch'"):
        parse_command_line(["batchs=3"])
    with pytest.raises(ConfigError, match=r"no setting 'exat'.*Did you mean 'exact'"):
        resolve({"exat": True})


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("batch=many", "batch = 'many'.*command line"),
        ("batch=-1", "batch = -1"),
        ("exact=perhaps", "exact = 'perhaps'"),
        ("scale_lr=cubic", "scale_lr = 'cubic'"),
        ("checkpoint.keep=0", "checkpoint.keep = 0"),
        ("batch", "write --set key=value"),
    ],
)
def test_a_wrong_value_says_which(pair: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_command_line([pair])


def test_the_launcher_knows_the_strategies_and_says_what_the_workers_say() -> None:
    assert list(STRATEGIES) == registry.names()
    for name in STRATEGIES:
        check_strategy(name)
    for name in ("hogwildd", "nothing-like-it"):
        with pytest.raises(ConfigError) as said:
            registry.entry_of(name)
        with pytest.raises(ConfigError, match=f"^{re.escape(str(said.value))} A strategy that the script registers"):
            check_strategy(name)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("PACELINE_BACTH", "PACELINE_BATCH"), ("PACELINE_CHECKPOINT_EVERY", "PACELINE_CHECKPOINT__EVERY")],
)
def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, meant: str) -> None:
    monkeypatch.setenv(variable, "3")
    with pytest.raises(ConfigError, match=f"^{variable} .* Did you mean {meant}?"):
        environment_settings()


def test_other_variables_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_HOME", "PACELINE_DATA", "PACELINE_RUN"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("PACELINE_BATCH", "3")
    assert environment_settings() == {"batch": "3"}


def takes(kind: type) -> list[str]:
    """The keys of the settings that may be a number of this kind."""
    models = {"": Settings, **{f"{name}.": group for name, group in GROUPS.items()}}
    fields = {prefix + key: field for prefix, model in models.items() for key, field in model.model_fields.items()}
    return [key for key, field in fields.items() if kind in _kinds(field.annotation)]


def _kinds(annotation: Any) -> list[Any]:
    return [annotation, *(kind for part in get_args(annotation) for kind in _kinds(part))]


@pytest.mark.parametrize("value", [True, False, 1.0, 2.5])
@pytest.mark.parametrize("key", takes(int))
def test_a_whole_number_is_no_boolean_and_no_fraction(key: str, value: object) -> None:
    head, _, tail = key.partition(".")
    with pytest.raises(ConfigError, match=rf"{key} = {value} \(from the script\) cannot be used: .*valid"):
        resolve({head: {tail: value} if tail else value})
    with pytest.raises(ConfigError, match=rf"{key} = {value} \(from the command line\) cannot be used: .*valid"):
        resolve({}, command_line={key: str(value).lower()})


@pytest.mark.parametrize("key", takes(float))
def test_a_number_is_no_boolean(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} = True .*valid number"):
        resolve({}, plan={key: True})
    one = 0 if key in ("local.outer_momentum", "local.mixing", "local.delta") else 1  # which are below 1
    assert resolve({}, plan={key: one}) == resolve({}, plan={key: float(one)}) == resolve({}, plan={key: str(one)})


def test_all_numbers_are_checked() -> None:
    assert {"batch", "seed", "threads", "backup.workers", "checkpoint.every", "pipeline.replicas"} <= {*takes(int)}
    assert {"clip_norm", "timeout_seconds", "checkpoint.mtbf_hours", "memory_gigabytes"} <= {*takes(float)}


@pytest.mark.parametrize("key", takes(int))
def test_a_whole_number_may_be_text(key: str) -> None:
    wanted = resolve({}, plan={key: 3}).settings
    for found in (resolve({}, plan={key: "3"}), resolve({}, {}, {key: "3"}), resolve({}, {}, {}, {key: "3"})):
        assert found.settings == wanted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("true", True),
        ("False", False),
        ("none", None),
        ("linear", "linear"),
        ("2026-01-01", "2026-01-01"),
    ],
)
def test_values_of_the_command_line(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_a_plan_file(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("batch = 64\n[checkpoint]\nevery = 10\n")
    assert read_plan(plan) == {"batch": 64, "checkpoint.every": 10}
    plan.write_text("batch: 64")
    with pytest.raises(ConfigError, match="not TOML"):
        read_plan(plan)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "none.toml")


def test_every_setting_is_an_argument_and_is_described() -> None:
    assert set(Arguments.__annotations__) == set(Settings.model_fields)
    assert all(describe(key) for key in flat_keys())


@pytest.mark.parametrize("text", ["6", '["6"]', "6,", " 6 "])
def test_a_single_border_on_the_command_line(text: str) -> None:
    assert resolve({}, command_line={"pipeline.cut": text}).settings.pipeline.cut == ("6",)
    assert resolve({}, command_line={"pipeline.replicas": text}).settings.pipeline.replicas == (6,)


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("0.1", ("0.1",)),
        ("0.10", ("0.10",)),
        ("0.1,1.10", ("0.1", "1.10")),
        ("0x10", ("0x10",)),
        ("true", ("true",)),
        ("1e3", ("1e3",)),
        ("[1, 2]", ("1", "2")),
        ("[0.10]", ("0.10",)),
        ('"6"', ("6",)),
        ("none", None),
    ],
)
def test_borders_on_the_command_line_are_texts(text: str, cut: object) -> None:
    for where in ("command_line", "environment"):
        assert resolve({}, **{where: {"pipeline.cut": text}}).settings.pipeline.cut == cut  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", [[6, 7], (6, 7), ("6", 7), "6,7"])
def test_borders_in_the_script_may_be_numbers(cut: object) -> None:
    assert resolve({"pipeline": {"cut": cut}}).settings.pipeline.cut == ("6", "7")
