"""SequenceMetadata of a step's items → annotations. Read only in pools whose events carry tokens."""

from array import array
from collections.abc import Sequence
from typing import Any

from kvhold.v1 import block_pb2 as pb
from kvhold_server.domain.errors import InvalidField
from kvhold_server.node.annotations import AnnotatedItem, Annotation
from kvhold_server.pool.values import StepInput

MAX_NAME = 512  # characters of adapter names and labels
MAX_EXTRA_KEYS_BYTES = 4096  # of one digest


def decode_metadata(request: pb.StepRequest, items: StepInput) -> list[AnnotatedItem]:
    """Raises InvalidField."""
    admit_counts = items.admit.hash_counts or [0] * len(items.admit.sequence_ids)
    begins = [count > 0 for count in admit_counts]
    no = [False]
    return [
        *_part("free", request.free.metadata, items.free.sequence_ids, no * len(items.free.sequence_ids)),
        *_part("extend", request.extend.metadata, items.extend.sequence_ids, no * len(items.extend.sequence_ids)),
        *_part("admit", request.admit.metadata, items.admit.sequence_ids, begins),
    ]


def _part(part: str, messages: Any, sequence_ids: Sequence[int], begins: Sequence[bool]) -> list[AnnotatedItem]:
    if not messages:
        return []
    if len(messages) != len(sequence_ids):
        rule = f"must have one entry an item: {len(sequence_ids)}, or none"
        raise InvalidField(f"{part}.metadata", f"{len(messages)} entries", rule)
    rows = zip(messages, sequence_ids, begins, strict=True)
    return [
        AnnotatedItem(sequence_id=sequence_id, begins=begin, annotation=_annotation(f"{part}.metadata[{i}]", message))
        for i, (message, sequence_id, begin) in enumerate(rows)
    ]


def _annotation(path: str, message: pb.SequenceMetadata) -> Annotation:
    for name in ("lora_name", "session_label"):
        value = getattr(message, name)
        if len(value) > MAX_NAME:
            raise InvalidField(f"{path}.{name}", f"{len(value)} characters", f"must have at most {MAX_NAME}")
    if any(len(key) > MAX_EXTRA_KEYS_BYTES for key in message.extra_keys):
        raise InvalidField(f"{path}.extra_keys", "a longer one", f"must have at most {MAX_EXTRA_KEYS_BYTES} bytes each")
    return Annotation(
        token_ids=array("i", message.token_ids),
        extra_keys=list(message.extra_keys),
        lora_id=message.lora_id,
        lora_name=message.lora_name,
        session_label=message.session_label,
    )
