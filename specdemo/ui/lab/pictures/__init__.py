"""What the page shows of each study: the plots. A study that has no file here is shown by its words and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....studies.lab.study import Study
from ..plots import Picture, Section
from .doctor import of_doctor
from .domains import of_domains
from .lossless import of_lossless
from .profile import of_profile
from .sweep import of_sweep
from .theory import of_measured


@dataclass(frozen=True, slots=True)
class Shown:
    """What a study is shown by: the picture of what there is so far, and for each of its sections how many figures and
    tables that has at most."""

    picture: Callable[[Any], Picture]
    sections: Sequence[tuple[int, int]]


def of_words(study: Study) -> Picture:
    words, tables = study.words(), study.tables()
    return [Section("", words, [], tables)] if words or tables else []


BY_WORDS = Shown(of_words, ((0, 3),))
PICTURES: dict[str, Shown] = {
    "profile": Shown(of_profile, ((2, 3),)),
    "theory": Shown(of_measured, ((2, 1), (2, 0))),
    "sweep": Shown(of_sweep, ((4, 1),)),
    "domains": Shown(of_domains, ((3, 1),)),
    "lossless": Shown(of_lossless, ((1, 1), (1, 2), (3, 1))),
    "doctor": Shown(of_doctor, ((4, 5),)),
}


def shown_by(study: type[Study]) -> Shown:
    return PICTURES.get(study.name, BY_WORDS)
