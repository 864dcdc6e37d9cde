"""Names for the integers and strings that travel through the core, so that a signature says which one it takes."""

from typing import NewType

BlockId = NewType("BlockId", int)  # 0 is the null block; the same id names the same block on every rank
GroupId = NewType("GroupId", int)  # index of a group in its plan
SequenceId = NewType("SequenceId", int)  # chosen by the client, unique within its session only
SessionId = NewType("SessionId", str)  # unguessable, chosen by the daemon
PoolName = NewType("PoolName", str)
LayerName = NewType("LayerName", str)
Epoch = NewType("Epoch", int)  # counts the tenures of a session; a smaller one is fenced
Step = NewType("Step", int)  # counts a session's scheduler steps
BlockHash = NewType("BlockHash", bytes)  # digest of a whole prefix, of the length that the pool's algorithm has

NULL_BLOCK = BlockId(0)
