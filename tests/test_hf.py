"""Hugging Face's weights in and out: tiny models of transformers compute here what they compute there, and back."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from small import failure_of, rounding, small_state, text_loader, train

import minloop

TOKENS = torch.arange(64).view(2, 32) * 37 % 250
COMMON: dict[str, Any] = {
    "vocab_size": 250,  # padded to 252 below
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"rope_parameters": LLAMA3}),
    "Llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "Mistral": ("Mistral", {"sliding_window": 8}),
    "Qwen2": ("Qwen2", SLIDING),
    "Qwen2, tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "Qwen3": ("Qwen3", {}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1}),
    "Qwen3-MoE, no norm": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False}),
}
WITH_EXPERTS = ["Mixtral", "Qwen3-MoE", "Qwen3-MoE, no norm"]
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "one rank": (1, {}, list(MODELS)),
    "TP2 SP": (2, TP2, list(MODELS)),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, list(MODELS)),
    "EP2 ZeRO-1": (2, {"expert_model_parallel_size": 2, "ddp": {"use_distributed_optimizer": True}}, WITH_EXPERTS),
    "TP2 EP2 ETP2": (4, TP2 | {"expert_model_parallel_size": 2}, WITH_EXPERTS[:1]),
    "TP4, a query group on two ranks": (4, {"tensor_model_parallel_size": 4}, ["Qwen3"]),
}


def logits_there(directory: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(TOKENS).logits


def state_here(directory: Path, *, load_early: bool = False, **options: Any) -> minloop.TrainState:
    """A training state of the model in `directory`, its weights loaded before or after it is wrapped."""
    fields, gpt_options = minloop.hf_config_fields(directory, make_vocab_size_divisible_by=4)
    others: dict[str, Any] = {"lr": 1e-3} | {name: options.pop(name) for name in ("ddp", "lr") if name in options}

    def build(config: minloop.TransformerConfig, groups: minloop.ProcessGroupCollection, **_: Any) -> Any:
        chunks = minloop.build_gpt_model(config, groups, **gpt_options)
        if load_early:
            minloop.load_hf_weights(chunks, directory)
        return chunks

    config = minloop.build_config(**fields | options)
    state = small_state(config=config, build=build, **others)
    if not load_early:
        minloop.load_hf_weights(state, directory)
    return state


def there_and_back(source: Path, target: Path, names: list[str], options: dict[str, Any]) -> list[torch.Tensor]:
    """Load, save, train a step, save again; returns for each model the logits after loading and after training."""
    found: list[torch.Tensor] = []
    for number, name in enumerate(names):
        state = state_here(source / name, load_early=number % 2 == 0, **options)
        found.append(minloop.forward_logits(state, TOKENS))
        minloop.save_hf_weights(target / "same" / name, state, source / name)
        streamed = dict(minloop.named_full_parameters(state, ranks=[0], hf_config=source / name))
        if streamed:
            saved = load_file(target / "same" / name / "model.safetensors")
            assert {tensor: value.tolist() for tensor, value in streamed.items()} == {
                tensor: value.tolist() for tensor, value in saved.items()
            }
        train(state, text_loader(state), 1)
        found.append(minloop.forward_logits(state, TOKENS))
        minloop.save_hf_weights(target / "trained" / name, state, source / name, max_shard_size=20_000)
        minloop.shutdown_distributed()
    return found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for every model."""
    root = tmp_path_factory.mktemp("theirs")
    for seed, (name, (kind, entries)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**COMMON | entries))
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases would else be all alike
                parameter.normal_(0.0, 0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
        model.save_pretrained(root / name)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_compute_the_same_there_and_here(theirs: Path, tmp_path: Path, layout: str) -> None:
    ranks, options, names = LAYOUTS[layout]
    limits: Any = dict.fromkeys(("atol", "rtol"), rounding(1e-5))
    found = run_ranks(ranks, there_and_back, theirs, tmp_path, names, options)[0]
    for name, loaded, trained in zip(names, found[::2], found[1::2], strict=True):
        assert loaded[..., 250:].abs().max() == 0  # the padding
        torch.testing.assert_close(loaded[..., :250], logits_there(theirs / name), **limits)
        same, original = (load_file(folder / name / "model.safetensors") for folder in (tmp_path / "same", theirs))
        assert same.keys() == original.keys()
        assert all(torch.equal(same[key], original[key]) for key in same)
        assert len(list((tmp_path / "trained" / name).glob("model-*-of-*.safetensors"))) > 2
        torch.testing.assert_close(trained[..., :250], logits_there(tmp_path / "trained" / name), **limits)
        assert 1e-3 < (trained - loaded).abs().mean() < loaded.std() / 4  # one step from the weights that were loaded


def load_train_save(source: Path, target: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits before and after a step at learning rate 0."""
    state = state_here(source, bf16=True, ddp={"use_distributed_optimizer": True}, lr=0.0)
    before = minloop.forward_logits(state, TOKENS)
    train(state, text_loader(state), 1)
    minloop.save_hf_weights(target / "bf16", state, source)
    minloop.save_hf_weights(target / "fp32", state, source, dtype=torch.float32)
    after = minloop.forward_logits(state, TOKENS)
    minloop.shutdown_distributed()
    return before, after


def test_master_weights_follow_and_dtypes_are_written(theirs: Path, tmp_path: Path) -> None:
    before, after = run_ranks(2, load_train_save, theirs / "Llama", tmp_path)[0]
    assert torch.equal(before, after)  # the weights after a step are the master weights, rounded
    original = load_file(theirs / "Llama" / "model.safetensors")
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        saved = load_file(tmp_path / name / "model.safetensors")
        assert saved.keys() == original.keys()
        assert all(torch.equal(saved[key], original[key].bfloat16().to(dtype)) for key in saved)
        assert {tensor.dtype for tensor in saved.values()} == {dtype}
        assert transformers.AutoConfig.from_pretrained(tmp_path / name).dtype == dtype


def through_some_ranks(source: Path, target: Path) -> None:
    """Ranks 1 and 2 of a host's three load and save; rank 0 does nothing at all."""
    if torch.distributed.get_rank() > 0:
        fields, gpt_options = minloop.hf_config_fields(source, make_vocab_size_divisible_by=4)
        config = minloop.build_config(**fields | TP2)
        groups = minloop.build_groups(config, [1, 2])
        minloop.seed_ranks(1, groups, config)
        chunks = minloop.build_gpt_model(config, groups, **gpt_options)
        minloop.load_hf_weights(chunks, source)
        minloop.save_hf_weights(target, chunks, source)
        minloop.shutdown_distributed()
    torch.distributed.barrier()


def test_some_ranks_load_and_save_alone(theirs: Path, tmp_path: Path) -> None:
    run_ranks(3, through_some_ranks, theirs / "Llama", tmp_path / "saved", init="any")
    saved, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", theirs / "Llama"))
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key], original[key]) for key in saved)


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: change(path, lambda tensors: without(tensors, UP)), f"ValueError: .* it lacks {UP}"),
    "unexpected": (
        lambda path: change(path, lambda tensors: tensors | {"score.weight": torch.ones(2)}),
        "ValueError: .* it has unexpected score.weight",
    ),
    "mis-shaped": (
        lambda path: change(path, lambda tensors: tensors | {NORM: torch.ones(31)}),
        rf"ValueError: .* it has mis-shaped {NORM} \[31\], expected \[32\]",
    ),
    "truncated": (
        lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1]),
        "ValueError: .*model.safetensors is damaged",
    ),
    "absent": (lambda path: (path / "model.safetensors").unlink(), "FileNotFoundError: .*model.safetensors is missing"),
    "outside": (
        lambda path: (path / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../model.safetensors"}}'
        ),
        "ValueError: .* outside its directory",
    ),
    "another": (
        lambda path: reconfigure(path, rms_norm_eps=1e-5),
        "ValueError: .*layernorm_epsilon: 1e-05 there, 1e-06",
    ),
    "unknown": (
        lambda path: reconfigure(path, architectures=["PhiForCausalLM"], model_type="phi"),
        "ValueError: .*PhiForCausalLM.* none of those whose weights can be read and written: LlamaForCausalLM, Mistral",
    ),
}


