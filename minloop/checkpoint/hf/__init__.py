"""Hugging Face's weights in and out, as safetensors, for Llama-shaped models."""

from minloop.checkpoint.hf.config import hf_config_fields
from minloop.checkpoint.hf.load import load_hf_weights
from minloop.checkpoint.hf.save import save_hf_weights

__all__ = ["hf_config_fields", "load_hf_weights", "save_hf_weights"]
