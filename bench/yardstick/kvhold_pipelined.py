"""As kvhold_manager, but a step is asked for while the device computes the one before.

`prepare` runs in the gap between two steps. What the next step's running phase will ask for is known then, and so are
the heads of the queue: later arrivals stand behind them. The request is sent without waiting; `schedule` finds the answer
there, and asks again only for what arrived meanwhile. The daemon applies the same items in the same order, so that the
decisions are the same.

    step n     schedule ─▶ device computes ................................ schedule (n + 1)
    client                  finish ─▶ prepare: Step n + 1 sent ............. collect
    daemon                                        applied, answered
"""

from interface import Config, StepInput, StepOutput
from kvhold_manager import Ask, KvholdManager


def create(config: Config) -> "PipelinedManager":
    return PipelinedManager(config)


class PipelinedManager(KvholdManager):
    """See the module."""

    def __init__(self, config: Config, transport: str = "local") -> None:
        super().__init__(config, transport)
        self.num_steps = 0
        self.prepared: Ask | None = None

    def prepare(self, step: StepInput) -> None:
        """Step n + 1, while step n runs: so n - 1 is the last complete one."""
        self.num_steps += 1
        self.session.begin_step(completed_step=max(0, self.num_steps - 2))
        self.prepared = self._ask(step)
        if self.prepared.asked or self.prepared.heads:
            self.table.submit(token_budget=self.prepared.budget)

    def schedule(self, step: StepInput) -> StepOutput:
        if self.prepared is None:
            self.prepare(step)
        plan, self.prepared = self.prepared, None
        assert plan is not None
        return self._decide(step, plan, self.table.collect())
