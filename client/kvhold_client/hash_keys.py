"""What makes equal tokens differ: the extra keys of a block.

In this order inside the tuple of a block that covers tokens [start, end); a block with none of them has None:

    adapter      every block: its name and where it was loaded from, so that pointing a name elsewhere invalidates
    media        each item whose placeholders overlap the block, with its offset from the block's start (negative if it
                 began earlier): placeholder ids are alike, only content and place tell two prompts apart
    salt         first block only; chaining carries it to all others
    embeddings   SHA-256 of the rows of this block, when a prompt is given as embeddings (its token ids are zeros)

The three styles are three generations of one engine: what each writes must match what the engine beside us writes.
Strings go through as the objects that the caller gave, which the pickle form can tell apart (see `hash_encodings`).
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvhold_client.hash_encodings import ExtraKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter."""

    name: str
    path: str = ""
    number: int = 0  # the engine's own counter; identity in the "numbered" style only


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """An image, a sound or a video standing in for a run of placeholder tokens."""

    identifier: str  # names the content; use the full digest
    offset_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbeddings:
    """A prompt given as vectors: raw bytes, one row per token. Tokens beyond the last row have empty rows."""

    rows: bytes
    row_size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraContent:
    """Everything besides its tokens that one sequence's cache depends on."""

    adapter: Adapter | None = None
    media: Sequence[MediaItem] = ()  # by offset, not overlapping
    salt: str = ""
    embeddings: PromptEmbeddings | None = None

    def __post_init__(self) -> None:
        for before, after in zip(self.media, self.media[1:], strict=False):
            if after.offset_tokens < before.offset_tokens + before.num_tokens:
                raise ValueError(f"media: {after.identifier!r} overlaps {before.identifier!r} or is out of order")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStyle:
    """How each source of extra keys is written. None leaves it out."""

    adapter: Callable[[Adapter], ExtraKey]
    media: Callable[[MediaItem, int], ExtraKey]  # item, start of the block
    salt: Callable[[str], ExtraKey]
    embeddings: Callable[[bytes], ExtraKey] | None


KEY_STYLES = {
    "tagged": KeyStyle(
        adapter=lambda adapter: ("lora", adapter.name, adapter.path),
        media=lambda item, start: ("mm", item.identifier, item.offset_tokens - start),
        salt=lambda salt: ("cache_salt", salt),
        embeddings=lambda digest: ("prompt_embeds", digest),
    ),
    "named": KeyStyle(
        adapter=lambda adapter: adapter.name,
        media=lambda item, start: (item.identifier, item.offset_tokens - start),
        salt=lambda salt: salt,
        embeddings=lambda digest: digest,
    ),
    "numbered": KeyStyle(
        adapter=lambda adapter: adapter.number,
        media=lambda item, start: item.identifier,
        salt=lambda salt: salt,
        embeddings=None,
    ),
}


class ExtraKeys:
    """The extra keys of the blocks of one sequence. Holds no position: any range may be asked for, in any order."""

    def __init__(self, content: ExtraContent, style: KeyStyle) -> None:
        self._style = style
        self._adapter = () if content.adapter is None else (style.adapter(content.adapter),)
        self._salt = (style.salt(content.salt),) if content.salt else ()
        self._media = tuple(content.media)
        self._media_ends = [item.offset_tokens + item.num_tokens for item in self._media]
        self._embeddings = content.embeddings if style.embeddings else None
        self._in_every_block = bool(self._adapter or self._embeddings)

    def of_block(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """Keys of the block that covers tokens [start, end); empty if it has none."""
        keys = self._adapter + self._media_keys(start, end)
        if start == 0:
            keys += self._salt
        if self._embeddings is not None and self._style.embeddings is not None:
            size = self._embeddings.row_size_bytes
            rows = self._embeddings.rows[start * size : end * size]
            keys += (self._style.embeddings(hashlib.sha256(rows).digest()),)
        return keys

    def of_blocks(self, first: int, count: int, block_size_tokens: int) -> dict[int, tuple[ExtraKey, ...]]:
        """Block index → keys, for those of blocks [first, first + count) that have any."""
        if self._in_every_block:
            wanted = set(range(first, first + count))
        else:
            wanted = {0} if self._salt else set()
            for item, end in zip(self._media, self._media_ends, strict=True):
                wanted.update(range(item.offset_tokens // block_size_tokens, -(-end // block_size_tokens)))
            wanted &= set(range(first, first + count))
        keys = {index: self.of_block(index * block_size_tokens, (index + 1) * block_size_tokens) for index in wanted}
        return {index: keys[index] for index in sorted(keys) if keys[index]}

    def _media_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        index = bisect_right(self._media_ends, start)  # first item that ends after the block's start
        keys: tuple[ExtraKey, ...] = ()
        while index < len(self._media) and self._media[index].offset_tokens < end:
            keys += (self._style.media(self._media[index], start),)
            index += 1
        return keys
