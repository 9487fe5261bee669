"""The config record: equal objects after the round trip, nothing executed, what has no name refused by name."""

import dataclasses
import functools
import json
import re
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import yaml
from megatron.core.activations import squared_relu
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from ranks import run_ranks
from small import small_config, small_state, text_loader

import minloop
from minloop.checkpoint import content, run_config

README = Path(__file__).parent.parent / "README.md"
BLOCK = {
    "attention": {"num_query_groups": 2, "no_op": False, "replace_with_linear": False},
    "mlp": {"ffn_hidden_size": 48, "no_op": False, "replace_with_linear": False},
}


class Colour(Enum):
    RED = 1


def cubed_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) ** 3


@dataclass
class OwnConfig(minloop.TransformerConfig):
    colour: Colour = Colour.RED
    window: tuple[int, int] | None = None
    derived: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.derived = 2 * self.num_layers


MODELS: dict[str, tuple[type[minloop.TransformerConfig], dict[str, Any]]] = {
    "Llama": (
        minloop.TransformerConfig,
        {"normalization": "RMSNorm", "num_query_groups": 2, "activation_func": F.silu, "gated_linear_unit": True}
        | {"add_bias_linear": False, "bf16": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "a layout of stages": (
        minloop.TransformerConfig,
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|ttL", "activation_func": torch.tanh},
    ),
    "MLA, MoE": (
        minloop.MLATransformerConfig,
        {"multi_latent_attention": True, "add_bias_linear": False, "kv_lora_rank": 16, "qk_head_dim": 8}
        | {"qk_pos_emb_head_dim": 4, "v_head_dim": 8, "num_moe_experts": 4, "moe_layer_freq": [0, 1, 0, 1]},
    ),
    "heterogeneous": (
        HeterogeneousTransformerConfig,
        {"heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": [BLOCK] * 4})},
    ),
    "a subclass of one's own": (
        OwnConfig,
        {"activation_func": cubed_relu, "window": (3, 4), "layernorm_epsilon": 1e-05, "fp16": True},
    ),
    "squared ReLU": (minloop.TransformerConfig, {"activation_func": squared_relu, "add_bias_linear": False}),
}


def comparable(config: Any) -> dict[str, Any]:
    """Fields by value: mcore's initialisers are partials and its layouts objects, which equal only themselves."""

    def value(field: Any) -> Any:
        if isinstance(field, functools.partial):
            return (field.func, field.args, field.keywords)
        return vars(field) if type(field).__name__ == "PipelineParallelLayerLayout" else field

    return {name: value(field) for name, field in vars(config).items()}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_config_is_equal_after_the_round_trip(tmp_path: Path, case: str) -> None:
    config_class, fields = MODELS[case]
    config = small_config(config_class, **fields)
    minloop.write_run_config(tmp_path / "run_config.yaml", model=config)
    again = minloop.read_run_config(tmp_path / "run_config.yaml", modules=[__name__])["model"]
    assert type(again) is config_class
    assert comparable(again) == comparable(config)


def test_the_other_configs_are_equal_after_the_round_trip(tmp_path: Path) -> None:
    config = small_config(bf16=True)
    ddp = minloop.build_ddp_config(config, use_distributed_optimizer=True, bucket_size=40_000)
    optimizer = minloop.build_optimizer_config(config, ddp, lr=1e-5, clip_grad=float("inf"))
    dataset = minloop.build_dataset_config(sequence_length=8, vocab_size=99, blend=(["a", "b"], None), split="9,1,0")
    path = tmp_path / "configs.yaml"
    minloop.write_run_config(
        path, ddp=ddp, optimizer=optimizer, dataset=dataset, words={"run": "7", "tags": [1.0, "x"]}
    )
    with pytest.raises(ValueError, match=r"dataset\.tokenizer was a megatron.*only the class is recorded: give it"):
        minloop.read_run_config(path)
    again = minloop.read_run_config(path, given={"dataset.tokenizer": dataset.tokenizer})
    words = {"run": "7", "tags": [1.0, "x"]}
    assert again == {"ddp": ddp, "optimizer": optimizer, "dataset": dataset, "words": words}


