"""A Transformer Engine that is there and cannot be used is treated as absent, and said to be so.

megatron.core expects an ImportError and no other from Transformer Engine; anything else ends its own import.
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder

NAME = "transformer_engine"
_said: list[str] = []


def broken_engine() -> str:
    """What to say if `pass_over_broken_engine` hid a Transformer Engine; empty otherwise."""
    return "".join(_said)


def pass_over_broken_engine() -> None:
    """Before mcore is imported, import Transformer Engine, as mcore is about to; if it fails to, let it be absent."""
    try:
        import_module(f"{NAME}.pytorch")
        reason = "" if hasattr(sys.modules[NAME], "__version__") else "it has no __version__"
    except Exception as error:
        if isinstance(error, ImportError) and NAME not in sys.modules:
            return  # not there, or something that mcore passes over by itself
        reason = f"{type(error).__name__}: {str(error).partition('\n')[0]}"
    if not reason:
        return
    spec = PathFinder.find_spec(NAME)
    folders = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
    for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
        del sys.modules[name]  # a part that can be imported would be found without the whole
    sys.modules[NAME] = None  # pyright: ignore[reportArgumentType]  # so that importing it is an ImportError
    _said[:] = [
        f"the package {NAME} in {folders[0] if folders else 'this environment'} cannot be used ({reason}): mcore goes "
        "on without it; pip uninstall transformer-engine, or remove that folder, or pip install "
        "transformer-engine[pytorch]"
    ]
