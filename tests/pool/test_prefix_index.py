"""The prefix index by itself, against a list of names that is searched from its start."""

import random
from dataclasses import dataclass, field

import pytest

from kvhold_server.pool.origin import Origin
from kvhold_server.pool.prefix_index import PrefixIndex
from kvhold_server.pool.values import Completed, Removed

NUM_BLOCKS = 40
GROUPS = (0, 1)
KEYS = [b"key %d" % i for i in range(12)]
SESSIONS = (1, 2)
Name = tuple[int, bytes, int]  # group, key, block


@dataclass
class Walk:
    """The index, what must be found in it, and the steps that are not complete."""

    rng: random.Random
    index: PrefixIndex = field(
        default_factory=lambda: PrefixIndex(num_blocks=NUM_BLOCKS, num_groups=2, report_events=True, num_ghosts=50)
    )
    names: list[Name] = field(default_factory=list)  # in order of publication
    origin_of: dict[int, Origin] = field(default_factory=dict)
    provisional: list[Origin] = field(default_factory=list)

    def origin(self) -> Origin:
        """A step's origin, new or not."""
        if not self.provisional or self.rng.random() < 0.2:
            self.provisional.append(Origin(self.rng.choice(GROUPS), self.rng.choice(SESSIONS), 1))
            self.index.num_provisional += 1
        return self.rng.choice(self.provisional)

    def blocks(self, num: int, *, named: bool) -> list[int]:
        found = [block for block in range(1, NUM_BLOCKS) if (block in self.origin_of) is named]
        return self.rng.sample(found, min(num, len(found)))

    def publish(self) -> None:
        origin, blocks = self.origin(), self.blocks(self.rng.choice((1, 1, 3)), named=False)
        keys = self.rng.choices(KEYS, k=len(blocks))
        known = len({key for group, key, _ in self.names if group == origin.group} & set(keys))
        num = self.index.publish(origin.group, blocks, keys, origin, range(4, 4 * len(blocks) + 4, 4))
        assert num == len(keys) - len(set(keys)) + known
        self.names += [(origin.group, key, block) for key, block in zip(keys, blocks, strict=True)]
        self.origin_of |= dict.fromkeys(blocks, origin)

    def publish_partial(self) -> None:
        for block in self.blocks(1, named=self.rng.random() < 0.7):
            origin, key = self.origin_of.get(block) or self.origin(), self.rng.choice(KEYS)
            if not self.index.has_key(origin.group, block, key):
                self.index.publish_partial(block, key, origin, 2)
                self.names.append((origin.group, key, block))
                self.origin_of[block] = origin

    def move_keys(self) -> None:
        for source, target in zip(self.blocks(1, named=True), self.blocks(1, named=False), strict=False):
            self.index.move_keys(source, target)
            moved = [(group, key, target) for group, key, block in self.names if block == source]
            self.names = [name for name in self.names if name[2] != source] + moved
            self.origin_of[target] = self.origin_of.pop(source)

    def drop(self) -> None:
        for block in [*self.blocks(1, named=True), *self.blocks(1, named=False)]:
            assert self.index.drop(block) is (block in self.origin_of)
            self.expect_removed([block])

    def forget(self) -> None:
        blocks = self.blocks(self.rng.choice((1, 4)), named=True) + self.blocks(2, named=False)
        self.rng.shuffle(blocks)
        num_named = sum(block in self.origin_of for block in blocks)
        assert self.index.forget(blocks) == num_named
        self.expect_removed(blocks)

    def expect_removed(self, blocks: list[int]) -> None:
        expected = []
        for block in blocks:
            for name in [name for name in self.names if name[2] == block]:
                self.names.remove(name)
                expected.append((*name, sum(other[:2] == name[:2] for other in self.names)))
            self.origin_of.pop(block, None)
        told = [
            (event.group, *row)
            for event in self.index.take_events()
            if isinstance(event, Removed)
            for row in zip(event.hashes, event.blocks, event.copies_left, strict=True)
        ]
        assert sorted(told) == sorted(expected)

    def reveal(self) -> None:
        for origin in self.rng.sample(self.provisional, min(1, len(self.provisional))):
            self.provisional.remove(origin)
            completed = Completed(groups=[], blocks=[], hashes=[], key_tokens=[])
            self.index.reveal([origin], completed)
            assert set(completed.blocks) == {block for block, own in self.origin_of.items() if own is origin}

    def abandon(self) -> None:
        for origin in self.rng.sample(self.provisional, min(1, len(self.provisional))):
            self.provisional.remove(origin)
            gone = [block for block, own in self.origin_of.items() if own is origin]
            for block in gone:
                self.index.drop(block)
            self.expect_removed(gone)
            self.index.abandon([origin])

    def clear(self) -> None:
        if self.rng.random() < 0.1:
            self.index.clear()
            self.index.abandon(self.provisional)
            self.names, self.origin_of, self.provisional = [], {}, []

    def compare(self) -> None:
        self.index.check_invariants(self.provisional)
        for session in SESSIONS:
            for group in GROUPS:
                found = [self.found(group, key, session) for key in KEYS]
                assert [self.index.find(group, key, session) for key in KEYS] == found
                leading = found[: [*found, 0].index(0)]
                assert self.index.visible_prefix(group, KEYS, session) == leading

    def found(self, group: int, key: bytes, session: int) -> int:
        for block in (block for *name, block in self.names if name == [group, key]):
            origin = self.origin_of[block]
            if origin.is_public or origin.session == session:
                return block
        return 0


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_what_a_list_of_names_finds(seed: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(800):
        verbs = (walk.publish, walk.publish_partial, walk.move_keys, walk.drop, walk.forget, walk.reveal, walk.abandon)
        walk.rng.choice((*verbs, walk.clear))()
        walk.compare()
    assert walk.index.num_published > 100, "the walk published"


def test_its_lists_outlive_a_reset() -> None:
    """The block store reads the same objects."""
    index = PrefixIndex(num_blocks=4, num_groups=1, report_events=False, num_ghosts=5)
    shared = index.key_of, index.origin_of, index.key_tokens, index.index, index.copies, index.secondary, index.ghosts
    index.publish(0, [1], [b"a"], Origin(0, 1, 1), [4])
    index.clear()
    after = index.key_of, index.origin_of, index.key_tokens, index.index, index.copies, index.secondary, index.ghosts
    assert all(a is b for a, b in zip(shared, after, strict=True))
    assert index.key_of == [None] * 4 and not any(index.key_tokens)
