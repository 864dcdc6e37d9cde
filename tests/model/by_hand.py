"""A pool whose step is taken apart: one verb at a time, each with its own answer, as tests and recorded traces need.

    begin_step ─▶ extend, admit, free, publish, … in any order ─▶ end_step (copies, ids to zero, hand-offs)

The daemon has whole steps only; these go through the very objects that answer its columns.
"""

from kvhold_server.domain.pool_config import GroupKind, PoolConfig
from kvhold_server.pool.errors import BadCount
from kvhold_server.pool.pool import Pool
from kvhold_server.pool.turn import Turn
from kvhold_server.pool.values import Admitted, Extended, Status, StepOutput
from kvhold_server.pool.waiting import AdmitItem


class HandPool(Pool):
    """Verbs before the first step, or after all are complete, belong to the next."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__(config)
        self._outputs: dict[int, tuple[int, StepOutput]] = {}  # of each session's last step, until it is drained

    def begin_step(self, session: int, step: int, completed_step: int = 0, *, now_s: float = 0.0) -> None:
        """The same step may be begun again (it goes on); a smaller one raises StepOutOfOrder."""
        self.store.residency.now_s = now_s
        self.tenures.advance(self._alive(session), step, completed_step)

    def end_step(self, session: int) -> StepOutput:
        """Drains what was gathered since the step began. Copy ends stay held until the step is complete."""
        turn = self._hand_turn(session)
        del self._outputs[session]
        turn.output.copies.sort(key=lambda copy: copy.group)
        return turn.output

    def _hand_turn(self, session: int) -> Turn:
        turn = self._turn(self._alive(session))
        step, output = self._outputs.get(session, (0, turn.output))
        if step == turn.open_step.step:
            turn.output = output
        self._outputs[session] = turn.open_step.step, turn.output
        return turn

    def extend(
        self,
        session: int,
        sequence_id: int,
        *,
        slots_needed: int,
        processed_tokens: int,
        publish_tokens: int = 0,
        hashes: list[bytes] | None = None,
        num_lookahead_tokens: int = 0,
        computed_tokens: int | None = None,
        num_encoder_tokens: int = 0,
        reserved_blocks: int = 0,
    ) -> Extended:
        """As one item of ExtendColumns. Raises UnknownSequence, BadCount."""
        new = self.growth.extend(
            self._hand_turn(session),
            sequence_id,
            slots_needed,
            processed_tokens,
            publish_tokens,
            hashes or [],
            num_lookahead_tokens,
            processed_tokens if computed_tokens is None else computed_tokens,
            num_encoder_tokens,
            reserved_blocks,
        )
        if new is None:
            return Extended(status=Status.REFUSED, new_blocks=[])
        return Extended(status=Status.OK, new_blocks=[blocks.copy() for blocks in new])

    def admit(
        self,
        session: int,
        sequence_id: int,
        *,
        num_tokens: int,
        token_budget: int,
        num_prompt_tokens: int | None = None,
        hashes: list[bytes] | None = None,
        **item: int,
    ) -> Admitted:
        """As one item of AdmitColumns; `hashes=None` = as sent before (R19); `item`: more fields of AdmitItem.

        Raises SequenceExists, BadCount, HashesMissing, NeverFits. A changed hit is status CONFLICT.
        """
        asked = AdmitItem(
            sequence_id=sequence_id,
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens if num_prompt_tokens is None else num_prompt_tokens,
            hashes=hashes,
            **item,
        )
        return self.admission.admit(self._hand_turn(session), asked, token_budget)

    def free(
        self,
        session: int,
        sequence_id: int,
        *,
        computed_tokens: int = 0,
        hashes: list[bytes] | None = None,
        fence_own: bool = False,
    ) -> None:
        """As one item of FreeColumns. Raises UnknownSequence, BadCount."""
        self.departure.free(self._hand_turn(session), sequence_id, computed_tokens, hashes or [], fence_own=fence_own)

    def publish(
        self, session: int, sequence_id: int, *, publish_tokens: int, hashes: list[bytes] | None = None
    ) -> None:
        """Publishes a running sequence's full blocks up to `publish_tokens` (after defer_publish, or late hashes)."""
        turn = self._hand_turn(session)
        sequence = turn.owner.running(sequence_id)
        if publish_tokens < 0:
            raise BadCount("publish_tokens", publish_tokens, "must not be negative")
        if hashes:
            sequence.hashes += hashes
        if self.config.enable_caching and not sequence.is_stale:
            self.groups.publish(sequence, publish_tokens, turn)

    # ------------------------------------------------------------ what recorded traces ask besides
    def num_common_prefix_blocks(self, session: int, sequence_id: int) -> list[int]:
        """Per group: leading blocks of this sequence that all sequences of the pool share (full attention; else 0)."""
        sequence = self._alive(session).running(sequence_id)
        num_sequences = sum(len(owner.sequences) for owner in self.tenures.sessions.values())
        common = []
        for policy, table in zip(self.groups.policies, sequence.tables, strict=True):
            num = 0
            if policy.is_full and self.config.enable_caching:
                num = next((i for i, b in enumerate(table) if self.store.refs[b] != num_sequences), len(table))
            common.append(num)
        return common

    def cached_tokens_estimate(self, session: int, sequence_id: int) -> int:
        """Prefix of this sequence that could be found again if it were freed now (§13 S7)."""
        sequence = self._alive(session).running(sequence_id)
        tokens = self.store.key_tokens
        reach = [
            max((tokens[block] for block in table if self.store.key_of[block] is not None), default=0)
            for policy, table in zip(self.groups.policies, sequence.tables, strict=True)
            if policy.config.prefix_cacheable
        ]
        return min(reach, default=0)

    def block_ids_for(self, session: int, sequence_id: int, computed_tokens: int) -> list[list[int]]:
        """Per group: ids that hold the first `computed_tokens` (state and encoder groups: all)."""
        sequence = self._alive(session).running(sequence_id)
        return [
            table.copy()
            if policy.covers_encoder or policy.config.kind is GroupKind.MAMBA
            else table[: -(-computed_tokens // policy.block_tokens)]
            for policy, table in zip(self.groups.policies, sequence.tables, strict=True)
        ]
