"""Two asyncio engines on one pool: the second finds what the first has computed.

python examples/asyncio_engine.py
"""

import asyncio

from kvhold_client import AsyncClient, LocalDaemon, PoolRequest, PrefixHasher, model_plan_request

PROMPT = list(range(800))


async def compute(client: AsyncClient, name: str) -> int:
    """Admits the prompt in a session of its own; returns the tokens that were cached."""
    plan = model_plan_request("llama-3.1-8b", memory_bytes=1 << 29, max_model_len_tokens=2048)
    pool = await client.open_pool(PoolRequest(name="shared", plan=plan))
    hashes = b"".join(PrefixHasher(block_size_tokens=16).sequence().extend(PROMPT))
    async with await pool.open_session(client_name=name) as session:
        session.begin_step()
        sequence = session.table.new_sequence(1, hashes)
        session.table.admit(sequence, num_tokens=len(PROMPT))
        [admission] = (await session.flush(token_budget=8192)).admitted
        # … the model runs here …
        session.table.finish(sequence, computed_tokens=len(PROMPT))
        await session.idle()  # the step is complete: from now on everybody may hit its blocks
        return admission.hit_tokens


async def main(target: str) -> None:
    """One engine after the other."""
    async with AsyncClient(target) as client:
        for name in ("first", "second"):
            print(f"{name}: {await compute(client, name)} of {len(PROMPT)} tokens cached")


if __name__ == "__main__":
    with LocalDaemon() as daemon:
        asyncio.run(main(daemon.target))
