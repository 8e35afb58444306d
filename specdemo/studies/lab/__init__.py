"""The studies of the Lab, for the page and the command line: each is one file, and its class stands in this list."""

from __future__ import annotations

from .doctor import Doctor
from .domains import Domains
from .lossless import Lossless
from .profile import Profile
from .study import Study
from .sweep import Sweep
from .theory import Theory

STUDIES: dict[str, type[Study]] = {study.name: study for study in (Profile, Theory, Sweep, Domains, Lossless, Doctor)}
