"""The contract between the simulator and a KV-cache manager: the types, and the policy that every manager carries out.

The policy is first-come-first-served continuous batching with chunked prefill, as in vLLM v1. A manager decides a whole
step at once, so that a remote one needs one or two calls, and decides it exactly as follows.

1. *Running*, in order of admission, while token budget is left: a request asks for min(num_tokens - num_computed_tokens,
   budget) tokens. While its blocks cannot be had, the last running request is preempted (its blocks are freed) and the
   request asks again; when the asker itself was the last one, this phase ends.
2. *Waiting*, in queue order, only if nothing was preempted, while token budget and sequence budget last: look up the
   prefix, then ask for min(num_tokens - hit_tokens, budget) tokens. The first refusal ends the phase.
3. After the step (the simulator does this): computed tokens advance; a request all of whose known tokens are computed gets
   one new token; after its last token it is finished and freed, in running order. Preempted requests return to the head of
   the queue with their generated tokens and nothing computed.

What must be equal for the decisions to be equal:

* One pool of blocks serves all groups. Block 0 is the null block: never handed out; it fills table entries out of window.
* A request with t computed and n granted tokens has ceil((t + n) / block_size) table entries per group. All or nothing.
* A window group needs, to compute from token t on, only blocks with tokens >= t - window + 1. When a request asks, its
  earlier blocks are freed first (deepest first), even if it is then refused.
* Full blocks of known tokens enter the prefix cache as soon as the step that fills them is granted, under (group, hash),
  and stay findable, freed or out of window, until they are drawn again. Equal blocks are not merged; a lookup finds the
  oldest surviving one.
* A hit is the longest h <= num_tokens - 1, a multiple of block_size, below which full groups have every block and window
  groups the last ceil((window - 1) / block_size) blocks (or all, if there are fewer).
* Admission needs, summed over groups, (blocks to draw + blocks hit that are free now) <= free blocks. With `whole_admission`
  (vLLM's default) the same must also hold for all known tokens, where the entries of a window group, hits included, count
  as at most ceil((window - 1 + max_num_batched_tokens) / block_size) + 1.
* On admission, all groups first take their hits out of the free list, then each group in turn draws new blocks.
* Blocks are drawn from the front of one free list (at first in order of id) and lose their cache entry then. Freeing a
  request goes group by group, each table from its end. Of the blocks without a holder left, those in the prefix cache go to
  the back of the list, in that order, and the others to the front, such that the first of them is drawn first.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Config:
    """What a manager is built from."""

    block_size: int  # tokens, the same in all groups
    num_blocks: int  # with the null block
    windows: tuple[int | None, ...]  # one entry per group: tokens, or None for full attention
    max_num_seqs: int
    max_num_batched_tokens: int  # the token budget of a step
    whole_admission: bool


class Request:
    """A request as the simulator sees it.

    A manager may bring its own type with these names, to keep state of its own. Off the clock it may do what this one does
    (count tokens, keep hashes, or keep them in another form), not what `schedule` is measured for.
    """

    __slots__ = ("_hasher", "block_hashes", "num_computed_tokens", "num_tokens", "request_id")

    def __init__(self, request_id: str, num_prompt_tokens: int, hasher: "Hasher") -> None:
        self.request_id = request_id
        self.num_tokens = num_prompt_tokens  # known tokens: prompt and generated
        self.num_computed_tokens = 0  # advanced by the simulator after each step
        self._hasher = hasher
        self.block_hashes: list[bytes] = []  # one for each complete block of known tokens
        self.block_hashes.extend(hasher(self))

    def append_output_token_ids(self, token_ids: int) -> None:
        """Adds one generated token; its value is of no interest."""
        self.num_tokens += 1
        self.block_hashes.extend(self._hasher(self))


Hasher = Callable[[Request], list[bytes]]  # hashes of the complete blocks that are missing in `block_hashes`


@dataclass(frozen=True, slots=True)
class StepInput:
    """Both queues belong to the simulator; managers only read them."""

    running: list[Request]
    waiting: deque[Request]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computes.

    Positions in `new_blocks` count through the requests that run after this step: survivors, then admitted ones.
    """

    granted: list[int]  # tokens for running[i]; none for the survivors beyond its end
    num_preempted: int  # this many of the last running requests
    admitted: list[tuple[int, int]]  # (hit tokens, granted tokens) of waiting[k]
    new_blocks: list[
        tuple[int, tuple[list[int], ...]]
    ]  # (position, ids per group): additions, or an admitted one's table


class CacheManager(Protocol):
    """`schedule` and `finish` are on the clock. A module under test offers `create(config: Config) -> CacheManager`."""

    def make_request(self, request_id: str, num_prompt_tokens: int, hasher: Hasher) -> Request:
        """Off the clock, at arrival. Builds a local object and nothing else."""

    def schedule(self, step: StepInput) -> StepOutput:
        """Decides one step by the policy above."""

    def finish(self, requests: list[Request]) -> None:
        """These requests are over. The work may be put off until the next `schedule`."""

    def close(self) -> None:
        """The replay is over and every request finished."""
