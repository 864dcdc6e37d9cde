"""Refusals that a layer spec itself gives."""

from dataclasses import dataclass

from kvhold_server.domain.errors import PreconditionFailed


@dataclass(eq=False)
class PaddedPageTooSmall(PreconditionFailed):
    """The padding asked for is smaller than what a page holds."""

    template = (
        "layer {layer_name}: page_size_padded_bytes {padded_bytes} is less than the {unpadded_bytes} bytes that a page "
        "holds: give at least those or leave it out"
    )
    layer_name: str
    padded_bytes: int
    unpadded_bytes: int


@dataclass(eq=False)
class WindowNotContextParallel(PreconditionFailed):
    """Sliding windows are not split over decode-context-parallel ranks."""

    template = (
        "layer {layer_name}: a {kind} layer cannot be spread over decode_context_parallel_size "
        "{context_parallel_size}: "
        "set that to 1, dcp_sharded to false, or disable_hybrid_kv_cache"
    )
    layer_name: str
    kind: str
    context_parallel_size: int


@dataclass(eq=False)
class UnknownModelVersion(PreconditionFailed):
    """A sliding-window MLA layer names a model generation whose rules are not known."""

    template = 'layer {layer_name}: model_version {model_version!r} is not known: leave it out or give "deepseek_v4"'
    layer_name: str
    model_version: str
