"""Reads the keys of a configuration one by one, each against its rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from echo_policies.errors import InputError


class ConfigKeys:
    """Typed look-ups in a JSON object; a key that is null counts as absent."""

    def __init__(self, keys: Mapping[str, Any], where: str) -> None:
        """Bind the object.

        Args:
            keys: the object.
            where: file and object, for messages.
        """
        self._keys = keys
        self.where = where

    def __contains__(self, key: str) -> bool:
        """Whether a key is there and not null."""
        return self._keys.get(key) is not None

    def raw(self, key: str) -> Any:
        """The value as it stands; None if absent."""
        return self._keys.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """Read a positive whole number.

        Raises:
            InputError: it is absent without a default, or something else.
        """
        value = self._value(key, default, "a positive whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, "a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive number.

        Raises:
            InputError: it is absent without a default, or something else.
        """
        value = self._value(key, default, "a positive number")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.refusal(key, "a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Read true or false.

        Raises:
            InputError: it is something else.
        """
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Read a text.

        Raises:
            InputError: it is something else.
        """
        value = self._value(key, default, "a text")
        if not isinstance(value, str):
            raise self.refusal(key, "a text")
        return value

    def part(self, key: str) -> ConfigKeys:
        """Read a nested object; an empty one if absent.

        Raises:
            InputError: it is something else.
        """
        value = self._value(key, {}, "an object")
        if not isinstance(value, Mapping):
            raise self.refusal(key, "an object")
        return ConfigKeys(value, f"{self.where}, {key}")

    def counts_from_zero(self, key: str) -> list[int] | None:
        """Read a list of whole numbers from 0; None if absent.

        Raises:
            InputError: it is something else.
        """
        value = self.raw(key)
        if value is None:
            return None
        is_list = isinstance(value, list) and len(value) > 0
        if not is_list or not all(type(item) is int and item >= 0 for item in value):
            raise self.refusal(key, "a list of whole numbers from 0")
        return list(value)

    def refusal(self, key: str, rule: str) -> InputError:
        """Say what a key must be and what it is."""
        return InputError(f"{self.where}: {key} must be {rule}; it is {self.raw(key)!r}.")

    def _value(self, key: str, default: Any, rule: str) -> Any:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            raise InputError(f"{self.where} must have the key {key!r}, {rule}; it lacks it.")
        return default
