"""The layer-spec kinds, one file each. `KINDS` is the only list of them; the codec's table has one line per entry."""

from kvhold_server.domain.kinds.chunked_local import ChunkedLocalSpec
from kvhold_server.domain.kinds.circular_buffer import CircularBufferSpec
from kvhold_server.domain.kinds.cross_attention import CrossAttentionSpec
from kvhold_server.domain.kinds.draft_sliding_window import DraftSlidingWindowSpec
from kvhold_server.domain.kinds.encoder_only import EncoderOnlySpec
from kvhold_server.domain.kinds.full import FullSpec
from kvhold_server.domain.kinds.hidden_state import HiddenStateSpec
from kvhold_server.domain.kinds.hisparse_hot import HisparseHotSpec
from kvhold_server.domain.kinds.hisparse_resident import HisparseResidentSpec
from kvhold_server.domain.kinds.kpool_tail import KpoolTailSpec
from kvhold_server.domain.kinds.mamba import MambaSpec
from kvhold_server.domain.kinds.mla import MlaSpec
from kvhold_server.domain.kinds.rswa import RswaSpec
from kvhold_server.domain.kinds.sink_full import SinkFullSpec
from kvhold_server.domain.kinds.sliding_window import SlidingWindowSpec
from kvhold_server.domain.kinds.sliding_window_mla import SlidingWindowMlaSpec
from kvhold_server.domain.layer_spec import LayerSpec

KINDS: tuple[type[LayerSpec], ...] = (
    FullSpec,
    MlaSpec,
    HiddenStateSpec,
    RswaSpec,
    SinkFullSpec,
    SlidingWindowSpec,
    SlidingWindowMlaSpec,
    DraftSlidingWindowSpec,
    KpoolTailSpec,
    CircularBufferSpec,
    ChunkedLocalSpec,
    MambaSpec,
    CrossAttentionSpec,
    EncoderOnlySpec,
    HisparseHotSpec,
    HisparseResidentSpec,
)

__all__ = [
    "KINDS",
    "FullSpec",
    "MlaSpec",
    "HiddenStateSpec",
    "RswaSpec",
    "SinkFullSpec",
    "SlidingWindowSpec",
    "SlidingWindowMlaSpec",
    "DraftSlidingWindowSpec",
    "KpoolTailSpec",
    "CircularBufferSpec",
    "ChunkedLocalSpec",
    "MambaSpec",
    "CrossAttentionSpec",
    "EncoderOnlySpec",
    "HisparseHotSpec",
    "HisparseResidentSpec",
]
