"""Checks our hashers against recorded rows of both hash formats: those with a `type` and those with an `op`.

An expected `error` means that ours must refuse, too; which exception is ours to choose.
"""

import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kvhold_client.hash_encodings import CborEncoding, ExtraKey, PickleEncoding
from kvhold_client.hash_keys import Adapter, ExtraContent, MediaItem, PromptEmbeddings
from kvhold_client.hashing import PrefixHasher, SequenceHasher, coarser, event_hash, group_key, none_hash
from tests.conformance.block_sizes import POINTLESS_UNIT, check_resolve_block_sizes, deviates
from tests.conformance.report import Outcome

Row = dict[str, Any]
STYLES = {"vllm_0.11.0.post2": "numbered", "0.11.0.post2": "numbered", "fork_0.30_0.31": "named"}  # others: tagged
RAW_NEGATIVE_INDEX = "the original's view answers a negative index from the finer list; ours counts its own blocks"
NO_DEFAULT_SEED = "where the original draws a random seed per process, ours asks for one"
SKIPPED_MEDIA = "0.11 forgets media before the last item when hashing resumes, so that other images hit; ours do not"
TAGS = ("lora", "mm", "cache_salt", "prompt_embeds")  # constants of the original's code: one object each
REFUSALS = (ValueError, OverflowError, IndexError, TypeError)


def fresh(text: str) -> str:
    """An equal string that is no object seen before."""
    return text.encode().decode()


def key_of(value: Any, *, same: dict[str, str]) -> ExtraKey:
    """A recorded key as values. Texts in `same` are one object wherever they occur, others never."""
    match value:
        case {"hex": text} | {"b": text}:
            return bytes.fromhex(text)
        case {"t": items}:
            return tuple(key_of(item, same=same) for item in items)
        case list():
            return tuple(key_of(item, same=same) for item in value)
        case str():
            return same.get(value) or fresh(value)
    assert value is None or isinstance(value, int)
    return value


def strings_in(value: Any) -> dict[str, str]:
    """Every text in a recorded key, as one object each."""
    if isinstance(value, str):
        return {value: value}
    items = value if isinstance(value, list) else value.get("t", ()) if isinstance(value, dict) else ()
    return {text: text for item in items for text in strings_in(item)}


def extra_of(value: Any, *, shared: bool = False) -> tuple[ExtraKey, ...] | None:
    key = key_of(value, same=strings_in(value) if shared else dict(zip(TAGS, TAGS, strict=True)))
    assert key is None or isinstance(key, tuple)
    return key


def compare(what: str, ours: Any, recorded: Any) -> Iterator[str]:
    if ours == recorded:
        return
    if isinstance(ours, list) and isinstance(recorded, list) and len(ours) == len(recorded):
        place = next(place for place, pair in enumerate(zip(ours, recorded, strict=True)) if pair[0] != pair[1])
        what, ours, recorded = f"{what}[{place}]", ours[place], recorded[place]
    yield f"{what}: {ours!r} instead of {recorded!r}"


def hashes_of(ours: list[bytes]) -> list[str]:
    return [digest.hex() for digest in ours]


def refused(row: Row, attempt: Callable[[], object]) -> Iterator[str]:
    """The row expects an error: ours must raise one, too."""
    try:
        result = attempt()
    except REFUSALS:
        return
    yield f"{result!r} instead of a refusal like {row['error']['type']}"


# ---- rows with a `type` --------------------------------------------------------------------------------------------


def content_of(given: Row) -> ExtraContent:
    """The input of a row. Equal texts are one object, as they were where the rows were recorded."""
    lora, embeds = given.get("lora"), given.get("prompt_embeds")
    media = [
        MediaItem(identifier=sys.intern(item["identifier"]), offset_tokens=item["offset"], num_tokens=item["length"])
        for item in given.get("mm") or ()
    ]
    embeddings = None
    if embeds:
        formats = {"float32": ("f", 4), "float64": ("d", 8), "float16": ("e", 2)}
        code, size = formats[embeds["dtype"]]
        rows = struct.pack(f"<{len(embeds['data'])}{code}", *embeds["data"])
        embeddings = PromptEmbeddings(rows=rows, row_size_bytes=size * embeds["shape"][1])
    return ExtraContent(
        adapter=Adapter(name=sys.intern(lora["name"]), path=sys.intern(lora["path"]), number=lora["int_id"])
        if lora
        else None,
        media=media,
        salt=sys.intern(given.get("cache_salt") or ""),
        embeddings=embeddings,
    )


def fed(sequence: SequenceHasher, tokens: list[int], ends: list[int]) -> SequenceHasher:
    """The sequence after `tokens` in pieces that end at `ends`."""
    start = 0
    for end in [*ends, len(tokens)]:
        sequence.extend(tokens[start:end])
        start = end
    return sequence


