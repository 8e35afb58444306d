"""The configuration of a GGUF file, for its conversion and for a report on a file that is not fetched yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from gguf import GGUFWriter
from transformers import AutoConfig, PreTrainedConfig

from .gguf import Header, completed

TOKENS, FILE = "tokenizer.ggml.tokens", "header.gguf"
WRITTEN = {"general.architecture", "general.alignment"}  # fields that the small file has anyhow


def config_of(header: Header, read: Callable[[str], list[float]] | None = None) -> PreTrainedConfig:
    """The configuration of a GGUF file whose header `gguf.check_header` accepts.

    transformers reads it from a small file with this header but for the lists of the tokenizer, which it reads slowly.
    Of the tokens it needs the number only.

    Args:
        read: gives the numbers of a tensor by its name; None while only the header is there: then the factors of the
            rotary embedding are others, as many.
    """
    fields = {f"{header.architecture}.vocab_size": len(header.fields[TOKENS]), **header.fields}
    with TemporaryDirectory() as folder:
        writer = GGUFWriter(Path(folder) / FILE, header.architecture)
        add = {bool: writer.add_bool, int: writer.add_int64, float: writer.add_float64, str: writer.add_string}
        for key, value in fields.items():
            if key not in WRITTEN and value != [] and not (key.startswith("tokenizer.") and isinstance(value, list)):
                add.get(type(value), writer.add_array)(key, value)
        writer.add_array(TOKENS, ["-"])
        for tensor in header.shapes:
            writer.add_tensor(tensor, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        config = AutoConfig.from_pretrained(folder, gguf_file=FILE)
    config.name_or_path = ""
    if config.vocab_size == 1:  # of some families transformers reads no other
        config.vocab_size = len(header.fields[TOKENS])
    # Those of long texts are not those of others.
    return completed(config, header, read or (lambda tensor: [float(len(tensor))] * header.shapes[tensor][0]))
