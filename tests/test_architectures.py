"""Architectures that minloop mends or sets up itself train alike in every layout; what mcore cannot do is refused."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from ranks import run_ranks
from small import MICRO_BATCH_SIZE, SEQUENCE_LENGTH, Text, rounding, small_config, small_state, text_loader, train

import minloop
from minloop.architecture import YARN_DEFAULTS, check_gpt_options, take_yarn_options
from minloop.layers.installed import fuse_rope_where_it_fits

STEPS, TOLERANCE = 5, rounding(2e-6)
# Weights large enough for attention to matter, and an epsilon above rounding noise in gradients that are almost zero:
# else Adam makes that noise into full steps, and one rank with another micro batch size parts from itself by 1e-2.
CONDITIONED: dict[str, Any] = {"init_method_std": 0.1, "lr": 2e-3, "optimizer": {"adam_eps": 1e-5}}

ROPE: dict[str, Any] = {"position_embedding_type": "rope"}
TIED: dict[str, Any] = {"share_embeddings_and_output_weights": True}
YARN: dict[str, Any] = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "num_query_groups": 2,
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "gpt": ROPE,
}
LATENT: dict[str, Any] = {
    "config_class": minloop.MLATransformerConfig,
    "multi_latent_attention": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "rope_type": "rope",
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "gpt": ROPE,
}


def layer(groups: int | None, ffn: int | None, linear: str = "") -> dict[str, Any]:
    """A layer of a heterogeneous model: None leaves a part out, or a linear layer takes its place."""
    return {
        "attention": {
            "num_query_groups": groups,
            "no_op": groups is None and linear != "attention",
            "replace_with_linear": linear == "attention",
        },
        "mlp": {
            "ffn_hidden_size": ffn,
            "no_op": ffn is None and linear != "mlp",
            "replace_with_linear": linear == "mlp",
        },
    }


LAYERS = [layer(2, 64), layer(None, 96), layer(None, None, "attention"), layer(4, None, "mlp")]
HETEROGENEOUS: dict[str, Any] = {
    "config_class": HeterogeneousTransformerConfig,
    "heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": LAYERS}),
    "gpt": ROPE,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "YaRN": LLAMA | {"gpt": YARN},
    "mRoPE": LLAMA | {"mrope_section": [2, 1, 1], "gpt": {"position_embedding_type": "mrope"}},
    "latent": LATENT,
    "latent queries": LATENT | {"q_lora_rank": 16},
    "latent YaRN": LATENT
    | {"rope_type": "yarn", "rotary_scaling_factor": 4, "original_max_position_embeddings": 16, "qk_layernorm": True},
    "tied, one more token": LLAMA | {"mtp_num_layers": 1, "gpt": ROPE | TIED},
    "two more tokens": LLAMA | {"mtp_num_layers": 2},
    "heterogeneous": HETEROGENEOUS,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2 VPP2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
}
MEASURED = {"YaRN", "tied, one more token", "two more tokens", "heterogeneous"}  # by test_sameness.py, and in:
MEASURED_IN = {"TP2+SP", "PP2 VPP2"}


class Film(Text):
    """Text whose tokens have positions in time, height and width, as those of images have."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        place = torch.arange(SEQUENCE_LENGTH)
        return super().__getitem__(index) | {"position_ids": torch.stack((place // 8, place % 8 // 2, place % 2))}


def histories(directory: str, cases: dict[str, Any], layout: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Train each case from its checkpoint, which a run without a layout makes."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name, fields in cases.items():
        path = Path(directory, name)
        if not layout:
            minloop.save_checkpoint(path, small_state(**(CONDITIONED | fields)))
            minloop.shutdown_distributed()
        state = small_state(seed=99, **(CONDITIONED | fields | layout))
        minloop.load_checkpoint(path, state)
        loader = text_loader(state)
        if name == "mRoPE":
            loader = minloop.build_loader(Film(), state.groups, micro_batch_size=MICRO_BATCH_SIZE)
        found[name] = train(state, loader, STEPS)
        minloop.shutdown_distributed()
    return found


def assert_same(histories: dict[str, Any], references: dict[str, Any]) -> None:
    pairs = {
        name: torch.tensor([history, references[name]], dtype=torch.float64) for name, history in histories.items()
    }
    worst = {name: (here / there - 1).abs().max().item() for name, (here, there) in pairs.items()}
    assert {name: value for name, value in worst.items() if value > TOLERANCE} == {}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("initial"))


@pytest.fixture(scope="module")
def references(directory: str) -> dict[str, Any]:
    (found,) = run_ranks(1, histories, directory, ARCHITECTURES, {})
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_architecture_trains_alike(layout: str, directory: str, references: dict[str, Any]) -> None:
    without = MEASURED if layout in MEASURED_IN else set[str]()
    without |= {name for name, case in ARCHITECTURES.items() if layout == "CP2" and "mtp_num_layers" in case}
    cases = {name: case for name, case in ARCHITECTURES.items() if name not in without}
    for found in run_ranks(2, histories, directory, cases, LAYOUTS[layout]):
        assert_same(found, references)


PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "Ettt|tL": ("heterogeneous", PP2 | {"pipeline_model_parallel_layout": "Ettt|tL"}),
    "E|tt|tt|L": ("heterogeneous", PP2 | {"pipeline_model_parallel_layout": "E|tt|tt|L"}),
    "a list": (
        "YaRN",
        PP2
        | {
            "pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "decoder"], ["decoder"], ["loss"]],
        },
    ),
    "first stage short": ("mRoPE", PP2 | {"num_layers_in_first_pipeline_stage": 1}),
    "last stage short": ("mRoPE", PP2 | {"num_layers_in_last_pipeline_stage": 1}),
    "embedding and loss count": (
        "heterogeneous",
        {
            "pipeline_model_parallel_size": 3,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    "prediction beside the loss": ("two more tokens", PP2 | {"pipeline_model_parallel_layout": "Ettt|tmmL"}),
    "prediction without decoder layers": (
        "tied, one more token",
        {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "E|tttt|mL"},
    ),
    "prediction on a stage of its own": (
        "two more tokens",
        {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Ett|ttmm|L"},
    ),
    "prediction in virtual stages": (
        "tied, one more token",
        PP2 | {"pipeline_model_parallel_layout": "Et|tt|t|mL"},
    ),
}


@pytest.mark.parametrize("stages", STAGES)
def test_layers_may_be_laid_out_by_hand(stages: str, directory: str, references: dict[str, Any]) -> None:
    name, layout = STAGES[stages]
    world_size = layout["pipeline_model_parallel_size"]
    for found in run_ranks(world_size, histories, directory, {name: ARCHITECTURES[name]}, layout):
        assert_same(found, references)


def options_of(fields: dict[str, Any]) -> None:
    gpt = fields.pop("gpt")
    config = small_config(**fields)
    check_gpt_options(config, gpt)
    take_yarn_options(config, gpt)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            PP2 | {"mtp_num_layers": 1, "gpt": {}},
            r"mtp_num_layers \(1\) with position_embedding_type='learned_absolute'",
        ),
        (
            {
                "pipeline_model_parallel_size": 3,
                "pipeline_model_parallel_layout": "Ett|ttm|L",
                "mtp_num_layers": 1,
                "gpt": ROPE | TIED,
            },
            r"lay out the m beside the L",
        ),
        (
            {"gpt": {"position_embedding_type": "RoPE"}},
            "position_embedding_type='RoPE': use one of learned_absolute, rope",
        ),
        ({"gpt": {"position_embedding_type": "mrope"}}, r"mrope_section=None: .* of the 4 rotary frequencies"),
        ({"mrope_section": [2, 2, 2], "gpt": {"position_embedding_type": "mrope"}}, r"mrope_section=\[2, 2, 2\]"),
        (
            {"mrope_section": [2, 1, 1], "rotary_interleaved": True, "gpt": {"position_embedding_type": "mrope"}},
            "rotary_interleaved=True",
        ),
        (LATENT | {"gpt": YARN}, "takes its rotary embedding from the config's rope_type"),
        (HETEROGENEOUS | {"mtp_num_layers": 1}, r"mtp_num_layers \(1\) with heterogeneous layers"),
        ({"gpt": {"position_embedding_type": "yarn"}}, "'yarn' needs yarn_rotary_scaling_factor, yarn_original"),
        ({"gpt": YARN | ROPE}, "yarn_rotary_scaling_factor, .* with position_embedding_type='rope'"),
        (
            {"fused_single_qkv_rope": True, "transformer_impl": "local", "gpt": ROPE},
            "with transformer_impl='local', not 'transformer_engine'",
        ),
    ],
)
def test_what_mcore_cannot_build_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(dict(fields))


def test_yarn_is_set_on_the_config_with_mcores_defaults() -> None:
    config: Any = small_config()
    rest = take_yarn_options(config, YARN | TIED | {"yarn_beta_fast": 8.0})
    assert rest == TIED | {"position_embedding_type": "yarn"}
    assert (config.yarn_rotary_scaling_factor, config.yarn_beta_fast, config.yarn_beta_slow) == (4.0, 8.0, 1.0)
    assert {name: p.default for name, p in inspect.signature(YarnRotaryEmbedding).parameters.items()}.items() >= {
        name.removeprefix("yarn_"): value for name, value in YARN_DEFAULTS.items()
    }.items()


def losses_by_position() -> list[float]:
    """The loss of a batch whose positions are those of text, given once and three times, and those of a film."""
    state = small_state(mrope_section=[2, 1, 1], gpt={"position_embedding_type": "mrope"}, init_method_std=0.1)
    film, text = (torch.utils.data.default_collate([data[index] for index in range(2)]) for data in (Film(), Text()))
    thrice = text | {"position_ids": text["position_ids"].unsqueeze(1).repeat(1, 3, 1)}
    steps = [minloop.eval_step(state, [batch], num_microbatches=1) for batch in (text, thrice, film)]
    return [step.loss.item() for step in steps]


def test_mrope_takes_one_position_of_text_or_three() -> None:
    ((text, thrice, film),) = run_ranks(1, losses_by_position)
    assert text == thrice
    assert abs(film - text) > 1e-4


def calls_with_fused_rope() -> list[bool]:
    """Whether an attention finds `fused_single_qkv_rope` set: with plain RoPE, packed, without angles, and again; and
    where two ranks share a group's queries.
    """
    config: Any = (state := small_state(gpt=ROPE, fused_single_qkv_rope=False)).config
    chunk: Any = state.chunks[0].module
    config.fused_single_qkv_rope = True
    fuse_rope_where_it_fits(chunk, config)
    attention, seen = chunk.decoder.layers[0].self_attention, list[bool]()
    attention.forward = lambda *_, **__: seen.append(config.fused_single_qkv_rope)
    plain = {"rotary_pos_emb": torch.zeros(1), "packed_seq_params": None, "inference_context": None}
    for options in ({}, {"packed_seq_params": object()}, {"rotary_pos_emb": None}, {}):
        attention(torch.zeros(1), **(plain | options))
    attention.world_size = 2 * attention.config.num_query_groups
    attention(torch.zeros(1), **plain)
    learned: Any = small_config()
    learned.fused_single_qkv_rope = True
    fuse_rope_where_it_fits(torch.nn.Identity(), learned)
    return [*seen, learned.fused_single_qkv_rope]


def test_rope_is_fused_in_the_calls_that_it_fits() -> None:
    assert run_ranks(1, calls_with_fused_rope) == [[True, False, False, True, False, False]]
