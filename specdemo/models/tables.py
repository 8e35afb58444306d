"""TOML files and JSON checked by pydantic against dataclasses. Complaints about a file name it and the field."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from ..errors import BadInput

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
NO_OTHERS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)  # refuses fields that a dataclass does not have
UNKNOWN = "is not a field that is known here"
PROBLEMS = {
    "missing": "is missing",
    "unexpected_keyword_argument": UNKNOWN,
    "dataclass_type": "must be a table, not {value}",
    "dict_type": "must be a table, not {value}",
    "tuple_type": "must be a list of tables",
    "too_short": "must be a list of tables",
}


def problem(words: str) -> PydanticCustomError:
    """An error about a field, for a validator to raise."""
    return PydanticCustomError("problem", "{words}", {"words": words})


def refuse(name: str, words: str) -> NoReturn:
    """Refuse the field `name` of a table in a validator."""
    raise ValidationError.from_exception_data("", [{"type": problem(words), "loc": (name,), "input": None}])


def says(words: str, quoting: bool = True) -> WrapValidator:
    """Replaces the error of a field by `words`, followed by the value if `quoting`."""

    def check(value: Any, allowed: ValidatorFunctionWrapHandler) -> Any:
        try:
            return allowed(value)
        except ValidationError:
            raise problem(f"{words}, not {value!r}" if quoting else words) from None

    return WrapValidator(check)


def one_of(known: Collection[str]) -> AfterValidator:
    """Refuses texts that are not in `known`."""

    def check(text: str) -> str:
        if text not in known:
            raise problem(f"must be one of {', '.join(known)}, not {text!r}")
        return text

    return AfterValidator(check)


Filled = Annotated[str, Strict(), StringConstraints(pattern=r"\S")]
Text = Annotated[Filled, says("must be a text in quotes")]
Texts = Annotated[tuple[Filled, ...], Field(min_length=1), says("must be a list of texts, none of them empty", False)]
Whole = Annotated[int, Strict(), Field(ge=1), says("must be a whole number of at least 1")]
Truth = Annotated[bool, Strict(), says("must be true or false")]
Sha256 = Annotated[
    str,
    Strict(),
    StringConstraints(to_lower=True, pattern=r"^[0-9a-fA-F]{64}$"),
    says("must be a SHA-256 of 64 hexadecimal digits"),
]
Unchecked = PlainValidator(lambda value: value)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Made once for each type: that takes ten times as long as to read a table by it."""
    return TypeAdapter(kind)


def _beside(value: Any, info: ValidationInfo) -> Path:
    text = _adapter(Text).validate_python(value)
    try:
        return folder_of(info) / Path(text).expanduser()
    except RuntimeError as error:  # ~name of a user who does not exist
        raise problem("begins with ~ and a user that does not exist") from error


def existing_file(value: Any, info: ValidationInfo) -> Path:
    """A validator: the path of an existing file."""
    path = _beside(value, info)
    if not path.is_file():
        raise problem(f"names a file that does not exist: {path}")
    return path


RelativePath = Annotated[Path, BeforeValidator(_beside)]  # relative to the folder of the file
ExistingFile = Annotated[Path, BeforeValidator(existing_file)]


def folder_of(info: ValidationInfo) -> Path:
    """The folder of the file that is read."""
    assert isinstance(info.context, Path), "see `table_as`"
    return info.context


def table_as(kind: type[T], fields: Any, folder: Path | None = None) -> T:
    """A table, or an object of JSON, as an instance of a dataclass.

    Args:
        folder: that of the file, if a field of the dataclass is a path.
    Raises:
        ValidationError: it is not one. A validator of the outer table may let this pass.
    """
    made: T = _adapter(kind).validate_python(fields, context=folder)  # type: ignore[arg-type]  # classes are hashable
    return made


def json_as(kind: type[T], text: bytes) -> T:
    """As `table_as`, for an object in JSON."""
    made: T = _adapter(kind).validate_json(text)  # type: ignore[arg-type]
    return made


def table_of(made: Any) -> dict[str, Any]:
    """The inverse of `table_as`; fields that are None are left out."""
    adapter = _adapter(type(made))  # type: ignore[arg-type]
    table: dict[str, Any] = adapter.dump_python(made, mode="json", by_alias=True, exclude_none=True)
    return table


def file_as(kind: type[T], path: Path, **beside: Any) -> T:
    """A TOML file as an instance of a dataclass; `beside` are fields that a file does not have."""
    fields = read_toml(path)
    try:
        for name in beside:
            if name in fields:
                refuse(name, UNKNOWN)
        return table_as(kind, {**fields, **beside}, path.parent)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        words = (
            first["msg"] if first["type"] == "problem" else PROBLEMS[first["type"]].format(value=repr(first["input"]))
        )
        raise BadInput(f"{path.name}: the field {place.lstrip('.')} {words}.") from error


def read_toml(path: Path) -> Mapping[str, Any]:
    """The contents of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise BadInput(f"{path.name}: the file is not UTF-8 text.") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path.name}: the file is not valid TOML: {error}.") from error
    except OSError as error:
        raise BadInput(f"{path.name}: the file cannot be read: {error.strerror}.") from error
