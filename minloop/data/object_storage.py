"""What mcore needs to read indexed text from object storage, s3:// and msc://."""

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig


def check_object_storage(config: GPTDatasetConfig, prefix: str) -> None:
    """Refuse what mcore would fail at without a word, or by leaving a directory "s3:" where the program runs.

    Args:
        prefix: the path of a .bin and an .idx file in object storage, without their endings.
    Raises:
        ValueError: naming the fields, their values and the remedy.
    """
    names = ("object_storage_cache_path", "path_to_cache")
    if config.mmap_bin_files or any(getattr(config, name) is None for name in names):
        given = ", ".join(f"{name}={getattr(config, name)!r}" for name in (*names, "mmap_bin_files"))
        raise ValueError(
            f"{prefix} is in object storage, with {given}: set the first two to directories on this machine, for its "
            ".idx file and for sample indices, and mmap_bin_files=False"
        )
