"""How many descriptors this process may have open.

A region of device memory is one descriptor per chunk, and handing it out opens them all once more; a holder keeps
those of all regions. The soft limit of 1024 that shells and containers give is for programs that use select(); ours
do not.
"""

import resource


def raise_descriptor_limit() -> int:
    """Sets the soft limit to the hard one and returns it. Never fails: a lower limit is still a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # an unlimited hard limit above what the kernel allows at all
        return soft
    return hard
