"""The document says of names that may ask for nothing what the reader of bodies takes of them."""

from typing import Any

import jsonschema_rs
import pytest

from cardan.core.types.errors import InputError
from cardan.server.protocol.unsupported import drop_unsupported, unsupported_properties

VALUES: tuple[Any, ...] = (
    True, False, 0, 1, 1.0, 2, -1, 0.5, "", "none", "auto", "text", [], ["text"], [1], {},
    {"type": "text"}, {"type": "text", "more": 1}, {"type": "json_object"}, {"a": 1},
)  # fmt: skip


def is_taken(name: str, value: Any) -> bool:
    try:
        drop_unsupported({name: value}, frozenset())
    except InputError as error:
        return error.field != name
    return True


@pytest.mark.parametrize("name", sorted(unsupported_properties()))
def test_schema_and_reader_agree(name: str):
    validator = jsonschema_rs.validator_for(unsupported_properties()[name])
    for value in VALUES:
        assert validator.is_valid(value) == is_taken(name, value), value
    assert validator.is_valid(None)  # as good as absent


def test_names_of_other_constraints_are_refused():
    assert not is_taken("guided_by_nobody", 1)
    assert is_taken("unguided", 1)
