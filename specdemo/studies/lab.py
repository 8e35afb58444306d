"""The studies of the Lab, for the page and the command line: each is one file, and its class stands in this list."""

from __future__ import annotations

from .ahead import DraftsAhead
from .causes import Causes
from .check import Check
from .domains import Domains
from .explain import Theory
from .lossless import Lossless
from .profile import Profile
from .readers import Readers
from .study import Study
from .sweep import Sweep

ALL = Check, Theory, Profile, Sweep, Domains, Causes, Readers, DraftsAhead, Lossless
STUDIES: dict[str, type[Study]] = {study.name: study for study in ALL}
