"""Python's garbage collector, kept out of training steps."""

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def manual_gc() -> Generator[None]:
    """While inside, the garbage collector runs only when asked (``gc.collect()``), and looks at nothing made before.

    It runs when enough objects were made, on one rank now and on another then, for up to half a second, while the other
    ranks wait for that one. A training step makes no cycles that hold tensors; a save of a checkpoint makes small
    ones, 3 kB for each tensor written. A run of days may still collect now and then, at the same step on all ranks.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
