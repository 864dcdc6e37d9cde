"""kvhold_manager over gRPC."""

from interface import Config
from kvhold_manager import KvholdManager


def create(config: Config) -> KvholdManager:
    return KvholdManager(config, "grpc")