def write_as_the_readme_says() -> None:
    """Its lines after those of the loop, with what those have made; the schedule that comes back is that one."""
    (lines,) = re.findall(r"```python\n(schedule = .*?)```", README.read_text(), flags=re.DOTALL)
    state, ddp = small_state(), minloop.build_ddp_config(small_config())
    made: dict[str, Any] = {"minloop": minloop, "config": small_config(), "ddp_config": ddp}
    made |= {"optimizer_config": state.optimizer.config, "optimizer": state.optimizer}
    made["data_config"] = minloop.build_dataset_config(sequence_length=8, vocab_size=99)
    exec(lines, made)
    assert {name: made["run"][name] for name in ("ddp", "optimizer", "dataset")} == {
        "ddp": ddp, "optimizer": state.optimizer.config, "dataset": made["data_config"]
    }  # fmt: skip
    assert comparable(made["run"]["model"]) == comparable(made["config"])
    assert (made["scheduler"].lr_decay_steps, made["scheduler"].lr_warmup_steps) == (160, 32)
    minloop.shutdown_distributed()


def test_a_whole_run_is_recorded_as_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_ranks(1, write_as_the_readme_says)


FSDP: dict[str, dict[str, Any]] = {
    "Megatron FSDP": {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
    "HSDP": {
        "use_megatron_fsdp": True,
        "num_distributed_optimizer_instances": 2,
        "outer_dp_sharding_strategy": "optim",
    },
    "torch FSDP2": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("kind", FSDP)
def test_configs_of_fully_sharded_models_are_equal_after_the_round_trip(tmp_path: Path, kind: str) -> None:
    config = small_config(bf16=True, gradient_accumulation_fusion=False)
    ddp = minloop.build_ddp_config(config, **FSDP[kind])
    minloop.write_run_config(tmp_path / "configs.yaml", model=config, ddp=ddp)
    again = minloop.read_run_config(tmp_path / "configs.yaml")
    assert type(again["ddp"]) is type(ddp)
    assert again["ddp"] == ddp
    assert comparable(again["model"]) == comparable(config)


def test_a_lambda_is_refused_by_the_name_of_its_field(tmp_path: Path) -> None:
    config = small_config(OwnConfig, activation_func=lambda x: x)
    with pytest.raises(ValueError, match=r"model\.activation_func is test_run_config\..*<lambda>: define the function"):
        minloop.write_run_config(tmp_path / "run_config.yaml", model=config)
    assert not any(tmp_path.iterdir())


TRANSFORMER_CONFIG = "megatron.core.transformer.transformer_config.TransformerConfig"
REFUSED = {
    "model: {_target_: os.system, command: 'touch ran'}": r"model names os\.system, which is outside megatron\.core",
    "model: {_target_: subprocess.Popen, _args_: [[touch, ran]]}": r"names subprocess\.Popen",
    "model: {_target_: megatron.core.parallel_state.os.system, command: 'touch ran'}": r"is \w+\.system under another",
    "model: {f: {_target_: torch.load, _call_: false}}": r"model\.f names torch\.load, which is outside",
    "model: {f: {_target_: torch.hub.load, _partial_: true, _args_: [a]}}": r"names torch\.hub\.load",
    "model: {f: {_target_: torch.from_file, _partial_: true, _args_: [ran]}}": r"names torch\.from_file",
    "model: {_target_: megatron.core.utils.unwrap_model}": "only the class is recorded",
    "model: {_target_: test_run_config.OwnConfig}": r"name its module, modules=\['test_run_config'\]",
    "model: !!python/object/apply:os.system ['touch ran']": "is not a run config",
    "model: &a [1, 2]\nmore: [*a, *a]": "repeats a part by reference",
    f"model: {{_target_: {TRANSFORMER_CONFIG}, unheard_of: 3}}": "TransformerConfig has no field unheard_of",
    f"model: {{_target_: {TRANSFORMER_CONFIG}, num_layers: 3}}": "TransformerConfig refuses the recorded fields",
    "[1, 2]": "is not a run config",
    "{": "is not a run config",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_crafted_file_is_refused_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run_config.yaml").write_text(text)
    with pytest.raises(ValueError, match=REFUSED[text]):
        minloop.read_run_config(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run_config.yaml"]


def save(directory: str, **options: Any) -> Any:
    state = small_state(**options)
    minloop.save_checkpoint(directory, state)
    fields = comparable(state.config)
    minloop.shutdown_distributed()
    return {name: value for name, value in fields.items() if not name.endswith("_func")}


def load(directory: str, **options: Any) -> str:
    state = small_state(**options)
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the message is compared by the test)
        minloop.load_checkpoint(directory, state)
    minloop.shutdown_distributed()
    return str(raised.value)


def test_a_checkpoint_records_the_configs_it_was_trained_with(tmp_path: Path) -> None:
    gpt = {"position_embedding_type": "rope", "rotary_base": 500}
    (fields,) = run_ranks(1, save, str(tmp_path), gpt=gpt, bf16=True, ddp={"use_distributed_optimizer": True})
    read = minloop.read_run_config(tmp_path / "iter_0000000")
    assert {name: comparable(read["model"])[name] for name in fields} == fields
    assert (read["ddp"].use_distributed_optimizer, read["optimizer"].lr) == (True, 5e-3)
    assert read["model_options"] | gpt == read["model_options"]
    (message,) = run_ranks(1, load, str(tmp_path), gpt=gpt, mtp_num_layers=1)
    assert "mtp_num_layers: None saved, 1 here" in message


def test_fields_that_differ_are_named_when_tensors_are_lacking(tmp_path: Path) -> None:
    experts: dict[str, Any] = {"num_moe_experts": 2, "add_bias_linear": False}
    run_ranks(1, save, str(tmp_path), **experts, moe_layer_freq=[0, 0, 0, 1])
    (message,) = run_ranks(1, load, str(tmp_path), **experts, moe_layer_freq=[1, 0, 0, 1])
    assert "tensors" in message
    assert "The configs differ in moe_layer_freq: [0, 0, 0, 1] saved, [1, 0, 0, 1] here" in message


def save_with_schedule(directory: str, lr: float, lengths: list[dict[str, int]]) -> list[str]:
    """Save in one layout with the first schedule, go on in another one with each; what is said of it."""
    state = small_state(lr=lr, scheduler=lengths[0], tensor_model_parallel_size=2)
    minloop.train_step(state, text_loader(state), num_microbatches=4)
    with mock.patch.object(content, "COUNTERS", content.COUNTERS[:2]):
        minloop.save_checkpoint(f"{directory}/older", state)
    minloop.save_checkpoint(directory, state)
    minloop.shutdown_distributed()
    say = mock.Mock()
    with mock.patch.object(run_config, "say_once", say), mock.patch("minloop.state.say_once", say):
        for count, length in enumerate(lengths, start=2):
            state = small_state(lr=lr * (count - 1), scheduler=length, ddp={"use_distributed_optimizer": True})
            for saved in (directory, f"{directory}/older"):
                minloop.load_checkpoint(saved, state)
                for _ in range(2):
                    minloop.train_step(state, text_loader(state), num_microbatches=count)
    minloop.shutdown_distributed()
    return [call.args[0] for call in say.call_args_list]


def test_a_run_that_goes_on_with_other_settings_says_so(tmp_path: Path) -> None:
    said, others = run_ranks(2, save_with_schedule, str(tmp_path), 1e-3, [{"train_iters": 10}, {"train_iters": 20}])
    settings = (
        "iter_0000001 was saved with other settings (saved → now, and those of now hold): lr: 0.001 → 0.002, "
        "lr_decay_steps: 80 → 160, wd_incr_steps: 80 → 160"
    )
    batch = (
        "the run goes on with another global batch than it was saved with (saved → now, and that of now holds): "
        "8 → 12 samples"
    )
    assert said == [settings, batch, settings]
    assert others == [batch]  # said on the first rank alone, by `say_once` itself


def test_megatron_bridge_finds_its_files(tmp_path: Path) -> None:
    """By the documented structure: what its `load_checkpoint` reads before it builds anything."""
    run_ranks(1, save, str(tmp_path))
    with (tmp_path / "iter_0000000" / "run_config.yaml").open() as file:
        run_config = yaml.safe_load(file)
    assert run_config["model"]["tensor_model_parallel_size"] == run_config["model"]["pipeline_model_parallel_size"] == 1
    assert run_config["checkpoint"] == {"save_optim": True, "save_rng": True, "fully_parallel_save": False}
    activation = run_config["model"]["activation_func"]
    assert activation == {"_target_": "torch.nn.functional.gelu", "_call_": False}
    counters = torch.load(tmp_path / "iter_0000000" / "train_state.pt", weights_only=True)
    assert {name: counter.item() for name, counter in counters.items()} == {
        **{"step": 0, "consumed_train_samples": 0, "skipped_train_samples": 0, "consumed_valid_samples": 0},
        **{"floating_point_operations_so_far": 0, "do_train": True, "do_valid": False, "do_test": False},
    }


def test_reading_imports_nothing_but_what_is_named_and_allowed(tmp_path: Path) -> None:
    (tmp_path / "run_config.yaml").write_text("model: {_target_: turtle.Turtle}")
    with pytest.raises(ValueError, match=r"turtle\.Turtle"):
        minloop.read_run_config(tmp_path)
    assert "turtle" not in sys.modules
