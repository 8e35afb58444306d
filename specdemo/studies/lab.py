"""The studies of the Lab, for the page and the command line: each is one file, and its class stands in this list."""

from __future__ import annotations

from .ahead import DraftsAhead
from .checks import Lossless
from .domains import Domains
from .examination import Doctor
from .explain import Theory
from .profile import Profile
from .readers import Readers
from .study import Study
from .sweep import Sweep

ALL = Profile, Theory, Sweep, Domains, Readers, DraftsAhead, Lossless, Doctor
STUDIES: dict[str, type[Study]] = {study.name: study for study in ALL}
