"""Memory of earlier answers, from which a drafter can copy: the holder's own, of one tokenizer.

Who holds a memory decides what is drafted from it, never what is written. Memories are handed to a race one by one and
never shared, so what one person was answered reaches nobody else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from ..drafters.names import DRAFTERS
from ..errors import BadInput
from .request import DraftedLane
from .trace import MOST

if TYPE_CHECKING:
    from ..models.loaded import Loaded

MOST_REMEMBERED = 8192  # tokens: a suffix automaton of them takes about 3 MB and a tenth of a second
MOST_BYTES = 1_000_000  # of a file: several times what so many tokens take
FORMAT = 1


class Memory:
    """Earlier answers to one holder, at most `most` tokens in all. The oldest tokens go first."""

    def __init__(self, texts: Iterable[Sequence[int]] = (), most: int = MOST_REMEMBERED) -> None:
        self.most = most
        self.tokens = 0
        self._texts: deque[tuple[int, ...]] = deque()
        for token_ids in texts:
            self.add(token_ids)

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """The answers, the oldest first."""
        return tuple(self._texts)

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember one more answer."""
        if not token_ids:
            return
        self._texts.append(tuple(token_ids))
        self.tokens += len(token_ids)
        while (over := self.tokens - self.most) > 0:
            oldest = self._texts.popleft()
            if left := oldest[over:]:
                self._texts.appendleft(left)
            self.tokens -= len(oldest) - len(left)


def remembering(loaded: Loaded, memory: Memory) -> Loaded:
    """The same models, whose drafters may copy from a memory."""
    return replace(loaded, parts=replace(loaded.parts, remembered=memory.texts))


def remembered_by(loaded: Loaded, lane: DraftedLane) -> int:
    """How many remembered tokens the drafter of a lane begins with."""
    return sum(map(len, loaded.parts.remembered)) if DRAFTERS[lane.drafter].remembers else 0


def memory_note(lanes: Iterable[Mapping[str, Any]]) -> str:
    """A sentence on what the lanes in the header of a trace began with, "" if with nothing."""
    known = [lane.get("remembered") for lane in lanes]  # anyone can write a trace
    counts = [count for count in known if type(count) is int and 0 < count <= MOST]
    return f"The drafter began with {counts[0]:,} remembered tokens of earlier answers." if counts else ""


# In a file ---------------------------------------------------------------------------------------------------


class MemoryFile:
    """A memory that is kept from command to command."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read()

    def memory(self, loaded: Loaded) -> Memory:
        """What the file holds now; nothing if there is none yet."""
        found = self._read()
        if found is None:
            return Memory()
        of, texts = found
        if of != fingerprint(loaded) or any(token >= loaded.rows for token_ids in texts for token in token_ids):
            raise BadInput(f"The memory {self.path} holds tokens of another tokenizer. Choose another file.")
        return Memory(texts)

    def add(self, loaded: Loaded, token_ids: Sequence[int]) -> None:
        """Add an answer to what the file holds by now: of two commands at once, one answer can be lost, no more."""
        memory = self.memory(loaded)
        memory.add(token_ids)
        content = {"specdemo_memory": FORMAT, "tokenizer": fingerprint(loaded), "texts": memory.texts}
        path = self.path.resolve()
        try:
            with NamedTemporaryFile("w", dir=path.parent, prefix=f"{path.name}.", delete=False) as part:
                json.dump(content, part)
            try:
                os.replace(part.name, path)
            except OSError:
                os.unlink(part.name)
                raise
        except OSError as error:
            raise BadInput(f"The memory {self.path} cannot be written: {error}.") from error

    def _read(self) -> tuple[str, list[list[int]]] | None:
        """The fingerprint and the texts in the file; None if there is no file."""
        try:
            with self.path.open("rb") as file:
                read = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadInput(f"The memory {self.path} cannot be read: {error}.") from error
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            found = json.loads(read)
            of, texts = found["tokenizer"], found["texts"]
            tokens = [token for token_ids in texts for token in token_ids]
            known = found["specdemo_memory"] == FORMAT and type(of) is str and type(texts) is list
            if known and len(read) <= MOST_BYTES and all(type(token) is int and token >= 0 for token in tokens):
                return of, texts
        raise BadInput(f"The file {self.path} is no memory of specdemo, or is damaged. Choose another file.")


def fingerprint(loaded: Loaded) -> str:
    """Stands for the meaning of token ids: it is the same for all models with this vocabulary."""
    vocabulary = sorted(loaded.tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
