"""A continuous-batching scheduler in sixty lines: prefix hits, chunked prefill, decode, preemption.

    python examples/scheduler.py            starts a daemon of its own
    KVHOLD_TARGET=… python examples/…       uses yours

It invents prompts and "computes" nothing; a real engine runs its model where the comment says so.
"""

import os
import random
from collections import deque

from kvhold_client import Client, LocalDaemon, PoolRequest, PrefixHasher, Sequence, Session, model_plan_request

BUDGET_TOKENS = 2048  # of one step
MAX_RUNNING = 8
NUM_NEW_TOKENS = 40


class Request:
    """Tokens that are known, and how many of them are computed."""

    def __init__(self, sequence: Sequence, num_tokens: int) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.num_computed = 0
        self.num_final = num_tokens + NUM_NEW_TOKENS


def run_step(session: Session, running: list[Request], waiting: deque[Request]) -> None:
    """One scheduler step: at most one RPC, unless somebody must be preempted."""
    table = session.table
    session.begin_step()  # everything before this step is complete
    budget, granted = BUDGET_TOKENS, {}
    for request in running:
        wanted = min(request.num_tokens - request.num_computed, budget)
        budget -= wanted
        granted[request] = wanted
        target = request.num_computed + wanted
        if wanted and target > request.sequence.quiet_tokens:  # one decode step in 16
            table.extend(
                request.sequence,
                slots_needed=target,
                processed_tokens=request.num_computed,
                publish_tokens=target,
            )
    if budget:
        for request in list(waiting)[: MAX_RUNNING - len(running)]:
            table.admit(request.sequence, num_tokens=request.num_tokens)
    outcome = table.flush(token_budget=budget)
    admitted = outcome.admitted
    while outcome.refused_extends:  # preempt the youngest and ask again
        victim = running.pop()
        granted.pop(victim, None)
        table.preempt(victim.sequence, computed_tokens=victim.num_computed)
        victim.num_computed = 0
        waiting.appendleft(victim)
        table.ask_again(outcome)
        outcome = table.flush()
    for admission in admitted:
        request = waiting.popleft()
        request.num_computed = admission.hit_tokens  # computing begins behind the hit
        granted[request] = admission.granted_tokens
        running.append(request)

    # The model runs here, over the block tables in `request.sequence.tables`.

    for request, num_tokens in granted.items():
        request.num_computed += num_tokens
        if request.num_computed == request.num_tokens:
            request.num_tokens += 1  # a new token; its block gets a hash with sequence.add_hashes when it is full
        if request.num_tokens >= request.num_final:
            table.finish(request.sequence, computed_tokens=request.num_computed)
            running.remove(request)


def serve(target: str) -> None:
    """Thirty requests that share a system prompt."""
    chance = random.Random(1)
    system_prompt = [chance.randrange(32_000) for _ in range(512)]
    plan = model_plan_request("llama-3.1-8b", memory_bytes=1 << 29, max_model_len_tokens=2048)
    hasher = PrefixHasher(block_size_tokens=16)
    with Client(target) as client:
        pool = client.open_pool(PoolRequest(name="example", plan=plan))
        with pool.open_session(client_name="example") as session:
            running: list[Request] = []
            waiting: deque[Request] = deque()
            for i in range(30):
                prompt = system_prompt + [chance.randrange(32_000) for _ in range(chance.randrange(50, 700))]
                hashes = b"".join(hasher.sequence().extend(prompt))
                waiting.append(Request(session.table.new_sequence(i + 1, hashes), len(prompt)))
            while running or waiting:
                run_step(session, running, waiting)
            session.idle()  # says what is left to say
        stats = pool.status().prefix_stats
        print(f"{stats.hit_tokens} of {stats.query_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    if "KVHOLD_TARGET" in os.environ:
        serve(os.environ["KVHOLD_TARGET"])
    else:
        with LocalDaemon() as daemon:
            serve(daemon.target)
