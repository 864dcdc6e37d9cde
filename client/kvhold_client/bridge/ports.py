"""Endpoints of several data-parallel ranks on one host: rank r binds the base port + r, as the engines do.

Port 0 lets the system choose: then nothing is added, and whoever wants to connect reads the endpoint that was bound.
"""

import re

_TCP = re.compile(r"(tcp://.*:)(\d+)")


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint that this rank binds. Raises ValueError for a port above 65535."""
    found = _TCP.fullmatch(endpoint)
    if not found:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, port = found[1], int(found[2])
    if port + rank > 65535:
        raise ValueError(f"{endpoint} plus rank {rank} is above port 65535")
    return f"{host}{port + rank}" if port else endpoint


def check_apart(publish: str, replay: str, num_ranks: int) -> None:
    """Raises ValueError if some rank's replay port is another's publish port."""
    ports = [_TCP.fullmatch(endpoint) for endpoint in (publish, replay)]
    if ports[0] is None or ports[1] is None:
        return
    first, second = int(ports[0][2]), int(ports[1][2])
    if first and second and abs(first - second) < num_ranks:
        last = num_ranks - 1
        raise ValueError(
            f"{num_ranks} ranks publish on ports {first}..{first + last} and replay on {second}..{second + last}, "
            "which overlap: move one of them, or use port 0"
        )
