"""Prefix hashing against the obvious implementation, pinned digests, recorded rows, and the faults of others."""

import hashlib
import io
import json
import pickle
import random
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import cbor2
import numpy
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhold_client import bulk_tokens
from kvhold_client.hash_keys import Adapter, ExtraContent, MediaItem, PromptEmbeddings
from kvhold_client.hashing import ALGORITHMS, PrefixHasher, coarser, event_hash, group_key, none_hash
from tests.conformance import run
from tests.conformance.hashes import check
from tests.conformance.report import Report

FIXTURE = Path(__file__).parent / "hashes.jsonl"
PARENT = bytes(range(32))


def obvious(algorithm: str, value: object) -> bytes:
    """The digest as one would write it down: a library's encoding, then a library's hash."""
    encoded = cbor2.dumps(value, canonical=True) if algorithm.endswith("_cbor") else pickle.dumps(value, protocol=5)
    return hashlib.sha256(encoded).digest() if algorithm.startswith("sha256") else xxhash.xxh3_128_digest(encoded)


def obvious_chain(algorithm: str, parent: bytes, tokens: list[int], size: int) -> list[bytes]:
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = obvious(algorithm, (parent, tuple(tokens[start : start + size]), None))
        hashes.append(parent)
    return hashes


# Every size class of both encodings and their edges, and values that the bulk path refuses.
tokens_of_all_sizes = st.one_of(
    st.integers(0, 300), st.integers(65_000, 66_000), st.integers(2**31 - 2, 2**31 + 1), st.integers(2**32 - 2, 2**33)
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(data=st.data(), size=st.integers(1, 40), seed=st.text(max_size=300))
@settings(max_examples=40, deadline=None)
def test_any_chain_equals_the_obvious_implementation(algorithm: str, data: st.DataObject, size: int, seed: str) -> None:
    wide = data.draw(st.booleans())
    one = tokens_of_all_sizes if wide else st.integers(0, 200_000)
    tokens = data.draw(st.lists(one, max_size=8)) * data.draw(st.integers(1, 200))
    hasher = PrefixHasher(block_size_tokens=size, algorithm=algorithm, seed=seed)
    assert hasher.none_hash == obvious(algorithm, seed)
    sequence = hasher.sequence()
    cut = data.draw(st.integers(0, len(tokens)))
    new = sequence.extend(tokens[:cut]) + sequence.extend(tokens[cut:])
    assert new == sequence.hashes == obvious_chain(algorithm, hasher.none_hash, tokens, size)
    assert sequence.num_tokens == len(tokens)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_arrays_lists_and_a_machine_without_numpy_give_the_same(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random.Random(1).choices(range(150_000), k=10_000)
    hasher = PrefixHasher(block_size_tokens=16, algorithm=algorithm, seed="s")
    expected = obvious_chain(algorithm, hasher.none_hash, tokens, 16)
    ways: list[Any] = [tokens, tuple(tokens), iter(tokens), array("I", tokens), array("q", tokens)]
    ways += [numpy.array(tokens, "int32"), numpy.array(tokens, "uint64"), torch.tensor(tokens)]
    for given_as in ways:
        assert hasher.sequence().extend(given_as) == expected
    monkeypatch.setitem(sys.modules, "numpy", None)
    plain = PrefixHasher(block_size_tokens=16, algorithm=algorithm, seed="s")
    assert plain.sequence().extend(tokens) == expected


def test_token_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_tokens, "MAX_REMEMBERED_TOKENS", 10)
    maker = bulk_tokens.BodyMaker(ALGORITHMS["sha256_cbor"].encoding(), 4)
    for start in range(0, 100, 4):
        maker.bodies(list(range(start, start + 4)))
    assert len(maker._memo) <= 10


@pytest.mark.parametrize("bad", [[1.5] * 16, ["a"] * 16, numpy.zeros(512), [None] * 512])
def test_what_is_no_integer_is_refused_and_changes_nothing(bad: list[object]) -> None:
    sequence = PrefixHasher(block_size_tokens=16).sequence()
    sequence.extend(range(20))
    with pytest.raises((TypeError, ValueError)):
        sequence.extend(bad)  # type: ignore[arg-type]
    assert (sequence.num_tokens, len(sequence.hashes)) == (20, 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extra_keys_are_encoded_as_the_libraries_do(algorithm: str) -> None:
    extra = (
        ("lora", "é😀" * 100, ""),
        ("mm", "i", -3),
        ("mm", "j", 70_000),
        -1,
        2**40,
        None,
        (),
        b"x" * 300,
        "y" * 300,
    )
    hasher = PrefixHasher(block_size_tokens=16, algorithm=algorithm, seed="s")
    assert hasher.hash_block(PARENT, [1, 2, 3, 4], extra) == obvious(algorithm, (PARENT, (1, 2, 3, 4), extra))


def test_pinned_digests() -> None:
    """The bytes themselves: neither library of ours can drift unseen."""
    assert none_hash("sha256_cbor").hex().startswith("9bd96a485ad84efd")
    assert none_hash("sha256").hex().startswith("066b1e8987e02713")
    digests = {name: PrefixHasher(block_size_tokens=4, algorithm=name, seed="") for name in ALGORITHMS}
    assert digests["sha256_cbor"].hash_block(PARENT, [1, 2, 3, 4]).hex().startswith("dcdc35b50ae8bac1")
    assert digests["sha256"].hash_block(PARENT, [1, 2, 3, 4]).hex().startswith("6b1b97709d6df433")


def conform(path: Path) -> tuple[Report, str]:
    shown = io.StringIO()
    report = Report(out=shown)
    for outcome in map(check, run.rows_of(path)):
        if outcome is not None:
            report.add(outcome)
    return report, shown.getvalue()


def test_own_fixture_conforms() -> None:
    report, shown = conform(FIXTURE)
    assert report.num_passed >= 20 and not report.num_failed, shown


@pytest.mark.parametrize(
    "name", ["hashes.jsonl", "blocks/blocks_hash_vectors.jsonl", "blocks/blocks011_hash_vectors.jsonl"]
)
def test_recorded_rows_conform(shared_dir: Path, name: str) -> None:
    report, shown = conform(shared_dir / "vectors" / name)
    assert report.num_passed > 50 and not report.num_failed, shown


def test_a_wrong_digest_fails_conformance(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in FIXTURE.read_text().splitlines()]
    row = next(row for row in rows if row["type"] == "block_hashes" and row["block_hashes"])
    row["block_hashes"][-1] = "00" * 32
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps(row))
    report, shown = conform(broken)
    assert report.num_failed == 1 and report.close() == 1 and "instead of" in shown


# ---- what has gone wrong elsewhere -----------------------------------------------------------------------------------


def first_hashes(
    content: ExtraContent | None = None, *, tokens: list[int] | None = None, size: int = 16
) -> list[bytes]:
    return PrefixHasher(block_size_tokens=size).sequence(content).extend(tokens or list(range(64)))


def test_HASH_01_minus_one_and_minus_two_differ_and_no_keys_are_canonically_none() -> None:
    hasher = PrefixHasher(block_size_tokens=2)
    digests = {hasher.hash_block(None, [1, 2], extra) for extra in ((-1,), (-2,), None)}
    assert len(digests) == 3
    assert hasher.sequence(ExtraContent()).extend([1, 2]) == [hasher.hash_block(None, [1, 2], None)]


def test_HASH_02_a_digest_that_can_be_collided_has_no_public_seed() -> None:
    for algorithm in ("xxhash", "xxhash_cbor"):
        with pytest.raises(ValueError, match="secret seed"):
            PrefixHasher(block_size_tokens=16, algorithm=algorithm)


def test_HASH_03_two_processes_agree_without_being_told() -> None:
    code = "from kvhold_client.hashing import *; print(PrefixHasher(block_size_tokens=16).sequence().extend(range(64)))"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] == f"{first_hashes()}\n"


