"""A checkpoint: all that is known of a model before its weights are in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..engines.choose import engine_of
from ..system.weight_map import weights_file
from .errors import wrap_load_errors
from .gguf import Header
from .hub_token import hub_token
from .on_hub import download_bar, file_of
from .store import LoadError, Progress
from .weights import weights_files


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A model whose configuration and tokenizer are in memory, but not its weights. Of a model for pictures and text
    it is the text part, see `configuration`.

    `name_or_path`, `revision` and `variant` are for `from_pretrained`. `identity` names the weights in a trace. A model
    `of_ours` was written by `converted`, with a complete configuration. If the hub is `unreached`, earlier downloads
    are used. Of a GGUF file that is not fetched or not converted there is the `header`, and no tokenizer.

    `eos` are the tokens that end a text, from the model's files. `dtype` is the type of the weights in memory, `size`
    their bytes where these are known, and `device` the one that was asked for. Where a Mac's was chosen, the sentence
    `choice` of the target says why. `skip_layers` is how many of its first layers may draft. `download` is in bytes,
    None if unknown.
    """

    source: object  # a `Source`
    name_or_path: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    revision: str | None = None
    variant: str | None = None
    of_ours: bool = False
    unreached: bool = False
    header: Header | None = None
    config: Any = None
    tokenizer: Any = None
    eos: int | list[int] | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    choice: str | None = None
    size: int | None = None
    skip_layers: int = 0
    download: int | None = 0
    licence: str | None = None
    gated: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for every `from_pretrained`."""
        given = {"revision": self.revision, "token": hub_token(), "local_files_only": self.unreached}
        return {"trust_remote_code": False, **{name: value for name, value in given.items() if value}}

    @property
    def engine(self) -> str:
        """The one that it gets if memory has room for it."""
        return engine_of(self.config, self.dtype, self.device)

    @property
    def vocabulary(self) -> dict[str, int]:
        if self.header is None:
            return dict(self.tokenizer.get_vocab())
        return {token: index for index, token in enumerate(self.header.fields["tokenizer.ggml.tokens"])}


def fetch_weights(checkpoint: Checkpoint, progress: Progress) -> list[Path]:
    """The files with a model's weights. Downloads them if needed.

    Raises:
        LoadError: it failed. The message says why and what to do.
    """
    bar = download_bar(checkpoint.source, progress)
    with wrap_load_errors(checkpoint.source):
        files = weights_files(
            lambda name: file_of(checkpoint.name_or_path, checkpoint.revision, name, tqdm_class=bar), checkpoint.variant
        )
    if not files:  # there may be a pickle, which can run code when read
        raise LoadError(f"{checkpoint.source} has no weights in safetensors, the one form that is read here.")
    return files


def stored_size(checkpoint: Checkpoint) -> int | None:
    """Bytes of the weights in a single local file; None if there is none."""
    file = Path(checkpoint.name_or_path) / weights_file(checkpoint.variant)
    return file.stat().st_size if file.is_file() else None
