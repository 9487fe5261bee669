"""Crafted pickles of names that a checkpoint may hold: refused, and nothing that the process shares is changed."""

import io
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from megatron.core.enums import ModelType
from torch import _utils
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.serialization import _get_layout  # pyright: ignore[reportPrivateUsage]

import minloop
from minloop.checkpoint.extra_state import check_extra_states
from minloop.checkpoint.reading import load_plain, read_metadata

PROTO, BUILD, POP = b"\x80\x04", b"b", b"0"
ONE = b"K\x01"
MORE = "it holds more than plain data"
ENCODING: Any = dcp._MEM_FORMAT_ENCODING  # pyright: ignore[reportPrivateUsage]


def of(module: str, name: str) -> bytes:
    """The opcode that puts a global on the stack."""
    return f"c{module}\n{name}\n".encode()


def called(what: bytes, *args: bytes) -> bytes:
    return what + b"(" + b"".join(args) + b"tR"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def attributes(name: str, value: bytes) -> bytes:
    """A state of a dict, which BUILD puts into the object's own."""
    return b"}" + text(name) + value + b"s"


def slots(name: str, value: bytes) -> bytes:
    """A state whose entries BUILD sets by setattr."""
    return b"N" + attributes(name, value) + b"\x86"


def tensor_metadata() -> dcp.Metadata:
    size = torch.Size([2, 3])
    place = _StorageInfo("__0_0.distcp", 0, 100)
    entry = dcp.TensorStorageMetadata(
        dcp.TensorProperties(torch.bfloat16), size, [dcp.ChunkStorageMetadata(torch.Size([0, 0]), size)]
    )
    return dcp.Metadata({"weight": entry}, {"weight": ("weight",)}, {dcp.MetadataIndex("weight", [0, 0], 0): place})


METADATA = "torch.distributed.checkpoint.metadata"
IN_METADATA: dict[str, tuple[bytes, Callable[[], object]]] = {
    "a class": (of("pathlib", "PosixPath") + slots("_str", text("/victim")), lambda: str(Path("/etc/hosts"))),
    "a dataclass": (of(METADATA, "Metadata") + slots("version", ONE), lambda: dcp.Metadata.version),
    "a class, by a dict": (of(METADATA, "Metadata") + attributes("version", ONE), lambda: dcp.Metadata.version),
    "a function": (of("torch.serialization", "_get_layout") + attributes("cache", ONE), lambda: vars(_get_layout)),
    "a member of an enumeration": (
        called(of(METADATA, "_MEM_FORMAT_ENCODING"), b"K\x00") + attributes("_value_", ONE),
        lambda: ENCODING.TORCH_CONTIGUOUS_FORMAT.value,
    ),
    "an enumeration": (of(METADATA, "_MEM_FORMAT_ENCODING") + slots("OTHER", ONE), lambda: {**vars(ENCODING)}),
    "a dtype": (of("torch", "float32") + slots("is_complex", ONE), lambda: torch.float32.is_complex),
    "torch.Size": (of("torch", "Size") + slots("numel", ONE), lambda: torch.Size([2]).numel()),
}


@pytest.mark.parametrize("case", IN_METADATA)
def test_metadata_changes_nothing_shared(tmp_path: Path, case: str) -> None:
    crafted, shared = IN_METADATA[case]
    before = shared()
    (tmp_path / ".metadata").write_bytes(PROTO + crafted + BUILD + POP + pickle.dumps(tensor_metadata())[2:])
    with pytest.raises(minloop.CheckpointError, match=rf"\.metadata is refused \(it changes .*\): {MORE}"):
        read_metadata(tmp_path)
    assert shared() == before


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_every_protocol_reads_as_by_pickle(tmp_path: Path, protocol: int) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(tensor_metadata(), protocol))
    read = read_metadata(tmp_path)
    assert read == tensor_metadata()
    assert type(read.state_dict_metadata["weight"].properties) is dcp.TensorProperties  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


class DelayedScaling:
    """As Transformer Engine's, of which this machine may have none."""

    def __init__(self) -> None:
        self.margin, self.amax_history_len, self.fp8_format = 0, 16, _FormatHelper(448.0, 57344.0)


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


RECIPE = "transformer_engine.common.recipe"


@pytest.fixture
def extra_state(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A delayed recipe's, with modules that let pickle find its classes."""
    recipe = ModuleType(RECIPE)
    for kind in (DelayedScaling, _FormatHelper):
        monkeypatch.setattr(kind, "__module__", RECIPE)
        monkeypatch.setattr(recipe, kind.__name__, kind, raising=False)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, RECIPE, recipe)
    return {"recipe": DelayedScaling(), "scale_fwd": torch.rand(3), "extra_fp8_variables": {"num_gemms": 1, "a": [2.0]}}


