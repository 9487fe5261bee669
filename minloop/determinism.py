"""`deterministic_mode`: what mcore leaves to the caller so that two runs are equal bit by bit.

mcore itself only looks up embeddings in another way and asks Transformer Engine's attention for a deterministic
algorithm. The rest is as Megatron-LM does it (megatron/training/determinism.py), but that environment variables are
asked for and never set.
"""

import contextlib
import os
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

CUBLAS = (":4096:8", ":16:8")
NCCL_ALGORITHMS = ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")
"""Those that Megatron-LM has verified to reduce in one order; "Tree" is not one of them."""


def check_deterministic_config(config: Any) -> None:
    """Refuse fields that are not deterministic together with `deterministic_mode`.

    Args:
        config: a `TransformerConfig`, or anything with its fields.
    Raises:
        ValueError: naming the field and its value.
    """
    for name in ("cross_entropy_loss_fusion", "tp_comm_overlap"):
        if config.deterministic_mode and getattr(config, name):
            raise ValueError(f"deterministic_mode=True with {name}=True: set {name}=False")


def check_deterministic_environment(config: Any) -> None:
    """Refuse an environment in which libraries on a GPU choose algorithms that are not deterministic.

    Needs the default process group. Without a GPU every environment will do.

    Raises:
        RuntimeError: naming the variables, their values, and what to set before the program starts.
    """
    if not torch.cuda.is_available():
        return
    accepted: dict[str, tuple[str, ...]] = {"CUBLAS_WORKSPACE_CONFIG": CUBLAS}
    if config.transformer_impl == "transformer_engine":
        accepted["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = ("0",)
    wrong = [
        f"{name}={values[0]} (it is {os.environ.get(name, 'not set')})"
        for name, values in accepted.items()
        if os.environ.get(name) not in values
    ]
    if (mamba := os.environ.get("MAMBA_DETERMINISTIC", "1")) and not mamba.startswith("1"):
        wrong.append(f"MAMBA_DETERMINISTIC=1, or not set (it is {mamba})")
    algorithms = [token.strip() for token in os.environ.get("NCCL_ALGO", "").split(",")]
    by_nccl = dist.get_world_size() > 1 and "cuda:nccl" in dist.get_backend_config()  # it may have another for the CPU
    if by_nccl and not {*algorithms} <= {*NCCL_ALGORITHMS}:
        wrong.append(f"NCCL_ALGO=Ring (it is {os.environ.get('NCCL_ALGO', 'not set')})")
    if wrong:
        raise RuntimeError(
            f"deterministic_mode=True needs {', '.join(wrong)}: libraries read them once, so set them before the "
            "program starts"
        )


@contextlib.contextmanager
def deterministic_algorithms() -> Generator[None]:
    """While inside, torch uses deterministic algorithms in this whole process, and raises where it has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
