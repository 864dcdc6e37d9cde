"""kvhold_manager over a gRPC stream."""

from interface import Config
from kvhold_manager import KvholdManager


def create(config: Config) -> KvholdManager:
    return KvholdManager(config, "grpc")