def check(content: bytes) -> None:
    state = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    saved: Any = SimpleNamespace(path=Path("x"))
    check_extra_states(saved, {"layer._extra_state": state})


def test_extra_states_of_recipes_and_tensors_pass(extra_state: dict[str, Any]) -> None:
    for protocol in (4, 5):
        check(pickle.dumps(extra_state, protocol))


STORAGE = of("megatron.core.safe_globals", "safe_load_from_bytes")
IN_EXTRA_STATE: dict[str, bytes] = {
    "a class": of("torch.storage", "UntypedStorage") + slots("nbytes", of("torch", "Size")) + BUILD,
    "a class that it may name": of(RECIPE, "DelayedScaling") + slots("margin", ONE) + BUILD,
    "a function": of("torch._utils", "_rebuild_tensor_v2") + attributes("__doc__", ONE) + BUILD,
    "a function that loads": STORAGE + slots("__defaults__", ONE) + BUILD,
    "a member of an enumeration": called(
        of(RECIPE, "Format"), of(RECIPE, "_FormatHelper") + b"(" + ONE + ONE + b"t\x81"
    )
    + attributes("_value_", ONE)
    + BUILD,
    "a callable as a value": b"}"
    + text("recipe")
    + of(RECIPE, "DelayedScaling")
    + b"s0"
    + of(RECIPE, "DelayedScaling"),
    "slots of a recipe": of(RECIPE, "DelayedScaling") + b")\x81" + slots("margin", ONE) + BUILD,
    "memory": b"\x8e" + (2**62).to_bytes(8, "little"),
}


@pytest.mark.parametrize("case", IN_EXTRA_STATE)
def test_extra_states_change_nothing_shared(extra_state: dict[str, Any], case: str) -> None:
    rebuild: Any = _utils._rebuild_tensor_v2  # pyright: ignore[reportPrivateUsage]
    before = {**vars(DelayedScaling)}, rebuild.__doc__, torch.ones(3).untyped_storage().nbytes()
    with pytest.raises(minloop.CheckpointError, match=rf"x/layer\._extra_state is refused .*: {MORE}"):
        check(PROTO + IN_EXTRA_STATE[case] + b".")
    assert ({**vars(DelayedScaling)}, rebuild.__doc__, torch.ones(3).untyped_storage().nbytes()) == before


def legacy(content: bytes) -> io.BytesIO:
    """A file of torch.save's older form, around one pickle."""
    head = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
    return io.BytesIO(b"".join(pickle.dumps(part, 2) for part in head) + content + pickle.dumps([], 2))


MEMBER = called(of("megatron.core.enums", "ModelType"), ONE)


def test_plain_data_changes_no_member_of_an_enumeration() -> None:
    """mcore declares enumerations safe for PyTorch, which builds on instances of what is declared."""
    declared = set(torch.serialization.get_safe_globals())
    crafted = b"\x80\x02" + MEMBER + attributes("_value_", b"K\x63") + BUILD + b"."
    with pytest.raises(minloop.CheckpointError, match=rf"common\.pt is refused .*ModelType.*: {MORE}"):
        load_plain(legacy(crafted), Path("common.pt"))
    assert ModelType.encoder_or_decoder.value == 1
    assert ModelType(1) is ModelType.encoder_or_decoder
    # the other way to set attributes
    rebuild = called(
        of("torch._tensor", "_rebuild_from_type_v2"),
        of("megatron.core.enums", "ModelType"),
        of("megatron.core.enums", "ModelType"),
        b"(" + ONE + b"t",
        attributes("_value_", b"K\x63"),
    )
    with pytest.raises(minloop.CheckpointError):
        load_plain(legacy(b"\x80\x02" + rebuild + b"."), Path("common.pt"))
    assert ModelType.encoder_or_decoder.value == 1
    assert set(torch.serialization.get_safe_globals()) == declared


def test_plain_data_holds_members_of_enumerations_and_changes_no_dtype() -> None:
    stream = io.BytesIO()
    torch.save(Namespace(model_type=ModelType.encoder_or_decoder), stream)
    stream.seek(0)
    assert load_plain(stream, Path("common.pt")).model_type is ModelType.encoder_or_decoder
    swapped = called(of("numpy", "dtype"), text("u4")) + b"(" + b"K\x03" + text(">") + b"NNNKaKaK\x00t" + BUILD
    load_plain(legacy(b"\x80\x02" + swapped + b"."), Path("common.pt"))
    assert numpy.dtype("u4").isnative