def change(directory: Path, how: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(how(load_file(directory / "model.safetensors")), directory / "model.safetensors", {"format": "pt"})


def reconfigure(directory: Path, **entries: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def refusals(source: Path, damaged: Path, target: Path) -> dict[str, str]:
    """What is said to each damaged directory, and to saves that cannot be; the weights stay as they are."""
    state = state_here(source, tensor_model_parallel_size=2)
    before = minloop.forward_logits(state, TOKENS)
    said = {name: failure_of(minloop.load_hf_weights, state, damaged / name) for name in DAMAGED}
    assert torch.equal(before, minloop.forward_logits(state, TOKENS))
    said["not empty"] = failure_of(minloop.save_hf_weights, source, state, source)
    said["under a file"] = failure_of(minloop.save_hf_weights, source / "config.json" / "new", state, source)
    said["float64"] = failure_of(minloop.save_hf_weights, target, state, source, dtype=torch.float64)
    said["saved as another"] = failure_of(minloop.save_hf_weights, target, state, damaged / "another")
    minloop.shutdown_distributed()
    said["more parameters"] = failure_of(state_here, source, mtp_num_layers=1)
    minloop.shutdown_distributed()
    return said


def test_what_does_not_fit_is_named_on_every_rank(theirs: Path, tmp_path: Path) -> None:
    for name, (damage, _) in DAMAGED.items():
        damage(Path(shutil.copytree(theirs / "Qwen3", tmp_path / name)))
    expected = {name: pattern for name, (_, pattern) in DAMAGED.items()} | {
        "not empty": "ValueError: .*holds something already",
        "under a file": "RuntimeError: .*cannot be written",
        "float64": "ValueError: dtype=torch.float64: weights are written as torch.float32",
        "saved as another": "ValueError: .*layernorm_epsilon",
        "more parameters": r"ValueError: the model has a parameter mtp\.",
    }
    for said in run_ranks(2, refusals, theirs / "Qwen3", tmp_path, tmp_path / "new"):
        assert said.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.match(pattern, said[name]), (name, said[name])
    assert not (tmp_path / "new").exists()


LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
"""As published, written by transformers 4."""


def test_a_published_config_is_translated() -> None:
    fields, options = minloop.hf_config_fields(LLAMA_3_1, make_vocab_size_divisible_by=1024)
    assert fields == {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "layernorm_epsilon": 1e-05,
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "window_size": None,
    }
    assert options == {
        "vocab_size": 129024,
        "max_sequence_length": 131072,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        "rotary_base": 500000.0,
        "rope_scaling": True,
        "rope_scaling_factor": 8.0,
    }


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.* is none of those"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only 'silu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"attention_bias": True}, "attention_bias is True and mlp_bias False"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 8.0}}, "rope_type 'llama3' with {'high_freq_factor': 8.0}"),
        ({"architectures": None, "model_type": "mistral"}, "lacks 'sliding_window'"),
        (
            {"architectures": None, "model_type": "qwen3_moe"}
            | EXPERTS
            | {"num_experts_per_tok": 1, "norm_topk_prob": True, "use_sliding_window": False},
            "num_experts_per_tok is 1 with norm_topk_prob=True",
        ),
    ],
)
def test_a_variant_that_mcore_has_not_is_refused(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        minloop.hf_config_fields(LLAMA_3_1 | entries)
