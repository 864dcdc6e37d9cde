"""Changes one rule of the block pool at a time and checks that the tests notice.

    python tests/mutations.py              all mutations (a few minutes; each runs a quick subset of the tests)
    python tests/mutations.py NAME...      some of them

Each mutation replaces one piece of source in a copy of the server package. One that the subset survives is printed,
and the exit status is 1. The subset: random pairs of the pool and its naive model on all configurations, stories,
lookups over holes, and the recorded low-level and manager traces if they are there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
POOL = Path("server/kvhold_server/pool")


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule, broken."""

    name: str
    file: str  # below POOL
    old: str
    new: str


MUTATIONS = (
    Mutation("plain_blocks_go_to_the_back", "blocks.py", "self.free.prepend(plain)", "self.free.append(plain)"),
    Mutation("prepended_in_reverse", "free_list.py", "self._stack += reversed(blocks)", "self._stack += blocks"),
    Mutation(
        "void_entries_are_valid",
        "free_list.py",
        "        if not void:\n            return False",
        "        return False",
    ),
    Mutation("passed_runs_lose_their_order", "free_list.py", "for run in reversed(passed):", "for run in passed:"),
    Mutation(
        "passed_runs_keep_voids",
        "free_list.py",
        "if not run.is_plain and not self._stale",
        "if False and not self._stale",
    ),
    Mutation(
        "table_freed_head_first", "departure.py", "            table.reverse()\n            turn", "            turn"
    ),
    Mutation(
        "last_token_may_hit",
        "lookup.py",
        "return num_tokens - 1 if max_hit_tokens < 0",
        "return num_tokens if max_hit_tokens < 0",
    ),
    Mutation("evictable_hits_are_free", "kinds/base.py", "return new + evictable + (", "return new + ("),
    Mutation("watermark_ignored", "admission.py", "if need + item.watermark_blocks > available", "if need > available"),
    Mutation("gate_ignored", "admission.py", "if item.full_sequence_must_fit:", "if False:"),
    Mutation("gate_without_caps", "admission.py", "whole, whole, capped=True)", "whole, whole, capped=False)"),
    Mutation("reserved_ignored", "admission.py", "> available - item.reserved_blocks", "> available"),
    Mutation(
        "partial_hit_needs_no_block", "kinds/base.py", "(hit_tokens % self.block_tokens != 0 and bool(hits))", "0"
    ),
    Mutation("tail_is_not_copied", "kinds/base.py", "sequence.tails[self.gid] = len(table) - 1", "pass"),
    Mutation(
        "copy_target_is_not_held", "kinds/base.py", "self.store.refs[target] += 1  # the copy", "pass  # the copy"
    ),
    Mutation(
        "window_off_by_one",
        "kinds/sliding_window.py",
        "return cdiv(self.config.window_tokens - 1,",
        "return cdiv(self.config.window_tokens,",
    ),
    Mutation(
        "window_freed_too_early",
        "kinds/sliding_window.py",
        "last = (processed - config.window_tokens + 1",
        "last = (processed - config.window_tokens + 5",
    ),
    Mutation("retained_tokens_ignored", "kinds/sliding_window.py", "+ 1 - config.extra_retained_tokens)", "+ 1)"),
    Mutation(
        "eagle_window_needs_no_more",
        "kinds/sliding_window.py",
        "needed = self.needed_blocks + drop",
        "needed = self.needed_blocks",
    ),
    Mutation("window_ends_anywhere", "kinds/sliding_window.py", "if not run and size != align and", "if False and"),
    Mutation(
        "masks_keep_everything",
        "kinds/sliding_window.py",
        "        if segment:\n",
        "        return None\n        if segment:\n",
    ),
    Mutation(
        "no_unit_below_the_end",
        "kinds/sliding_window.py",
        "range(self.pool.num_retained_boundary_units + 1)",
        "range(1)",
    ),
    Mutation(
        "chunk_hits_without_proof",
        "kinds/chunked_local.py",
        "if not self.needs_proof or not length",
        "if True or not length",
    ),
    Mutation("full_drops_nothing", "kinds/full.py", "        if drop and tokens:", "        if False:"),
    Mutation("prompt_end_not_published", "kinds/full.py", "if 0 < end <= tokens and", "if False and"),
    Mutation("rswa_frees_the_prompt", "kinds/full.py", "start = cdiv(prompt, size)", "start = 0"),
    Mutation(
        "promotion_keeps_old_hash",
        "kinds/base.py",
        "prefixes.drop(block)  # it ended inside",
        "pass  # it ended inside",
    ),
    Mutation("full_looked_up_again", "groups.py", "if policy.is_full and i in answers:", "if False:"),
    Mutation("verified_for_ever", "groups.py", "verified.clear()  # the others", "pass  # the others"),
    Mutation("no_look_further", "groups.py", "limit = min(current + each.margin, max_tokens)", "limit = current"),
    Mutation("junction_always", "groups.py", "longest if longest > hit else 0", "longest"),
    Mutation("base_not_aligned", "groups.py", "tokens if self.is_fine else tokens // block * block", "tokens"),
    Mutation("eagle_publishes_to_base", "groups.py", "if not policy.is_eagle:", "if True:"),
    Mutation(
        "duplicates_replace",
        "prefix_index.py",
        "copies.setdefault(key, [first]).append(block)\n                    num_duplicates",
        "index[key] = block\n                    num_duplicates",
    ),
    Mutation(
        "eviction_keeps_the_index", "prefix_index.py", "            del self.index[group][key]\n", "            pass\n"
    ),
    Mutation(
        "provisional_seen_by_all",
        "prefix_index.py",
        "return origin.is_public or origin.session == session\n\n",
        "return True\n\n",
    ),
    Mutation(
        "public_too_early",
        "tenure.py",
        "while steps and steps[0].step <= completed_step:",
        "while steps and steps[0].step <= completed_step + 1:",
    ),
    Mutation(
        "fences_ignored",
        "fences.py",
        "return len(owners) > 1 or (len(owners) == 1 and session not in owners)",
        "return False",
    ),
    Mutation(
        "own_fences_ignored",
        "open_step.py",
        "frozenset((own_fence_owner(self.session),))",
        "frozenset((self.session,))",
    ),
    Mutation("second_fence_replaces_first", "fences.py", "simple = old is None or", "simple = True or old is None or"),
    Mutation(
        "shared_fences_count_as_sole",
        "fences.py",
        "if len(owners) == 1:\n            (owner,) = owners\n            self._sole",
        "if owners:\n            owner = min(owners)\n            self._sole",
    ),
    Mutation(
        "dead_sessions_free_at_once",
        "tenure.py",
        "store.quarantine.enter(table[i : i + _SLICE_BLOCKS])",
        "store.let_go(table[i : i + _SLICE_BLOCKS], None)",
    ),
    Mutation("hit_blocks_stay_quarantined", "blocks.py", "self.quarantine.revive(blocks)", "pass"),
    Mutation("the_dead_share_a_reference", "quarantine.py", "dead_refs[block] += 1", "dead_refs[block] = 1"),
    Mutation(
        "dead_hashes_survive",
        "tenure.py",
        "if store.origin_of[block] is origin:\n                                store.drop_keys",
        "if False:\n                                store.drop_keys",
    ),
    Mutation("a_further_part_hits_states", "turn.py", "self.gained = self.open_step.gained", "self.gained = set()"),
    Mutation(
        "a_refusal_outlives_frees", "admission.py", "self.store.version + self.store.prefixes", "self.store.prefixes"
    ),
    Mutation(
        "a_refusal_outlives_hashes",
        "admission.py",
        "self.store.version + self.store.prefixes.version",
        "self.store.version",
    ),
    Mutation("state_of_this_step_hits", "admission.py", "if turn.gained and any(", "if False and any("),
    Mutation("drafts_blocks_stay", "kinds/mamba.py", "if states.is_allocated and not has_checkpoint:", "if False:"),
    Mutation("tail_state_not_preserved", "kinds/mamba.py", "states.pending = (entry, tokens)", "pass"),
    Mutation(
        "checkpoint_not_renamed",
        "kinds/mamba.py",
        "publish_partial(self, sequence, block, boundary, turn, replace=True)",
        "pass",
    ),
    Mutation("a_prompts_end_is_named_late", "kinds/mamba.py", "if tokens != states.end:", "if False:"),
    Mutation("untold_states_are_named", "kinds/mamba.py", "if block and i in states.untold:", "if False:"),
    Mutation(
        "checkpoint_named_by_its_place",
        "kinds/mamba.py",
        "if boundary != (entry + 1) * self.block_tokens:",
        "if boundary % self.block_tokens:",
    ),
    Mutation(
        "states_offered_before_a_refusal",
        "kinds/mamba.py",
        "states.checkpoint, states.start, states.end = states.planned, computed, main",
        "states.checkpoint, states.end = None, main",
    ),
    Mutation("stale_sequences_publish", "tenure.py", "sequence.is_stale = True", "sequence.is_stale = False"),
    Mutation(
        "low_blocks_are_handed_out", "blocks.py", "FreeList(1 + num_reserved, num_blocks)", "FreeList(1, num_blocks)"
    ),
    Mutation("copy_ends_lose_their_fence", "blocks.py", "if self.has_copies and step is not None", "if False"),
    Mutation("a_step_cannot_complete_itself", "pool.py", "if completed_step == step:", "if False:"),
    Mutation(
        "a_further_part_is_another_step",
        "pool.py",
        "if step == owner.step and not owner.open_steps:",
        "if False:",
    ),
    Mutation(
        "refused_hashes_are_kept",
        "growth.py",
        "                del sequence.hashes[-len(hashes) :]",
        "                pass",
    ),
    Mutation("together_beyond_the_pool", "together.py", "if total > store.available(turn.session):", "if False:"),
    Mutation(
        "together_publishes_stale_text", "together.py", "if end <= start or sequence.is_stale:", "if end <= start:"
    ),
    Mutation("together_publishes_twice", "together.py", "        sequence.offered[0] = end\n", ""),
    Mutation(
        "a_second_session_leaves_the_allotment",
        "pool.py",
        "        for owner in self.tenures.sessions.values():\n            self.allotments.set_aside(owner)\n",
        "",
    ),
    Mutation(
        "what_a_dead_session_drew_is_not_quarantined",
        "tenure.py",
        "        store.quarantine.enter(owner.set_aside)\n",
        "",
    ),
    Mutation("drawn_blocks_are_not_counted", "allotment.py", "num_allotted and num_blocks != num_drawn", "False"),
    Mutation(
        "undrawn_blocks_of_a_former_client_at_once",
        "allotment.py",
        "turn.let_go(rest, fence_own=True)",
        "turn.let_go(rest)",
    ),
    Mutation(
        "allotted_blocks_outlast_the_next_step",
        "allotment.py",
        "        owner.allotted = []\n        if self",
        "        if self",
    ),
)

