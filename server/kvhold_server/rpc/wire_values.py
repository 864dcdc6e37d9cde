"""Scalars of the wire: enumerations by number, and checks of ranges that name the field and its bound."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from kvhold.v1 import plan_pb2 as pb
from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.errors import InvalidField
from kvhold_server.domain.kinds.mla import CacheRole
from kvhold_server.domain.layer_spec import StateCacheMode
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import (
    GroupRole,
    Strategy,
    WarningType,
)

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_PAGE_BYTES = 2**40
MAX_TEXT_BYTES = 64
MAX_LAYER_NAME_BYTES = 512
MAX_STAGES = 1024
MAX_GROUPS = 64
MAX_STATE_ARRAYS = 16
MAX_STATE_DIMENSIONS = 8
DEFAULT_CACHE_BLOCK_TOKENS = 16


def _numbers(domain: type[Enum], prefix: str) -> dict[int, Any]:
    """Wire number → domain value, by name: the wire's names are PREFIX_NAME."""
    return {int(getattr(pb, f"{prefix}_{value.name}")): value for value in domain}


DTYPES_BY_NUMBER: dict[int, Dtype] = _numbers(Dtype, "DTYPE")
LAYOUTS_BY_NUMBER: dict[int, Layout] = _numbers(Layout, "LAYOUT")
STRATEGIES_BY_NUMBER: dict[int, Strategy] = _numbers(Strategy, "STRATEGY") | {pb.STRATEGY_UNSPECIFIED: Strategy.MODERN}
MODES_BY_NUMBER: dict[int, StateCacheMode] = _numbers(StateCacheMode, "STATE_CACHE_MODE") | {0: StateCacheMode.NONE}
CACHE_ROLES_BY_NUMBER: dict[int, CacheRole] = _numbers(CacheRole, "CACHE_ROLE") | {0: CacheRole.SPARSE}
GROUP_ROLES_BY_NUMBER: dict[int, GroupRole] = _numbers(GroupRole, "GROUP_ROLE")
WARNINGS_BY_NUMBER: dict[int, WarningType] = _numbers(WarningType, "WARNING_TYPE")
ENUM_FIELDS: Mapping[str, Mapping[int, Enum]] = {
    "cache_role": CACHE_ROLES_BY_NUMBER,
    "state_cache_mode": MODES_BY_NUMBER,
}
_WIRE_NUMBERS: dict[Enum, int] = {
    value: number
    for table in (
        DTYPES_BY_NUMBER,
        LAYOUTS_BY_NUMBER,
        STRATEGIES_BY_NUMBER,
        MODES_BY_NUMBER,
        CACHE_ROLES_BY_NUMBER,
        GROUP_ROLES_BY_NUMBER,
        WARNINGS_BY_NUMBER,
    )
    for number, value in table.items()
    if number
}


def wire(value: Enum) -> Any:
    """The wire's number of a domain value."""
    return _WIRE_NUMBERS[value]


def positive(value: int, path: str) -> int:
    return at_least(value, 1, path)


def at_least(value: int, lowest: int, path: str) -> int:
    if not lowest <= value <= MAX_INT32:
        raise InvalidField(field=path, value=value, constraint=f"must be {lowest}..{MAX_INT32}")
    return value


def optional(message: Any, name: str, lowest: int, path: str) -> int | None:
    if not message.HasField(name):
        return None
    return at_least(getattr(message, name), lowest, f"{path}.{name}")


def text(value: str, path: str) -> str:
    if len(value.encode()) > MAX_TEXT_BYTES:
        raise InvalidField(field=path, value=value[:80], constraint=f"must have at most {MAX_TEXT_BYTES} bytes")
    return value


def from_table(table: Mapping[int, Any], number: int, path: str) -> Any:
    if number not in table:
        allowed = ", ".join(sorted({str(value.value) for value in table.values()}))
        raise InvalidField(field=path, value=number, constraint=f"must be one of {allowed}")
    return table[number]
