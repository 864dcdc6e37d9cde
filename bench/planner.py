"""What a plan costs: 128 layers on 8 ranks, and 10 000 layers on 64, by each strategy.

    python bench/planner.py

Each line is the best of a few runs, in one process, without the wire. Hybrid models of four different specs (full, two
windows, recurrent), because a model whose layers are all equal has nothing to decide.
"""

import sys
import time

from kvhold_server.domain.dtypes import Dtype
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds import FullSpec, MambaSpec, SlidingWindowSpec
from kvhold_server.domain.kinds.mamba import StateArray
from kvhold_server.domain.layer_spec import LayerSpec
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import Strategy
from kvhold_server.planner.plan import plan
from kvhold_server.planner.request import Layer, PlannerConfig, PlanRequest, Rank

GIB = 1 << 30
GEOMETRY: dict[str, int] = {
    "block_size_tokens": 16,
    "num_kv_heads": 2,
    "head_size_elems": 64,
    "head_size_v_elems": 64,
}
SPECS: tuple[LayerSpec, ...] = (
    FullSpec(**GEOMETRY, dtype=Dtype.BFLOAT16),
    SlidingWindowSpec(**GEOMETRY, dtype=Dtype.BFLOAT16, sliding_window_tokens=1024),
    SlidingWindowSpec(**GEOMETRY, dtype=Dtype.BFLOAT16, sliding_window_tokens=128),
    MambaSpec(block_size_tokens=16, states=(StateArray(shape=(20_000,), dtype=Dtype.UINT8),)),
)
PATTERN = (0, 1, 1, 3, 1, 2, 1, 3, 1, 1, 2)
BOUNDS_S = {(128, 8, Strategy.MODERN): 0.005, (10_000, 64, Strategy.COMPACT): 2.0}


def request(num_layers: int, num_ranks: int, strategy: Strategy, layout: Layout = Layout.BLHNC) -> PlanRequest:
    """A hybrid model, equal on all ranks."""
    config = PlannerConfig(
        strategy=strategy, layout=layout, max_model_len_tokens=131_072, max_num_batched_tokens=8192, max_num_seqs=256
    )
    specs = [SPECS[PATTERN[index % len(PATTERN)]] for index in range(num_layers)]
    layers = tuple(Layer(LayerName(f"layers.{index}.x"), spec) for index, spec in enumerate(specs))
    rank = Rank(layers=layers, available_memory_bytes=num_layers * 4 * GIB)
    return PlanRequest(config=config, ranks=(rank,) * num_ranks)


def best_s(asked: PlanRequest, repetitions: int) -> float:
    """Seconds of the quickest run."""
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        plan(asked)
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> int:
    """Prints a line per case; 1 if a bound of ours is broken."""
    broken = 0
    for num_layers, num_ranks, repetitions in ((128, 8, 20), (1_000, 64, 3), (10_000, 64, 2)):
        for strategy in (Strategy.MODERN, Strategy.COMPACT):
            seconds = best_s(request(num_layers, num_ranks, strategy), repetitions)
            bound = BOUNDS_S.get((num_layers, num_ranks, strategy))
            verdict = "" if bound is None else f"  bound {1e3 * bound:.0f} ms{'' if seconds < bound else '  BROKEN'}"
            broken += bound is not None and seconds >= bound
            case = f"{strategy.value:<8} {num_layers:>6} layers × {num_ranks:>2} ranks"
            print(f"plan {case} {1e3 * seconds:9.1f} ms{verdict}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
