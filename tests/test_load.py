"""What a checkpoint says of itself without being loaded, and weights loaded into another model by an explicit map."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import RankError, run_ranks
from safetensors.torch import load_file
from small import VOCAB_SIZE, small_state, text_loader, train

import minloop
from minloop.checkpoint import describe

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FC1 = "decoder.layers.mlp.linear_fc1.weight"
GATED: dict[str, Any] = {"gated_linear_unit": True, "num_layers": 2}
"""The two halves of a gated layer's first weight are stored apart, by mcore's ShardedTensorFactory."""


def save(directory: str) -> dict[str, torch.Tensor]:
    state = small_state(tensor_model_parallel_size=2, bf16=True, ddp={"use_distributed_optimizer": True}, **GATED)
    loader = text_loader(state)
    train(state, loader, 2)
    minloop.save_checkpoint(directory, state, loader)
    weights = minloop.full_weights(state)
    minloop.shutdown_distributed()
    return weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, torch.Tensor]]:
    """A checkpoint of two layers at TP2 with ZeRO-1, and its weights."""
    directory = str(tmp_path_factory.mktemp("saved"))
    return directory, run_ranks(2, save, directory)[0]


def larger_model(*args: Any, **options: Any) -> Any:
    return minloop.build_gpt_model(*args, **(options | {"vocab_size": VOCAB_SIZE + 64}))


def load(
    directory: str, maps: dict[str, Any], options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """The weights before and after, and how far master weights are from them."""
    state = small_state(seed=77, **(GATED | options))
    before = minloop.full_weights(state)
    minloop.load_weights(directory, state, **maps)
    after = minloop.full_weights(state)
    assert (state.iteration, state.consumed_samples) == (0, 0)
    parameters: list[Any] = list(state.chunks[0].parameters())
    masters = [(p, p.main_param) for p in parameters if hasattr(p, "main_param")]
    far = max((float((p - master).detach().abs().max()) for p, master in masters), default=-1.0)
    minloop.shutdown_distributed()
    return before, after, far


def test_a_larger_vocabulary_and_more_layers_keep_their_new_rows(saved: Any) -> None:
    directory, theirs = saved
    maps = {"resize": (EMBEDDING, OUTPUT, "decoder.layers.*")}
    options = {"build": larger_model, "num_layers": 3, "tensor_model_parallel_size": 2}
    before, after, _ = run_ranks(2, load, directory, maps, options)[0]
    assert after.keys() == before.keys() > theirs.keys()
    for name, value in after.items():
        if name not in theirs:
            assert name.endswith("[2]")
            assert torch.equal(value, before[name]), name
        elif name in (EMBEDDING, OUTPUT):
            assert torch.equal(value[:VOCAB_SIZE], theirs[name])
            assert torch.equal(value[VOCAB_SIZE:], before[name][VOCAB_SIZE:])
        else:
            assert torch.equal(value, theirs[name]), name


def test_a_smaller_model_takes_its_part(saved: Any) -> None:
    directory, theirs = saved
    maps = {"resize": ("decoder.layers.*",)}
    _, after, _ = run_ranks(1, load, directory, maps, {"num_layers": 1})[0]
    assert after.keys() < theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in after.items())


def test_a_subset_by_other_names(saved: Any) -> None:
    directory, theirs = saved
    maps = {
        "rename": {OUTPUT: EMBEDDING, "decoder.layers.mlp.linear_fc2.": "absent."},
        "skip": ("embedding.*",),
        "allow_missing": ("decoder.layers.mlp.linear_fc2.*",),
    }
    before, after, _ = run_ranks(1, load, directory, maps, {})[0]
    assert torch.equal(after[OUTPUT], theirs[EMBEDDING])
    kept = {name for name in after if torch.equal(after[name], before[name])}
    assert kept == {name for name in before if "linear_fc2." in name or name.startswith("embedding.")}
    assert torch.equal(after[f"{FC1}[1]"], theirs[f"{FC1}[1]"])


def test_master_weights_follow(saved: Any) -> None:
    before, after, far = run_ranks(1, load, saved[0], {}, {"bf16": True})[0]
    assert not torch.equal(before[EMBEDDING], after[EMBEDDING])
    assert torch.equal(after[EMBEDDING], saved[1][EMBEDDING])
    assert far == 0.0


def test_what_the_map_does_not_allow_is_refused_by_name(saved: Any) -> None:
    directory, _ = saved
    with pytest.raises(RankError, match=rf"in another shape: {EMBEDDING}: \[256, 32\] saved, \[320, 32\] here"):
        run_ranks(1, load, directory, {}, {"build": larger_model})
    with pytest.raises(RankError, match=r"lacks 1 tensors that this state has: nowhere\.weight"):
        run_ranks(1, load, directory, {"rename": {"output_layer.": "nowhere."}}, {})
    with pytest.raises(RankError, match=r"no weight of this model is called embeding\.\*"):
        run_ranks(1, load, directory, {"skip": ("embeding.*",)}, {})


def test_describing_needs_neither_group_nor_model(saved: Any) -> None:
    directory, theirs = saved
    description = minloop.describe_checkpoint(directory)
    assert description.directory == Path(directory, "iter_0000002")
    assert (description.iteration, description.counters["consumed_samples"]) == (2, 16)
    assert (description.layout["tp"], description.layout["dp"], description.optimizer_kind) == (2, 1, "distributed")
    assert description.architecture["hidden_size"] == 32
    assert description.num_parameters == sum(weight.numel() for weight in theirs.values())
    assert description.weights[EMBEDDING].shape == (VOCAB_SIZE, 32)
    assert description.weights[EMBEDDING].dtype == torch.bfloat16
    assert description.weights[FC1].shape == (2, 128, 32)
    assert len(description.optimizer) == 3 * len(description.weights)
    assert not torch.distributed.is_initialized()
    text = str(description).splitlines()
    assert "layout         tp 2, cp 1, ep 1, expt_tp 2, pp 1, dp 1" in text
    assert any(line.split() == [EMBEDDING, "[256,", "32]", "bfloat16"] for line in text)
    assert any(line.startswith(f"optimizer.state.exp_avg  {len(description.weights)} tensors") for line in text)


def test_describing_starts_from_a_bare_process(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        minloop.describe_checkpoint(tmp_path)
    command = "import sys, minloop; print(minloop.describe_checkpoint(sys.argv[1]).iteration)"
    answer = subprocess.run([sys.executable, "-c", command, saved[0]], capture_output=True, text=True)
    assert answer.stdout.strip() == "2", answer.stderr


def test_weights_are_exported_offline(saved: Any, tmp_path: Path) -> None:
    directory, theirs = saved
    kept, cast = (
        minloop.export_weights(directory, tmp_path / str(dtype), dtype=dtype) for dtype in (None, torch.float32)
    )
    assert load_file(kept)[EMBEDDING].dtype == torch.bfloat16
    weights = load_file(cast)
    described = minloop.describe_checkpoint(directory).weights
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {n: d.shape for n, d in described.items()}
    assert torch.equal(weights[EMBEDDING], theirs[EMBEDDING])
    assert torch.equal(weights[FC1][1], theirs[f"{FC1}[1]"])
    with pytest.raises(FileExistsError, match="there already"):
        minloop.export_weights(directory, kept.parent)
    target = tmp_path / "refused"
    for dtype in ("bfloat16", torch.int8):
        with pytest.raises(ValueError, match="weights are written as "):
            minloop.export_weights(directory, target, dtype=dtype)  # pyright: ignore[reportArgumentType]
    assert not target.exists()
    with (
        mock.patch.object(describe, "write_weights", side_effect=OSError("no space")),
        pytest.raises(OSError, match="no space"),
    ):
        minloop.export_weights(directory, target)
    assert [*target.iterdir()] == []


def test_a_checkpoint_is_its_own_latest(saved: Any) -> None:
    latest = minloop.latest_checkpoint(saved[0])
    assert latest is not None
    assert minloop.latest_checkpoint(latest) == latest


def test_patterns_come_as_lists() -> None:
    with pytest.raises(TypeError, match=r"skip='output_layer.weight' would be .*: pass \['output_layer.weight'\]"):
        minloop.load_weights("anywhere", small_state(**GATED), skip=OUTPUT)
    minloop.shutdown_distributed()