def check_chain(sequence: SequenceHasher, recorded: list[str], extra_keys: list[Any] | None) -> Iterator[str]:
    yield from compare("block hashes", hashes_of(sequence.hashes), recorded)
    for index, expected in enumerate(extra_keys or [None] * len(recorded)):
        yield from compare(f"extra keys of block {index}", sequence.extra_keys(index), extra_of(expected))


def forgets_media(row: Row) -> bool:
    """Whether the original resumed hashing before it had passed all media of a request of 0.11."""
    media, resumed = row["input"].get("mm"), row["input"].get("chunks")
    return bool(media and resumed and row["oracle"].startswith("vllm_0.11"))


def check_recorded_keys(row: Row, hasher: PrefixHasher) -> Iterator[str]:
    """The digests, with the extra keys that were recorded instead of our own."""
    size, tokens = row["input"]["block_size"], row["input"]["token_ids"]
    extra = {index: key for index, keys in enumerate(row["extra_keys"]) if (key := extra_of(keys)) is not None}
    ours = hasher.hash_blocks(hasher.none_hash, tokens[: len(row["block_hashes"]) * size], extra)
    yield from compare("block hashes", hashes_of(ours), row["block_hashes"])


def check_block_hashes(row: Row) -> Iterator[str]:
    given = row["input"]
    hasher = PrefixHasher(
        block_size_tokens=given["block_size"],
        algorithm=row["algorithm"],
        seed=row["pythonhashseed"],
        key_style=STYLES.get(row["oracle"], "tagged"),
    )
    yield from compare("none hash", hasher.none_hash.hex(), row["none_hash"])
    if forgets_media(row):
        yield from check_recorded_keys(row, hasher)
        return
    sequence = fed(hasher.sequence(content_of(given)), given["token_ids"], given.get("chunks") or [])
    yield from check_chain(sequence, row["block_hashes"], row["extra_keys"])


def check_hash_block_tokens(row: Row) -> Iterator[str]:
    tokens = row["token_ids"]
    hasher = PrefixHasher(block_size_tokens=16, algorithm=row["algorithm"], seed=row["pythonhashseed"])
    parent = None if row["parent"] is None else bytes.fromhex(row["parent"])
    extra = extra_of(row["extra_keys"], shared=row["id"] == "extra_identical_string_object")
    yield from compare("hash", hasher.hash_block(parent, tokens, extra).hex(), row["hash"])


def check_none_hash(row: Row) -> Iterator[str]:
    if row["none_hash"] is not None:
        yield from compare("none hash", none_hash(row["algorithm"], row["pythonhashseed"]).hex(), row["none_hash"])


def check_group_key(row: Row) -> Iterator[str]:
    block_hash = bytes.fromhex(row["block_hash"])
    if "error" in row:
        yield from refused(row, lambda: group_key(block_hash, row["group_id"]))
    else:
        yield from compare("key", group_key(block_hash, row["group_id"]).hex(), row["key"])


def check_external_int_hash(row: Row) -> Iterator[str]:
    yield from compare("integer", str(event_hash(bytes.fromhex(row["block_hash"]))), row["value"])


def check_block_hash_view(row: Row) -> Iterator[str]:
    fine = [bytes.fromhex(digest) for digest in row["block_hashes"]]
    sizes = {"unit_tokens": row["hash_block_size"], "block_size_tokens": row["target_block_size"]}
    if "error" in row:
        yield from refused(row, lambda: coarser(fine, **sizes))
        return
    view = coarser(fine, **sizes)
    yield from compare("length", len(view), row["length"])
    yield from compare("items", hashes_of(list(view)), row["items"])
    yield from compare("[1:]", hashes_of(list(view[1:])), row["slice_1_"])
    yield from compare("[:-1]", hashes_of(list(view[:-1])), row["slice__m1"])
    for text, expected in row["index"].items():
        index = int(text)
        if index < 0:
            continue  # RAW_NEGATIVE_INDEX
        if isinstance(expected, dict):
            yield from refused({"error": {"type": expected["error"]}}, lambda: view[index])  # noqa: B023
        else:
            yield from compare(f"[{index}]", view[index].hex(), expected)


def check_resolve_block_hashes(row: Row) -> Iterator[str]:
    """A lookup that can end inside a block compares unit by unit, if hits need only be aligned to the unit."""
    fine = [bytes.fromhex(digest) for digest in row["block_hashes"]]
    unit, block = row["hash_block_size"], row["block_size"]
    sees_units = row["supports_fine_grained_hash_lookup"] and row["alignment_tokens"] == unit
    if "error" in row:
        yield from refused(row, lambda: coarser(fine, unit_tokens=unit, block_size_tokens=block))
        return
    ours = coarser(fine, unit_tokens=unit, block_size_tokens=unit if sees_units else block)
    yield from compare("as it was", ours is fine, row["is_raw"])
    yield from compare("items", hashes_of(list(ours)), row["items"])


# ---- rows with an `op` ---------------------------------------------------------------------------------------------


