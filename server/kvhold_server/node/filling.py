"""A pool from the records of its former daemon's table.

records ─▶ pool, on trust ─▶ verdict ─▶ torn: once more, without them ─▶ order of use
   └─ another process looks at them meanwhile ─┘
"""

from dataclasses import dataclass

from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.memory.block_table import BlockTable, RecoveredBlocks
from kvhold_server.memory.second_look import SecondLook
from kvhold_server.memory.table_records import Records
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.restore import RecordedBlocks, restore_cached, restore_order


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledPool:
    """A pool with the blocks that a table recorded."""

    pool: Pool
    found: RecoveredBlocks
    refused: list[int]  # this pool has no place for them
    problem: str = ""  # of the second look


def fill_from(table: BlockTable, config: PoolConfig) -> FilledPool:
    """Fills a pool on trust while another process looks whether the records may be trusted; most often they may."""
    look = SecondLook.begin(table.path, config.num_blocks)
    records = table.records()
    pool = Pool(config)
    refused = restore_cached(pool, _recorded(records))
    verdict = look.verdict() if look is not None else None
    found = table.settle(records, verdict or table.verdict())
    if found.num_torn:
        pool = Pool(config)
        refused = restore_cached(pool, _recorded(found))
    restore_order(pool, found.order)
    return FilledPool(pool=pool, found=found, refused=refused, problem=look.problem if look is not None else "")


def drop_allotted(pool: Pool, table: BlockTable) -> int:
    """A client may have drawn these, and overwritten them, without a word: nobody hits them. How many could be hit."""
    blocks = table.allotted()
    num = pool.evict(blocks)
    pool.take_events()
    table.forget(blocks)
    table.allot([])
    return num


def _recorded(found: Records | RecoveredBlocks) -> RecordedBlocks:
    return RecordedBlocks(blocks=found.blocks, groups=found.groups, hashes=found.hashes, key_tokens=found.key_tokens)
