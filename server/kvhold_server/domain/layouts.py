"""The six physical orders of a cache tensor, outermost axis first.

    L layer   B block   H head   N state (one per token, or per several)   C content (bytes of one state and head)

Which of L and B is outside decides what may differ between layers:

    LB...  every layer is one contiguous run of blocks; pages of several groups must be equal
    BL...  a block is one contiguous run of layers; layers of any page size lie side by side in it
    LH..., BH...  heads are outside states, so that a page is not contiguous; all pages must be equal
"""

import enum


class Layout(enum.Enum):
    """Value: the axes from outermost to innermost."""

    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    LHBNC = "LHBNC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    BHLNC = "BHLNC"

    @property
    def block_compact(self) -> bool:
        """A page of one layer is contiguous: L and B are the two outermost axes."""
        return set(self.value[:2]) == {"L", "B"}

    @property
    def layer_outermost(self) -> bool:
        """Each layer is one run of the allocation."""
        return self.value[0] == "L"

    @property
    def block_outermost(self) -> bool:
        """Each block is one run of the allocation."""
        return self.value[0] == "B"
