"""Hidden states kept for a later stage: full attention's blocks, in a page that must not crowd the others' grid."""

from dataclasses import dataclass
from typing import ClassVar

from kvhold_server.domain.kinds.mla import MlaSpec
from kvhold_server.domain.layer_spec import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenStateSpec(MlaSpec):
    """Fields and rules of MLA."""

    kind: ClassVar[str] = "hidden_state"
    family: ClassVar[Family] = Family.ATTENTION | Family.FULL | Family.MLA | Family.HIDDEN

    @property
    def hidden_token_bytes(self) -> int:
        """Bytes of one token's hidden state: values, slots and overrides do not count here."""
        return self.num_kv_heads * self.head_size_elems * self.dtype.size_bytes
