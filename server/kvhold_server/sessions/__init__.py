"""Sessions: leases, epochs, exactly-once steps, and what must be proven before a dead client's blocks are reused.

    shell ──(RPC, stream, timer, pidfd)──▶ SessionTable ── Session ── StepLog
                                              │
                                              └── WorkerWatch ──witnesses──▶ quarantine.judge ──▶ release or wait

Deterministic: time, ids and tokens are arguments. docs/reliability.md says what holds and why.
"""
