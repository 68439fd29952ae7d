"""The GLM-5 family: config, presets, checkpoints and model, imported on first use."""

from __future__ import annotations

from importlib import import_module

# public name -> module of this package that defines it
_HOME = {
    "Glm5Config": "config",
    "YarnScaling": "rope",
    "preset": "presets",
    "preset_names": "presets",
    "count_parameters": "tensors",
    "expected_tensors": "tensors",
    "parameter_shapes": "tensors",
    "Glm5ForCausalLM": "model",
    "Checkpoint": "checkpoint",
    "CheckpointWarning": "checkpoint",
    "open_checkpoint": "checkpoint",
    "parameter_writer": "checkpoint",
    "checkpoint_tensors": "checkpoint_save",
    "save_checkpoint": "checkpoint_save",
    "WeightUpdate": "updates",
    "load_update": "updates",
    "read_update": "updates",
    "offload_experts": "expert_placement",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Resolves a public name by importing the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
