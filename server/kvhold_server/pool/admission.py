"""Admitting a waiting sequence: look up, count, then either take everything or change nothing (§12).

1 hit        longest prefix that this session may see, at most num_tokens - 1 (the last token yields the logits)
2 grant      min(what is left to compute, the item's cap, the budget), rounded down to its alignment
3 gate       optional: would the whole sequence fit?
4 count      new blocks + hits that are free now (they are about to leave the free list) + watermark <= free - reserved?
5 apply      all groups hold their hits; then all take blocks for external tokens; then each draws its new blocks.
             In this order, because a group's new blocks may be what another group hit.
6 publish    full blocks, under their hashes, provisional
"""

from __future__ import annotations

from kvhold_server.domain.errors import KvholdError
from kvhold_server.domain.pool_config import PoolConfig
from kvhold_server.pool.attribution import Attribution
from kvhold_server.pool.blocks import BlockStore
from kvhold_server.pool.errors import BadCount, NeverFits
from kvhold_server.pool.groups import Groups, HitResult
from kvhold_server.pool.lookup import hit_limit
from kvhold_server.pool.sequence import Sequence
from kvhold_server.pool.session import PoolSession
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import Admitted, Bound, Status, StepInput
from kvhold_server.pool.waiting import AdmitItem, Refusal, admit_items


