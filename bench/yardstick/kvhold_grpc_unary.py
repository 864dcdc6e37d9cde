"""kvhold_manager over gRPC, a call for each step: what the stream is compared with."""

from interface import Config
from kvhold_manager import KvholdManager


def create(config: Config) -> KvholdManager:
    return KvholdManager(config, "grpc-unary")
