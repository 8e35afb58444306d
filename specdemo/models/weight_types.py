"""Refuses types of weights that a device or a model cannot have."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from ..engines.cpu.library import library_for
from ..engines.families import family_of
from ..errors import BadInput
from ..system.hardware import AS_STORED, QUANTIZED, UNQUANTIZED, dtype_name
from .source import Source


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    if dtype not in QUANTIZED.values():
        return
    if device.type != "cpu":
        raise BadInput(f"The dtype {dtype_name(dtype)} is for a CPU; a GPU reads the quantized models of the hub.")
    if library_for(UNQUANTIZED, quantized=True) is None:
        raise BadInput(f"The dtype {dtype_name(dtype)} needs gcc and a CPU with AVX2.")


def check_quantizes(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    if dtype in QUANTIZED.values() and dtype != AS_STORED and family_of(config).layout == "gpt2":
        raise BadInput(f"The weights of GPT-2 cannot be {dtype_name(dtype)} here: choose another dtype.")


def check_kept(source: Source, dtype: torch.dtype, quantized: bool) -> None:
    """Refuse to keep weights as they are stored where they would be called so wrongly.

    Args:
        quantized: whether the files of the target have quantized weights that are kept.
    """
    if dtype == AS_STORED and not quantized:
        raise BadInput(
            f"{source} has no quantized weights that can be kept as stored: choose another dtype, such as bfloat16."
        )