class Admission:
    """Step 1 to 6 for one pool."""

    def __init__(self, config: PoolConfig, store: BlockStore, groups: Groups) -> None:
        self.config = config
        self.store = store
        self.groups = groups
        self.attribution = Attribution(store, groups)
        self._num_groups = len(groups.policies)

    def admit_all(self, turn: Turn, items: StepInput, *, may_admit: bool) -> None:
        """Answers all rows in the turn's output: in order, out of one budget, up to the first that is not admitted."""
        output = turn.output
        no_counts = [0] * self._num_groups
        budget, num_admitted = items.token_budget, 0
        for i, item in enumerate(admit_items(items)):
            answer: Admitted | None = None
            status = Status.NOT_TRIED
            if may_admit and budget > 0 and num_admitted < items.max_admissions:
                try:
                    answer = self.admit(turn, item, budget)
                    status = answer.status
                except KvholdError as error:
                    output.errors["admit", i] = error
                    status = Status.ERROR
            elif item.hashes is not None:
                self._hear_of(turn.owner, item.sequence_id, item.hashes)
            output.admit_status.append(status)
            is_spent = may_admit and budget <= 0
            output.admit_bound.append(answer.bound if answer else Bound.BUDGET if is_spent else Bound.NONE)
            output.admit_hit_tokens.append(answer.hit_tokens if answer else 0)
            output.admit_own_hit_tokens.append(answer.own_hit_tokens if answer else 0)
            output.admit_new_tokens.append(answer.new_tokens if answer else 0)
            output.admit_boundary_tokens.append(answer.boundary_tokens if answer else 0)
            if answer is not None and status is Status.OK:
                budget -= answer.new_tokens + item.budget_overhead
                num_admitted += 1
                output.admit_counts += map(len, answer.tables)
                output.admit_hit_counts += answer.hit_counts
                for table in answer.tables:
                    output.admit_blocks += table
            else:
                output.admit_counts += no_counts
                output.admit_hit_counts += no_counts
                may_admit = False

    def _hear_of(self, owner: PoolSession, sequence_id: int, hashes: list[bytes]) -> None:
        """A sequence that is not tried is asked for again later, by its id."""
        if sequence_id not in owner.sequences:
            sequence = owner.waiting(sequence_id, hashes, self._num_groups)
            owner.remember(sequence, self.config.max_remembered_refusals)

    def admit(self, turn: Turn, item: AdmitItem, token_budget: int) -> Admitted:
        """All or nothing. Raises SequenceExists, BadCount, HashesMissing, NeverFits."""
        owner = turn.owner
        sequence = owner.waiting(item.sequence_id, item.hashes, self._num_groups)
        refusal = sequence.refusal
        if refusal is not None and refusal.holds(self._version, item):
            return refusal.answer  # nothing has changed since it was refused
        self._check(item, sequence)
        sequence.num_prompt_tokens, sequence.num_tokens = item.num_prompt_tokens, item.num_tokens
        hit = self._look_up(turn, item, sequence)
        sequence.boundary_tokens = hit.boundary_tokens
        if item.expect_hit_tokens not in (-1, hit.tokens):
            return self._refuse(owner, sequence, hit, Bound.HIT_CHANGED, Status.CONFLICT)
        new, bound = self._grant(item, hit.tokens, token_budget)
        if new <= 0 and not hit.tokens and not item.num_external_tokens:
            return self._refuse(owner, sequence, hit, bound, Status.NOT_TRIED)
        if new <= 0 and bound is Bound.BUDGET:
            return self._refuse(owner, sequence, hit, bound, Status.NOT_TRIED)
        total = min(hit.tokens + item.num_external_tokens, self.config.max_model_len)
        main = total + new
        slots = min(main + item.num_lookahead_tokens, self.config.max_model_len)
        hindrance = self._what_hinders(turn, item, sequence, hit, total, slots, main)
        if hindrance is not Bound.NONE:
            self._check_can_ever_fit(item)
            answer = self._refuse(owner, sequence, hit, hindrance, Status.REFUSED)
            if hindrance is not Bound.STATE_NOT_WRITTEN and token_budget >= item.num_tokens + item.budget_overhead:
                sequence.refusal = Refusal(self._version, item, answer)
            return answer
        return self._apply(turn, item, sequence, hit, total, slots, main, new, bound)

    @property
    def _version(self) -> int:
        """Stays the same only while nothing changes that could change an answer: both parts only grow."""
        return self.store.version + self.store.prefixes.version

    def _check(self, item: AdmitItem, sequence: Sequence) -> None:
        """Raises BadCount, naming the first count that is out of range."""
        num_units = item.num_tokens // self.config.hash_unit_tokens
        smallest = min(
            item.num_tokens - 1,
            item.num_prompt_tokens - 1,
            item.budget_overhead,
            item.num_lookahead_tokens,
            item.num_external_tokens,
            item.num_encoder_tokens,
            item.watermark_blocks,
            item.reserved_blocks,
            item.alignment - 1,
        )
        if smallest >= 0 and item.num_external_tokens <= item.num_tokens and len(sequence.hashes) <= num_units:
            return
        for name in ("num_tokens", "num_prompt_tokens"):
            value = getattr(item, name)
            if not 1 <= value <= 2**31 - 1:
                raise BadCount(name, value, "must be 1..2147483647")
        for name in (
            "budget_overhead",
            "num_lookahead_tokens",
            "num_encoder_tokens",
            "watermark_blocks",
            "reserved_blocks",
        ):
            value = getattr(item, name)
            if not 0 <= value <= 2**31 - 1:
                raise BadCount(name, value, "must be 0..2147483647")
        if item.alignment < 1:
            raise BadCount("alignment", item.alignment, "must be at least 1")
        if not 0 <= item.num_external_tokens <= item.num_tokens:
            raise BadCount("num_external_tokens", item.num_external_tokens, f"must be 0..num_tokens, {item.num_tokens}")
        if len(sequence.hashes) > num_units:
            raise BadCount(
                "hash_counts", len(sequence.hashes), f"{item.num_tokens} tokens have {num_units} whole units"
            )

    def _look_up(self, turn: Turn, item: AdmitItem, sequence: Sequence) -> HitResult:
        if not self.config.enable_caching or item.skip_lookup:
            return HitResult(0, [[] for _ in self.groups.policies])
        return self.groups.lookup(sequence, turn.session, hit_limit(item.num_tokens, item.max_hit_tokens))

    def _grant(self, item: AdmitItem, hit_tokens: int, token_budget: int) -> tuple[int, Bound]:
        """Tokens to compute now, and what keeps it from being more."""
        start = hit_tokens + item.num_external_tokens
        new, bound = item.num_tokens - start, Bound.NONE
        if self.config.max_model_len - start < new:
            new, bound = self.config.max_model_len - start, Bound.MAX_NEW
        if 0 <= item.max_new_tokens < new:
            new, bound = item.max_new_tokens, Bound.MAX_NEW
        if token_budget - item.budget_overhead < new:
            new, bound = token_budget - item.budget_overhead, Bound.BUDGET
        if bound is not Bound.NONE and item.alignment > 1 and (start + new) % item.alignment:
            new = (start + new) // item.alignment * item.alignment - start
            bound = Bound.ALIGNMENT if new > 0 else bound
        return max(new, 0), bound

    def _what_hinders(
        self, turn: Turn, item: AdmitItem, sequence: Sequence, hit: HitResult, total: int, slots: int, main: int
    ) -> Bound:
        available = self.store.available(turn.session)
        if item.full_sequence_must_fit:
            whole = min(item.num_tokens, self.config.max_model_len)
            if self._need(item, sequence, hit, total, whole, whole, capped=True) + item.watermark_blocks > available:
                return Bound.FULL_SEQUENCE
        if turn.gained and any(row and row[-1] in turn.gained for row in hit.blocks):
            return Bound.STATE_NOT_WRITTEN
        need = self._need(item, sequence, hit, total, slots, main, capped=False)
        if need + item.watermark_blocks > available - item.reserved_blocks:
            return Bound.BLOCKS
        return Bound.NONE

    def _need(
        self, item: AdmitItem, sequence: Sequence, hit: HitResult, total: int, slots: int, main: int, *, capped: bool
    ) -> int:
        need = 0
        for policy, row in zip(self.groups.policies, hit.blocks, strict=True):
            if policy.covers_encoder:
                need += policy.need_admission(sequence, row, 0, 0, item.num_encoder_tokens, 0, capped)
            else:
                need += policy.need_admission(sequence, row, hit.tokens, total, slots, main, capped)
        return need

    def _check_can_ever_fit(self, item: AdmitItem) -> None:
        whole = min(item.num_tokens, self.config.max_model_len)
        nothing = HitResult(0, [[] for _ in self.groups.policies])
        needed = self._need(item, Sequence(0, len(nothing.blocks)), nothing, 0, whole, whole, capped=True)
        if needed > self.store.num_usable:
            raise NeverFits(item.sequence_id, needed, self.store.num_usable)

    def _refuse(self, owner: PoolSession, sequence: Sequence, hit: HitResult, bound: Bound, status: Status) -> Admitted:
        owner.remember(sequence, self.config.max_remembered_refusals)
        return Admitted(status=status, bound=bound, hit_tokens=hit.tokens, boundary_tokens=hit.boundary_tokens)

    def _apply(
        self,
        turn: Turn,
        item: AdmitItem,
        sequence: Sequence,
        hit: HitResult,
        total: int,
        slots: int,
        main: int,
        new: int,
        bound: Bound,
    ) -> Admitted:
        owner = turn.owner
        own_tokens = self.attribution.record(owner, item, sequence, hit)
        owner.refused.pop(item.sequence_id, None)
        owner.sequences[item.sequence_id] = sequence
        policies = self.groups.policies
        if item.num_external_tokens or any(hit.blocks):
            for policy, row in zip(policies, hit.blocks, strict=True):
                policy.adopt(sequence, row, hit.tokens, total)
            if item.num_external_tokens:
                for policy in policies:
                    policy.take_external(sequence, total, turn)
        hit_counts = [len(row) for row in hit.blocks]
        new_blocks = [
            policy.grow(sequence, item.num_encoder_tokens if policy.covers_encoder else slots, main, total, turn)
            for policy in policies
        ]
        if self.config.enable_caching and not item.defer_publish:
            self.groups.publish(sequence, min(main, item.num_tokens), turn)
        return Admitted(
            status=Status.OK,
            bound=bound,
            hit_tokens=hit.tokens,
            own_hit_tokens=own_tokens,
            new_tokens=new,
            boundary_tokens=hit.boundary_tokens,
            tables=[table.copy() for table in sequence.tables],
            hit_counts=hit_counts,
            new_blocks=new_blocks,
        )
