"""FlashAttention 4 under Transformer Engine: an open window said in the word that each of them understands.

For causal attention Transformer Engine 2.20 asks for the window (-1, 0), everything before and nothing after.
FlashAttention 4 says None for "everything" and takes -1 for a width: hardly a token attends to another. The loss is off
by a thousandth at first, each step is a sixth shorter, and nothing complains.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

_BACKENDS = "transformer_engine.pytorch.attention.dot_product_attention.backends"
_FUNCTIONS = ("flash_attn_func_v4", "flash_attn_varlen_func_v4", "_flash_attn_fwd_v4", "_flash_attn_bwd_v4")


class OpenWindows:
    """FlashAttention 4's function, called with the sides of a window that are -1 said as None."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        self.attention = attention

    def __call__(self, *args: Any, **options: Any) -> Any:
        if options.get("window_size") is not None:
            options["window_size"] = tuple(_open(side) for side in options["window_size"])
        sides = {name: _open(options[name]) for name in ("window_size_left", "window_size_right") if name in options}
        return self.attention(*args, **(options | sides))


def _open(side: int | None) -> int | None:
    return None if side == -1 else side


def mend_flash_attention(backends: Any = None) -> None:
    """Wrap FlashAttention 4's functions where Transformer Engine keeps them, if it is installed; once."""
    backends = backends or import_module(_BACKENDS)
    for name in _FUNCTIONS:
        function = getattr(backends, name, None)
        if function is not None and not isinstance(function, OpenWindows):
            setattr(backends, name, OpenWindows(function))
