"""Which layers a pipeline stage has, where the number of groups depends on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvhold_server.domain.errors import InvalidRequest, PreconditionFailed
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.layer_spec import cdiv
from kvhold_server.planner.request import PlannerConfig


@dataclass(eq=False)
class StageWithoutMla(InvalidRequest):
    """A pipeline stage has recurrent layers but no MLA layer whose bytes they could share."""

    template = (
        "pipeline stage {stage} has {num_state_layers} recurrent layers and no MLA layer: change pp_layer_partition so "
        "that each stage has one"
    )
    stage: int
    num_state_layers: int


@dataclass(eq=False)
class LayerIndexUnclear(PreconditionFailed):
    """With pipeline stages, a layer's number must be readable from its name."""

    template = "layer {layer_name}: the name must have exactly one number between dots to tell its pipeline stage"
    layer_name: str


@dataclass(eq=False)
class PartitionInvalid(InvalidRequest):
    """pp_layer_partition does not match the stages and layers."""

    template = (
        "pp_layer_partition {partition} must have {num_stages} entries with the sum {total_hidden_layers} "
        "(total_hidden_layers)"
    )
    partition: tuple[int, ...]
    num_stages: int
    total_hidden_layers: int


def stage_lengths(config: PlannerConfig) -> list[int]:
    """Hidden layers per stage: those given, or evenly with what remains on the stages before the last. Raises
    PartitionInvalid.
    """
    stages, total = config.pipeline_parallel_size, config.total_hidden_layers
    given = config.pp_layer_partition
    if given:
        if len(given) != stages or sum(given) != total:
            raise PartitionInvalid(partition=given, num_stages=stages, total_hidden_layers=total)
        return list(given)
    quotient, remainder = divmod(total, stages)
    # The last stage also has the output layer, so extras go to those before it.
    return [quotient + (2 <= stages - index <= remainder + 1) for index in range(stages)]


def layer_index(name: LayerName) -> int:
    """The one number between dots of a layer's name. Raises LayerIndexUnclear."""
    numbers = [part for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise LayerIndexUnclear(layer_name=name)
    return int(numbers[0])


def num_state_groups(states: Sequence[LayerName], mlas: Sequence[LayerName], config: PlannerConfig) -> int:
    """Groups of recurrent layers such that on every stage none outnumbers the MLA layers. Raises StageWithoutMla."""
    count = cdiv(len(states), len(mlas))
    if config.pipeline_parallel_size == 1:
        return count
    state_indexes, mla_indexes = [layer_index(name) for name in states], [layer_index(name) for name in mlas]
    start = 0
    for stage, length in enumerate(stage_lengths(config)):
        here = range(start, start + length)
        start += length
        num_states = sum(index in here for index in state_indexes)
        num_mlas = sum(index in here for index in mla_indexes)
        if num_states and not num_mlas:
            raise StageWithoutMla(stage=stage, num_state_layers=num_states)
        if num_states:
            count = max(count, cdiv(num_states, num_mlas))
    return count