def tokens_of(segments: list[list[int]]) -> list[int]:
    """Tokens from their short form: [seed, start, count] each."""
    return [
        (seed * 7919 + place * 104729 + 17) % 50021
        for seed, start, count in segments
        for place in range(start, start + count)
    ]


def check_op_hash(row: Row) -> Iterator[str]:
    parent, extra, tokens = bytes.fromhex(row["parent"]), extra_of(row["extra"]), row["tokens"]
    hasher = PrefixHasher(block_size_tokens=16, algorithm=row["algo"], seed="any")
    yield from compare("hash", hasher.hash_block(parent, tokens, extra).hex(), row["out"])


def check_op_none_hash(row: Row) -> Iterator[str]:
    encoding = CborEncoding() if row["algo"].endswith("_cbor") else PickleEncoding()
    if "bytes" in row:
        yield from compare("bytes", encoding.text(row["seed"]).hex(), row["bytes"])
    yield from compare("none hash", none_hash(row["algo"], row["seed"]).hex(), row["out"])


def check_op_chain(row: Row) -> Iterator[str]:
    styles = {"0.11.0.post2": "numbered"}
    lora = row.get("lora")
    media = [
        MediaItem(identifier=name, offset_tokens=offset, num_tokens=count) for name, offset, count in row.get("mm", ())
    ]
    content = ExtraContent(
        adapter=Adapter(name=lora[0], number=lora[1], path=lora[2]) if lora else None,
        media=media,
        salt=row.get("salt", ""),
    )
    seeds = [seed for seed in (None, "0") if none_hash(row["algo"], seed or "vllm-none-hash").hex() == row["none_hash"]]
    if not seeds:
        yield f"no seed of ours gives none hash {row['none_hash']}"
        return
    style = styles.get(row["vllm"], "tagged")
    hasher = PrefixHasher(block_size_tokens=row["bs"], algorithm=row["algo"], seed=seeds[0], key_style=style)
    prompt, appended = tokens_of(row["prompt"]), tokens_of(row["append"])
    sequence = hasher.sequence(content)
    sequence.extend(prompt)
    yield from compare("hashes of the prompt", len(sequence.hashes), row["prompt_hashes"])
    for token in appended:
        sequence.extend((token,))
    yield from check_chain(sequence, row["out"], row["extra"])


def check_op_pack(row: Row) -> Iterator[str]:
    yield from compare("key", group_key(bytes.fromhex(row["hash"]), row["group"]).hex(), row["out"])


def check_op_event_int(row: Row) -> Iterator[str]:
    yield from compare("integer", event_hash(bytes.fromhex(row["hash"])), row["out"])


def check_op_regroup(row: Row) -> Iterator[str]:
    fine = [index.to_bytes(1, "big") for index in range(row["n"])]
    view = coarser(fine, unit_tokens=row["hash_bs"], block_size_tokens=row["target"])
    yield from compare("length", len(view), row["len"])
    yield from compare("items", [item[0] for item in view], row["out"])
    yield from compare("[1:]", [item[0] for item in view[1:]], row["slice_1_"])


CHECKS: dict[str, Callable[[Row], Iterator[str]]] = {
    "block_hashes": check_block_hashes,
    "hash_block_tokens": check_hash_block_tokens,
    "none_hash": check_none_hash,
    "group_key": check_group_key,
    "external_int_hash": check_external_int_hash,
    "block_hash_view": check_block_hash_view,
    "resolve_block_hashes": check_resolve_block_hashes,
    "resolve_block_sizes": check_resolve_block_sizes,
    "op hash": check_op_hash,
    "op none_hash": check_op_none_hash,
    "op none_hash_default": check_op_none_hash,
    "op chain": check_op_chain,
    "op pack": check_op_pack,
    "op event_int": check_op_event_int,
    "op regroup": check_op_regroup,
}


def deviation_of(row: Row) -> str:
    if row.get("type") == "none_hash" and row["none_hash"] is None:
        return NO_DEFAULT_SEED
    if row.get("type") == "block_hashes" and forgets_media(row):
        return SKIPPED_MEDIA
    if row.get("type") == "resolve_block_sizes" and deviates(row):
        return POINTLESS_UNIT
    indexes = row.get("index", {})
    step = row.get("target_block_size", 1) // row.get("hash_block_size", 1)
    return RAW_NEGATIVE_INDEX if step > 1 and any(int(text) < 0 for text in indexes) else ""


def check(row: Row) -> Outcome | None:
    """Outcome of one row; None for a header."""
    kind = row.get("type") or f"op {row.get('op')}"
    if kind == "header":
        return None
    name = " ".join(str(row[field]) for field in ("oracle", "id", "algorithm", "algo") if field in row)
    name = f"{kind} {name}".strip()
    if kind not in CHECKS:
        return Outcome(name=name, differences=(f"unknown kind of row: {kind}",))
    return Outcome(name=name, differences=tuple(CHECKS[kind](row)), deviation=deviation_of(row))
