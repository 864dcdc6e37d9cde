"""Who published blocks, and in which step: one object that all of them share, so that a step becomes public in O(1)."""

from __future__ import annotations


class Origin:
    """What one step of a session published in one group. Others may see those hashes once it is public."""

    __slots__ = ("group", "is_public", "num_blocks", "parts", "session", "step")

    def __init__(self, group: int, session: int, step: int) -> None:
        self.group = group
        self.session = session
        self.step = step
        self.is_public = False
        self.num_blocks = 0  # that have it; kept until it is public
        self.parts: list[list[int]] = []  # blocks published, list by list; emptied when public