def test_HASH_04_adapters_of_one_name_loaded_from_elsewhere_share_nothing() -> None:
    first = first_hashes(ExtraContent(adapter=Adapter(name="x", path="/a", number=1)))
    second = first_hashes(ExtraContent(adapter=Adapter(name="x", path="/b", number=2)))
    assert not set(first) & set(second)
    reloaded = first_hashes(ExtraContent(adapter=Adapter(name="x", path="/a", number=7)))
    assert reloaded == first, "the order of loading is no identity"


def test_HASH_06_the_salt_of_the_first_block_separates_all_later_ones() -> None:
    sequences = [first_hashes(ExtraContent(salt=salt)) for salt in ("s1", "s2", "")]
    assert len({digest for hashes in sequences for digest in hashes}) == 12


def test_HASH_08_the_same_image_at_another_offset_does_not_match() -> None:
    tokens = [9] * 32
    at = [
        first_hashes(ExtraContent(media=[MediaItem(identifier="A", offset_tokens=offset, num_tokens=8)]), tokens=tokens)
        for offset in (4, 5)
    ]
    assert not set(at[0]) & set(at[1])


def test_HASH_09_images_that_differ_above_16_bits_do_not_collide() -> None:
    names = ("1234" * 15 + "abcd", "f" * 60 + "abcd")
    first, second = (
        first_hashes(ExtraContent(media=[MediaItem(identifier=name, offset_tokens=0, num_tokens=16)])) for name in names
    )
    assert not set(first) & set(second)