TESTS = """
import random, sys
from pathlib import Path
from tests.model.pair import CONFIGS, Pair
for run in range(3):
    for name in CONFIGS:
        rng = random.Random(f"{name}/{run}")
        pair = Pair(CONFIGS[name], check_every=4, tells_stored=run != 1)
        for _ in range(160):
            pair.random_operation(rng)
        pair.drain()
    if run == 0:
        import pytest
        NAMES = "allotment field_reports free_list lookups prefix_index quarantine refusals sessions_share_a_pool"
        QUICK = [f"tests/pool/test_{name}.py" for name in NAMES.split()]
        if pytest.main(["-q", "-x", "-p", "no:cacheprovider", *QUICK]):
            sys.exit(1)
        vectors = Path("shared-vectors")
        if vectors.is_dir():
            from tests.conformance.blocks_core import CoreDriver, check_file
            for path in sorted(vectors.glob("blocks_*.jsonl")):
                if not any(word in path.name for word in ("mooncake", "hash_vectors", "long")):
                    if any(outcome.differences for outcome in check_file(path, CoreDriver())):
                        sys.exit(1)
"""


def survives(mutation: Mutation, tree: Path) -> bool:
    """Breaks the rule in `tree`, runs the subset, mends it again."""
    path = tree / POOL / mutation.file
    source = path.read_text()
    if mutation.old not in source:
        raise SystemExit(f"{mutation.name}: its source is not in {mutation.file} any more")
    path.write_text(source.replace(mutation.old, mutation.new, 1))
    try:
        return passes(tree)
    finally:
        path.write_text(source)


def passes(tree: Path) -> bool:
    """Does the subset pass in this tree?"""
    environment = os.environ | {
        "PYTHONPATH": f"{tree}:{tree / 'server'}:{tree / 'client'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", TESTS], cwd=tree, env=environment, capture_output=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def copy_tree(into: Path) -> None:
    for name in ("server", "client", "tests"):
        shutil.copytree(REPO / name, into / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    vectors = REPO.parent / "shared" / "vectors" / "blocks"
    if vectors.is_dir():
        (into / "shared-vectors").symlink_to(vectors)


def main(names: list[str]) -> int:
    wanted = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if not passes(tree):
            raise SystemExit("the tests fail without any mutation")
        survivors = []
        for mutation in wanted:
            alive = survives(mutation, tree)
            print(f"{'SURVIVED' if alive else 'caught  '} {mutation.name}", flush=True)
            survivors += [mutation.name] * alive
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} mutations caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
