"""kvhold_pipelined over a gRPC stream."""

from interface import Config
from kvhold_pipelined import PipelinedManager


def create(config: Config) -> PipelinedManager:
    return PipelinedManager(config, "grpc")