def test_HASH_10_prompts_given_as_embeddings_differ_though_their_tokens_are_zeros() -> None:
    first, second = (
        first_hashes(ExtraContent(embeddings=PromptEmbeddings(rows=rows, row_size_bytes=4)), tokens=[0] * 32)
        for rows in (bytes(128), bytes(127) + b"\x01")
    )
    assert first[0] == second[0], "the first 16 rows are alike"
    assert first[1] != second[1]


def test_HASH_11_a_coarse_block_is_named_by_its_last_fine_hash() -> None:
    fine = first_hashes(tokens=list(range(128)))
    assert list(coarser(fine, unit_tokens=16, block_size_tokens=64)) == [fine[3], fine[7]]
    assert list(coarser(fine[:5], unit_tokens=16, block_size_tokens=64)) == [fine[3]], "a tail is left out"
    with pytest.raises(ValueError, match="multiple"):
        coarser(fine, unit_tokens=16, block_size_tokens=40)


def test_EVT_09_a_64_bit_hash_with_its_top_bit_set_stays_unsigned() -> None:
    assert event_hash(bytes.fromhex("00" * 24 + "fffffffffffffffe")) == 0xFFFFFFFFFFFFFFFE


def test_groups_never_share_a_key() -> None:
    assert group_key(PARENT, 1) != group_key(PARENT, 256)
    with pytest.raises(OverflowError):
        group_key(PARENT, 2**32)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"algorithm": "md5"}, "algorithm"),
        ({"key_style": "loud"}, "key_style"),
        ({"block_size_tokens": 0}, "block_size_tokens"),
        ({"block_size_tokens": 8193}, "block_size_tokens"),
    ],
)
def test_a_hasher_names_the_option_it_refuses(options: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        PrefixHasher(**{"block_size_tokens": 16, **options})  # type: ignore[arg-type]


def test_overlapping_media_are_refused() -> None:
    items = [MediaItem(identifier=name, offset_tokens=at, num_tokens=8) for name, at in (("a", 0), ("b", 7))]
    with pytest.raises(ValueError, match="'b' overlaps 'a'"):
        ExtraContent(media=items)


def test_a_missing_xxhash_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ImportError, match=r"kvhold\[xxhash\]"):
        PrefixHasher(block_size_tokens=16, algorithm="xxhash", seed="s")


def test_hashing_a_long_prompt_costs_a_fixed_number_of_calls_per_block() -> None:
    """PERF-04: issue a call per token instead of per block, or hash again on a retry, and this fails on any machine."""
    hasher = PrefixHasher(block_size_tokens=16)
    prompt = array("I", random.Random(1).choices(range(128_000), k=1024 * 16))
    hasher.sequence().extend(prompt)  # tables are made on first use
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sequence = hasher.sequence()
    sys.setprofile(count)
    try:
        sequence.extend(prompt)
        assert sequence.extend([]) == [], "a refused prompt that is offered again has its hashes"
    finally:
        sys.setprofile(None)
    assert len(sequence.hashes) == 1024
    assert num_calls < 3.2 * 1024  # the digest's constructor, its result, and the list it goes to
