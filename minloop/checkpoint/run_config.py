"""run_config.yaml: the configs of a run as text beside its weights, and back into equal objects."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import TransformerConfig

from minloop.checkpoint import content
from minloop.checkpoint.agreement import is_first
from minloop.checkpoint.config_nodes import decode, encode
from minloop.checkpoint.reading import SavedCheckpoint
from minloop.messages import say_once
from minloop.state import TrainState

RUN_CONFIG = "run_config.yaml"

_OF_THE_OPTIMIZER = ("optimizer", "lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "clip_grad")
_OF_ONE_OPTIMIZER = ("adam_", "sgd_", "muon_", "adaptive_muon_", "lion_", "soap_")
_OF_THE_SCHEDULE = {"max_lr": "lr"}


def write_run_config(path: str | Path, **configs: Any) -> None:
    """Write configs, each under its name, as YAML that `read_run_config` reads back into equal objects.

    Taken are dataclasses, mcore's and your own subclasses of them, and plain dicts. Callables are written by their
    qualified names, dtypes and enums by name, pipeline layouts as text. Hooks of a training state are left out. Of
    other objects, such as a tokenizer, only the class is written.

        write_run_config("run_config.yaml", model=config, ddp=ddp_config, optimizer=optimizer_config)

    Raises:
        ValueError: a callable without a name that leads back to it (a lambda, a local function); the message names it.
    """
    unnamed: list[str] = []
    nodes = {name: encode(config, name, unnamed) for name, config in configs.items()}
    if unnamed:
        raise ValueError(f"these callables have no name by which to read them back: {'; '.join(unnamed)}")
    Path(path).write_text(_text(nodes))


def read_run_config(
    path: str | Path, *, modules: Iterable[str] = (), given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read what `write_run_config` or `save_checkpoint` wrote: the configs, by name, as equal objects.

    Equal but for mcore's own initialisers, which are partial functions, and these equal only themselves.

    Nothing in the file is executed. It may name dataclasses and enums of megatron.core and minloop, activation and
    initialisation functions of torch and megatron.core, and what lies in `modules`.

    Args:
        path: the file, or the directory of a checkpoint.
        modules: modules or packages of yours whose classes and functions may be named, such as ``["my_models"]``.
        given: values to use in place of recorded ones, by path, such as ``{"dataset.tokenizer": tokenizer}``.
    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not of this form, names something else, or lacks an object; the message says which.
    """
    path = Path(path)
    if path.is_dir() and not (path / RUN_CONFIG).exists() and any(path.glob("iter_*")):
        raise FileNotFoundError(f"{path} holds checkpoints: name one of them, such as latest_checkpoint() returns")
    path = path / RUN_CONFIG if path.is_dir() else path
    nodes = read_nodes(path, references=False)
    given, modules = given or {}, tuple(modules)
    return {name: decode(node, name, modules, given) for name, node in nodes.items()}


def read_nodes(path: Path, *, references: bool = True) -> dict[str, Any]:
    """Read the file into dicts, lists, numbers and strings.

    Args:
        references: allow parts that are repeated by reference, by which a short file can be of any size to walk.
    Raises:
        ValueError: it is no YAML mapping, or repeats parts though it must not.
    """
    try:
        nodes = yaml.load(path.read_text(), Loader=yaml.SafeLoader if references else _PlainLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a run config: {error}") from error
    if not isinstance(nodes, dict):
        raise ValueError(f"{path} is not a run config: it holds no names with configs under them")
    return nodes


def configs_of(state: TrainState) -> str:
    """The configs of a training state as the text of a run config; callables without a name are said once."""
    model: Any = content.unwrapped_models(state)[0]
    unnamed: list[str] = []
    nodes = {
        "model": encode(state.config, "model", unnamed),
        "model_options": {name: getattr(model, name) for name in content.MODEL_FIELDS if hasattr(model, name)},
        "ddp": encode(state.chunks[0].ddp_config, "ddp", unnamed),
        "optimizer": encode(state.optimizer.config, "optimizer", unnamed),
        # what Megatron-Bridge asks of a checkpoint before it loads it
        "checkpoint": {"save_optim": True, "save_rng": True, "fully_parallel_save": False},
    }
    if unnamed:
        say_once(f"{RUN_CONFIG} can be read back only if they are given: {'; '.join(unnamed)}")
    return _text(nodes)


def differing_fields(directory: Path, config: TransformerConfig) -> list[str]:
    """Name the fields of the model that differ between a checkpoint's record and `config`, with both values.

    Those of mcore's `ModelParallelConfig` (layout, precision, communication) do not make another model: they are left
    out. Without a record nothing is known to differ.
    """
    try:
        saved = read_nodes(directory / RUN_CONFIG).get("model", {})
    except (FileNotFoundError, ValueError):
        return []
    own = encode(config, "model")
    of_layout = {f.name for f in dataclasses.fields(ModelParallelConfig)}
    return [
        f"{name}: {_short(saved[name])} saved, {_short(own[name])} here"
        for name in own
        if name in saved and name not in of_layout and saved[name] != own[name]
    ]


def say_other_settings(opened: SavedCheckpoint, state: TrainState) -> None:
    """Say once, on the first rank, in which settings of optimizer and schedule a run that goes on differs."""
    if not is_first():
        return
    try:
        nodes = read_nodes(opened.path / RUN_CONFIG).get("optimizer")
    except (OSError, ValueError):
        nodes = None
    recorded: dict[str, Any] = nodes if isinstance(nodes, dict) else {}
    saved = _settings(recorded, opened.common.get("opt_param_scheduler", {}))
    schedule = {} if state.scheduler is None else state.scheduler.state_dict()
    own = _settings(encode(state.optimizer.config, "optimizer", []), schedule)
    differing = [f"{name}: {saved[name]} → {own[name]}" for name in own if saved.get(name, own[name]) != own[name]]
    if differing:
        say_once(
            f"{opened.path.name} was saved with other settings (saved → now, and those of now hold): "
            f"{', '.join(differing)}"
        )


def _settings(optimizer: Mapping[str, Any], schedule: Mapping[str, Any]) -> dict[str, Any]:
    """What decides how the run learns, and nothing that goes with a layout."""
    scheduled = {_OF_THE_SCHEDULE.get(name, name): value for name, value in schedule.items() if name != "num_steps"}
    chosen = {n: v for n, v in optimizer.items() if n in _OF_THE_OPTIMIZER or n.startswith(_OF_ONE_OPTIMIZER)}
    return scheduled | chosen


def _short(node: Any) -> str:
    text = str(node.get("_name_", node["_target_"])) if isinstance(node, dict) and "_target_" in node else repr(node)
    return text if len(text) < 60 else f"{text[:60]}…"


def _text(nodes: dict[str, Any]) -> str:
    return yaml.dump(nodes, Dumper=_PlainDumper, sort_keys=False, width=120)


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it repeats a part by reference (*name), which no run config does")
        return super().compose_node(parent, index)
