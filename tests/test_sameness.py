"""Every layout trains the same model: same initial weights and global batches, same losses and gradient norms."""

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from small import small_state, text_loader, train

import minloop

STEPS = 20
TOLERANCE = 2e-6
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "DP2 distributed optimizer, both overlaps": (2, {"ddp": SHARDED}),
    "DP2 distributed optimizer, no overlap": (2, {"ddp": SHARDED | {"overlap_grad_reduce": False}}),
    "DP4 distributed optimizer, two instances": (4, {"ddp": SHARDED | {"num_distributed_optimizer_instances": 2}}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2+SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "TP2×PP2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "TP2+SP×CP2 distributed optimizer": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "context_parallel_size": 2,
            "ddp": SHARDED,
        },
    ),
}


def save_initial(directory: str, gpt: dict[str, Any]) -> None:
    minloop.save_checkpoint(directory, small_state(gpt=gpt))
    minloop.shutdown_distributed()


def run(directory: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    state = small_state(seed=99, **options)
    minloop.load_checkpoint(directory, state)
    history = train(state, text_loader(state), STEPS)
    minloop.shutdown_distributed()
    return history


def worst(history: list[tuple[float, float]], reference: list[tuple[float, float]]) -> tuple[float, float]:
    loss = max(abs(a[0] - b[0]) for a, b in zip(history, reference, strict=True))
    norm = max(abs(a[1] - b[1]) / b[1] for a, b in zip(history, reference, strict=True))
    return loss, norm


TIED = ("PP2", "PP2 VPP2", "TP2×PP2")
"""Layouts that put the embedding and the output layer, which may share their weights, on different ranks."""


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of initial weights, and what one rank makes of it."""
    gpt = {"share_embeddings_and_output_weights": request.param == "tied"}
    directory = str(tmp_path_factory.mktemp("initial"))
    run_ranks(1, save_initial, directory, gpt)
    (history,) = run_ranks(1, run, directory, {"gpt": gpt})
    assert history[-1][0] < 0.75 * history[0][0]
    return gpt, directory, history


@pytest.mark.parametrize(
    ("reference", "layout"),
    [("untied", layout) for layout in LAYOUTS] + [("tied", layout) for layout in TIED],
    indirect=["reference"],
)
def test_layout_trains_the_same_model(reference: tuple[dict[str, Any], str, Any], layout: str) -> None:
    gpt, directory, history = reference
    ranks, options = LAYOUTS[layout]
    results = run_ranks(ranks, run, directory, options | {"gpt": gpt})
    assert all(result == results[0] for result in results), "ranks report different numbers"
    loss, norm = worst(results[0], history)
    assert loss <= TOLERANCE, f"losses differ by {loss:.1e}"
    assert norm <= TOLERANCE, f"gradient norms differ by {norm:.1e} relative"


def test_microbatches_do_not_matter(tmp_path: Path) -> None:
    run_ranks(1, save_initial, str(tmp_path), {})
    histories = [run_ranks(1, run_with_micro_batch, str(tmp_path), size)[0] for size in (1, 8)]
    assert max(worst(*histories)) <= TOLERANCE


def run_with_micro_batch(directory: str, micro_batch_size: int) -> list[tuple[float, float]]:
    state = small_state(seed=99)
    minloop.load_checkpoint(directory, state)
    history = train(state, text_loader(state, micro_batch_size), 5, micro_batch_size)
    minloop.shutdown_distributed()
    return history
