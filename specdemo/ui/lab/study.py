"""What a study of the Lab is: everything the page needs to ask it, run it and show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...models.presets import PRESETS
from ...studies.prompts import Prompt, read_prompts
from .form import OF_SERVERS, Field
from .plots import Picture

if TYPE_CHECKING:
    from ...models.loaded import Loaded


class Study:
    """One question of the Lab: its words and form, how it is measured, and what is shown of it.

    An instance is one measurement on a loaded preset. `done` of its `steps` steps are over.

    Attributes:
        name: of its tab, its files and its work in the line.
        title: the question in a few words. The docstring of the class says more on the page, for someone who has not
            read a paper.
        fields: of the form.
        button: what the button says.
        sections: of a picture; for each, how many figures and how many tables it has at most.
        has_page: whether there is a report in HTML.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    fields: ClassVar[tuple[Field, ...]] = ()
    button: ClassVar[str] = "Run"
    sections: ClassVar[Sequence[tuple[int, int]]] = ((1, 1),)
    has_page: ClassVar[bool] = False

    @classmethod
    def form(cls, servers: bool = True) -> list[Field]:
        """The fields; without `servers` those for a page whose visitors may not name any."""
        return [field for field in cls.fields if servers or field.kind not in OF_SERVERS]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the form by name. Fields of servers may be missing.

        Raises:
            BadInput: the first one that is wrong.
        """
        asked = (field for field in cls.fields if field.kind not in OF_SERVERS or field.name in values)
        return {field.name: field.read(values.get(field.name)) for field in asked}

    @classmethod
    def told(cls, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What may be kept of what was asked: neither addresses nor keys."""
        secret = {field.name for field in cls.fields if field.kind in OF_SERVERS}
        return {name: value for name, value in asked.items() if name not in secret}

    def __init__(self, loaded: Loaded, asked: Mapping[str, Any]) -> None:
        self.loaded, self.asked = loaded, asked
        self.done, self.steps = 0, 1

    def run(self) -> Iterator[str]:
        """Measure; yields what it is at. What there is when it is closed can be shown.

        Raises:
            BadInput: the preset cannot do it.
        """
        raise NotImplementedError

    def picture(self) -> Picture:
        raise NotImplementedError

    def rows(self) -> list[dict[str, Any]]:
        """The table of the CSV file."""
        raise NotImplementedError

    def result(self) -> dict[str, Any]:
        """Everything, for the JSON file."""
        return {"rows": self.rows()}

    def values(self) -> dict[str, Any]:
        """What was measured for fields of the form."""
        return {}

    def measured(self) -> Any:
        """What was measured beside them, if anything."""
        return None

    def page(self) -> str:
        """Everything as a page of HTML; empty where there is none."""
        return ""

    def given(self, names: str) -> list[Any]:
        """Some of the values that were asked for."""
        return [self.asked[name] for name in names.split()]


def some_of_each(file: str, count: int) -> list[Prompt]:
    """The first prompts of each category of a prompt file, the categories in turn."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in read_prompts(PRESETS / "prompts" / f"{file}.jsonl"):
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[place] for place in range(count) for group in groups.values() if place < len(group)]
