"""Reading config.json: typed access to its fields, with the field's name in every error."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvhold_client.hf_config.errors import HfConfigError, MissingField, UnusableField

MAX_FILE_BYTES = 8 * 1024 * 1024


class ConfigReader:
    """The fields of one family's configuration. A field that is null counts as absent, as it does for engines.

    `defaults` are those of the family's configuration class: published files leave them out.
    """

    def __init__(self, values: Mapping[str, Any], model_type: str, defaults: Mapping[str, Any] | None = None) -> None:
        self._values = values
        self._defaults = defaults or {}
        self.model_type = model_type

    def get(self, field: str) -> Any:
        """The value, or the family's default, or None."""
        value = self._values.get(field)
        return self._defaults.get(field) if value is None else value

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigReader":
        """The same fields with a family's defaults."""
        return ConfigReader(self._values, self.model_type, defaults)

    def integer(self, *fields: str) -> int:
        """The first of `fields` that is there, at least 1. Raises MissingField, UnusableField."""
        found = self.integer_or(None, *fields)
        if found is None:
            raise MissingField(fields[0], self.model_type)
        return found

    def integer_or(self, default: int | None, *fields: str) -> int | None:
        """The first of `fields` that is there, at least 1, else `default`. Raises UnusableField."""
        for field in fields:
            value = self.get(field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise self.unusable(field, value, "must be a whole number, at least 1")
            return value
        return default

    def words(self, field: str, count: int) -> list[str] | None:
        """One word for each of `count` layers; None if it is absent. Raises UnusableField."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, Sequence) or len(value) < count:
            raise self.unusable(field, value, f"must have an entry for each of {count} layers")
        return [str(word) for word in value[:count]]

    def unusable(self, field: str, value: object, constraint: str) -> UnusableField:
        """The error for a value that does not fit."""
        shown = value if len(repr(value)) < 120 else f"{repr(value)[:120]}…"
        return UnusableField(field, shown, constraint, self.model_type)


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The fields of a config.json, or of the one in a model's directory. Raises OSError, HfConfigError."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if file.stat().st_size > MAX_FILE_BYTES:
        raise HfConfigError(f"{file}: larger than {MAX_FILE_BYTES} bytes: not a config.json", field="")
    try:
        values = json.loads(file.read_text())
    except ValueError as error:  # JSON and UTF-8 alike
        raise HfConfigError(f"{file}: not JSON: {error}", field="") from None
    if not isinstance(values, dict):
        raise HfConfigError(f"{file}: must be an object with the model's fields", field="")
    return values
