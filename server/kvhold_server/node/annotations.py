"""What event consumers need beside hashes, as the engine told it: token ids, extra keys, adapters (R9).

Kept only in pools opened with `events_carry_tokens`, one annotation a sequence, from its admission to its end.
Nothing here changes a decision. Bounded: the oldest sequence is forgotten first, its events then carry no tokens.
"""

from array import array
from dataclasses import dataclass, field

MAX_ANNOTATED_SEQUENCES = 65_536


@dataclass(slots=True, kw_only=True)
class Annotation:
    """One item's part, or all that is known of one sequence. Tokens and keys continue from item to item."""

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    extra_keys: list[bytes] = field(default_factory=list)  # one a digest
    lora_id: int = 0
    lora_name: str = ""
    session_label: str = ""

    def add(self, more: "Annotation") -> None:
        """Continues with what another item says; names given last count."""
        self.token_ids += more.token_ids
        self.extra_keys += more.extra_keys
        self.lora_id = more.lora_id or self.lora_id
        self.lora_name = more.lora_name or self.lora_name
        self.session_label = more.session_label or self.session_label

    def tokens_of(self, block_index: int, block_size_tokens: int) -> tuple[int, ...]:
        """Of one block; empty if they are not all known."""
        begin = block_index * block_size_tokens
        found = tuple(self.token_ids[begin : begin + block_size_tokens])
        return found if len(found) == block_size_tokens else ()

    def key_of(self, unit: int) -> bytes:
        """Extra keys of one digest; empty: none."""
        return self.extra_keys[unit] if unit < len(self.extra_keys) else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedItem:
    """An item's annotation. An admission that sends hashes begins anew."""

    sequence_id: int
    begins: bool
    annotation: Annotation


class Annotations:
    """Of one pool, by session slot and sequence."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Annotation] = {}

    def add(self, slot: int, items: list[AnnotatedItem]) -> None:
        """What a step says, before it is applied."""
        for item in items:
            key = (slot, item.sequence_id)
            if item.begins:
                self._known.pop(key, None)
            known = self._known.get(key)
            if known is None:
                self._known[key] = item.annotation
            else:
                known.add(item.annotation)
        while len(self._known) > MAX_ANNOTATED_SEQUENCES:
            del self._known[next(iter(self._known))]

    def of(self, slot: int, sequence_id: int) -> Annotation | None:
        """None: nothing is known."""
        return self._known.get((slot, sequence_id))

    def drop(self, slot: int, sequence_ids: list[int]) -> None:
        """These sequences are gone."""
        for sequence_id in sequence_ids:
            self._known.pop((slot, sequence_id), None)

    def drop_session(self, slot: int) -> None:
        """The session ended. O(known sequences)."""
        for key in [key for key in self._known if key[0] == slot]:
            del self._known[key]

    def __len__(self) -> int:
        return len(self._known)
