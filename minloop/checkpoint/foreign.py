"""Checkpoints of formats that are not read here: what each is, and what reads it.

Taken for none, they would let a run that is pointed at them begin anew without a word. A save of this project's that
was cut short is none of them: it has another name until all its files are there, see `commit`.
"""

from pathlib import Path

from minloop.checkpoint.reading import COMMON, CheckpointError


def foreign_format(path: Path) -> str:
    """Say of a directory that is no whole checkpoint of mcore's what it is and what reads it; "" if that is not known.

    Raises:
        OSError: `.metadata` cannot be read.
    """
    if any(path.glob("mp_rank_*/*.pt")):
        return (
            "is a checkpoint in the legacy format 'torch', which only Megatron-LM reads: load it there and save it "
            "with --ckpt-format torch_dist"
        )
    if any(path.glob("*/.zarray")):
        return (
            "is a checkpoint in the format 'zarr' of older mcore: load it with the Megatron-LM that wrote it and save "
            "it with --ckpt-format torch_dist"
        )
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return "holds weights of Hugging Face's (config.json, *.safetensors): load_hf_weights reads them"
    if _is_plain(path):
        return (
            "is a checkpoint of torch.distributed.checkpoint without mcore's metadata.json: torch.distributed."
            "checkpoint reads it; if Megatron-LM wrote it (torch_dcp, fsdp_dtensor), load it there and save it with "
            "--ckpt-format torch_dist"
        )
    return ""


def refuse_foreign(path: Path) -> None:
    """Raise CheckpointError if a directory that is no whole checkpoint of mcore's is one of a format not read here."""
    if said := foreign_format(path):
        raise CheckpointError(f"{path} {said}")


def not_hugging_face(path: Path) -> str:
    """Say of a directory without a config.json what it is and what reads it; "" if that is not known."""
    if (path / "metadata.json").is_file() or any(path.glob("iter_*/metadata.json")):
        return "is a checkpoint, or holds some: load_checkpoint and load_weights read them"
    return foreign_format(path)


def _is_plain(path: Path) -> bool:
    """Whether PyTorch's files are there, and not because a save of mcore's was cut short or has lost a file."""
    file = path / ".metadata"
    if (path / "metadata.json").exists() or (path / "common.pt").exists() or not file.is_file():
        return False
    return any(path.glob("*.distcp")) and COMMON.encode() not in file.read_bytes()
