"""Records copied with changes: as `dataclasses.replace` does it."""

import dataclasses

import pytest

from atoll.base import records
from atoll.base.units import Vector


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    name: str
    size: int = 0

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("a size below nothing")


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    size: int = dataclasses.field(default=0, kw_only=True)


def test_it_is_what_the_library_gives() -> None:
    for record, changes in ((Vector(1, 2, 3, 4), {"memory_mib": 9}), (Checked("a"), {"size": 3, "name": "b"}), (Checked("a", 2), {})):
        copied = records.replace(record, **changes)  # type: ignore[type-var,misc]
        assert copied == dataclasses.replace(record, **changes)  # type: ignore[type-var,arg-type]
        assert copied is not record
        assert type(copied) is type(record)


def test_what_is_checked_when_it_is_made_is_checked_again() -> None:
    with pytest.raises(ValueError, match="below nothing"):
        records.replace(Checked("a"), size=-1)


def test_a_field_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="no field colour"):
        records.replace(Checked("a"), colour="red")  # type: ignore[call-arg]


def test_a_record_whose_fields_are_not_given_by_position_is_refused() -> None:
    with pytest.raises(TypeError, match="by position"):
        records.replace(Named("a"), name="b")
