"""The state of a long run of writing indexed text, so that a killed one is gone on with and leaves nothing that loads.

Everything is written in the directory ``<output_prefix>.unfinished`` and moved to its names at the end, .idx last. Its
state.json says how far the files in it are good; what lies beyond is cut off when the run is gone on with.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from minloop.data.indexed import IndexedWriter, check_untaken
from minloop.data.sources import Position
from minloop.disk import write_durably

SAVE_SECONDS = 10.0  # of work that a killed run may lose
EXAMPLES = 100  # of malformed records that are remembered


@dataclass
class Counts:
    """What a run has read and written so far."""

    documents: int = 0
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    empty: int = 0
    malformed: int = 0
    examples: list[str] = field(default_factory=list[str])


class UnfinishedWork:
    """The files of one run, by key, the position in its inputs and its counts."""

    def __init__(
        self,
        output_prefix: str,
        names: Mapping[str, str],
        identity: dict[str, Any],
        dtype: type[numpy.number],
        resume: bool,
    ) -> None:
        """Begin, or go on where a killed run was.

        Args:
            names: the final prefix of each key.
            identity: what must be equal for going on with another run's files.
            resume: False throws such files away.
        Raises:
            ValueError: a final name is taken, or the unfinished run is one of another `identity`.
            RuntimeError: another process is at it.
        """
        self._directory, self._names, self._identity = Path(f"{output_prefix}.unfinished"), names, identity
        if not (self._directory / "state.json").exists():
            self._check_names()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = (self._directory / "lock").open("w")
        try:
            self._own()
            if not resume:
                (self._directory / "state.json").unlink(missing_ok=True)
            state = self._read_state()
            self.position, self.counts = Position(**state.get("position", {})), Counts(**state.get("counts", {}))
            self._finished = state.get("finished", False)
            self.writers: dict[str, IndexedWriter] = {}
            if not self._finished:
                self._check_names()
                for key in names:
                    sizes = state.get("sizes", {}).get(key)
                    self.writers[key] = IndexedWriter(str(self._directory / key), dtype, sizes)
        except BaseException:
            self.close()
            raise
        self._saved = time.monotonic()

    @property
    def finished(self) -> bool:
        """Whether all is written, and only to be moved to its names."""
        return self._finished

    def _check_names(self) -> None:
        for prefix in self._names.values():
            check_untaken(prefix)

    def _own(self) -> None:
        try:
            # Not flock, which the processes that this one has forked would go on holding after its death.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise RuntimeError(f"another process is writing in {self._directory}: wait for it, or end it") from None

    def _read_state(self) -> dict[str, Any]:
        path = self._directory / "state.json"
        if not path.exists():
            return {}
        state = json.loads(path.read_text())
        if differing := [name for name, value in self._identity.items() if state["identity"].get(name) != value]:
            found = "; ".join(
                f"{name}: {state['identity'].get(name)!s:.200} there, {self._identity[name]!s:.200} here"
                for name in differing
            )
            raise ValueError(
                f"{self._directory} holds an unfinished run of something else ({found}): finish that one, or "
                "throw it away with resume=False"
            )
        return state

    def save(self, *, now: bool = False) -> None:
        """Make the state durable, if it is time."""
        if not now and time.monotonic() - self._saved < SAVE_SECONDS:
            return
        state = {
            "identity": self._identity,
            "position": asdict(self.position),
            "counts": asdict(self.counts),
            "sizes": {key: writer.flush() for key, writer in self.writers.items()},
            "finished": self._finished,
        }
        write_durably(self._directory / "state.json", json.dumps(state))
        self._saved = time.monotonic()

    def finish(self) -> None:
        """Write the indices, move all files to their names and remove the directory."""
        if not self._finished:
            for writer in self.writers.values():
                writer.finish()
            self._finished = True
            self.save(now=True)
        for key, prefix in self._names.items():
            for suffix in ("bin", "idx"):
                # A run killed in the midst of this had moved some of them.
                if (source := self._directory / f"{key}.{suffix}").exists():
                    os.replace(source, f"{prefix}.{suffix}")
        shutil.rmtree(self._directory)

    def close(self) -> None:
        """Leave the files as they are, to be gone on with."""
        for writer in getattr(self, "writers", {}).values():
            writer.close()
        self._lock.close()
