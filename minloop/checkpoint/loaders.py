"""Where loaders stand in their data: saved with a training state, and restored."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from minloop.checkpoint.agreement import agreed
from minloop.checkpoint.reading import CheckpointError
from minloop.messages import say_once


class Positioned(Protocol):
    """Anything with a position to save and restore, such as `minloop.Loader`."""

    def state_dict(self) -> dict[str, Any]:
        """The position as plain data (numbers, strings, tensors, lists and dicts of them), equal on every rank."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to a position that `state_dict` returned."""
        ...


Loaders = Positioned | Mapping[str, Positioned] | None


def named_loaders(loaders: Loaders) -> Mapping[str, Positioned]:
    """The loaders by name; a single one is called "train".

    Raises:
        TypeError: one has no position: it is an iterator without `state_dict` and `load_state_dict`.
    """
    if loaders is None:
        return {}
    named = loaders if isinstance(loaders, Mapping) else {"train": loaders}
    for name, loader in named.items():
        if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
            raise TypeError(
                f"the loader {name!r} is a {type(loader).__name__} without state_dict and load_state_dict, so that its "
                "position cannot be saved or restored: give it both, or leave it out"
            )
    return named


def check_loaders(saved: dict[str, Any], loaders: Mapping[str, Positioned]) -> None:
    """Raise ValueError if the checkpoint's record has no position of one of the loaders."""
    positions = saved.get("loaders", {})
    for name in loaders:
        if name not in positions:
            raise ValueError(
                f"the checkpoint holds no position of a loader called {name!r}, only of {sorted(positions)}"
            )


@contextmanager
def positioned(source: Path, saved: dict[str, Any], loaders: Mapping[str, Positioned]) -> Generator[None]:
    """Put loaders where the checkpoint was; if what follows fails, back to where they were."""
    before: dict[str, Any] = {}
    try:
        with agreed():
            before |= {name: loader.state_dict() for name, loader in loaders.items()}
            for name, loader in loaders.items():
                # Megatron-LM and Megatron-Bridge store a number of samples and not in which data
                position = saved["loaders"][name]
                position = before[name] | position if "of_megatron_lm" in saved else position
                try:
                    loader.load_state_dict(position)
                except (AttributeError, KeyError, TypeError) as error:
                    found = f"minloop.loaders.{name} is {position!r:.200}"
                    raise CheckpointError(f"{source} is damaged: {found} ({type(error).__name__}: {error})") from error
        yield
    except Exception:
        for name, position in before.items():
            loaders[name].load_state_dict(position)
        raise


def say_not_positioned(source: Path, saved: dict[str, Any], loaders: Mapping[str, Positioned]) -> None:
    """Say which positions of the checkpoint nobody took over: their data begin anew."""
    if left := [name for name in saved.get("loaders", {}) if name not in loaders]:
        say_once(f"{source} holds positions of loaders that were not given, {', '.join(left)}: their data begin anew")
