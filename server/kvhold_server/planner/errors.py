"""Why something cannot be planned. Each names the layer or field, the value, and what to change.

The families decide the gRPC code: InvalidRequest (contradictory or impossible settings), Exhausted (memory),
Unsupported (the strategy cannot express it), PreconditionFailed (parts of the request do not fit together).
"""

from dataclasses import dataclass

from kvhold_server.domain.errors import Exhausted, InvalidRequest, PreconditionFailed, Unsupported

# ------------------------------------------------------------------------------------------------------ memory


@dataclass(eq=False)
class NoMemory(Exhausted):
    """A rank has no block besides the null block."""

    template = (
        "rank {rank}: {available_bytes} bytes hold no cache block besides the null block; one block is {block_bytes} "
        "bytes, and a request of {max_model_len_tokens} tokens needs at least {min_blocks} blocks in all: give more "
        "memory "
        "or a larger num_blocks_override"
    )
    rank: int
    available_bytes: int
    block_bytes: int
    needed_bytes: int
    min_blocks: int
    max_model_len_tokens: int


@dataclass(eq=False)
class InsufficientMemory(Exhausted):
    """A rank cannot hold one request of the longest length."""

    template = (
        "rank {rank}: one request of max_model_len_tokens {max_model_len_tokens} needs {needed_bytes} bytes "
        "({min_blocks} blocks, null block included) but {available_bytes} bytes are available besides the null block; "
        "the longest that fits is {estimated_max_model_len_tokens} tokens: give more memory or ask for less"
    )
    rank: int
    available_bytes: int
    block_bytes: int
    needed_bytes: int
    min_blocks: int
    max_model_len_tokens: int
    estimated_max_model_len_tokens: int


@dataclass(eq=False)
class CannotAutoFit(Exhausted):
    """Not even one token fits."""

    template = (
        "rank {rank}: {available_bytes} bytes besides the null block do not hold a request of one token, which needs "
        "{needed_bytes}: give more memory"
    )
    rank: int
    available_bytes: int
    needed_bytes: int


@dataclass(eq=False)
class HostPoolTooSmall(Exhausted):
    """Host memory holds less than one request of the longest length."""

    template = (
        "hisparse.host_pool_bytes {host_pool_bytes} gives {host_num_blocks} blocks, but one request of "
        "{max_model_len_tokens} tokens needs {needed_host_blocks}: enlarge the host pool, shorten the request, or turn "
        "auto_fit_max_model_len on"
    )
    host_pool_bytes: int
    host_num_blocks: int
    needed_host_blocks: int
    max_model_len_tokens: int


@dataclass(eq=False)
class BlocksTooFew(Exhausted):
    """The device groups of a host-resident plan do not hold one request."""

    template = (
        "{num_blocks} device blocks do not hold one request of {max_model_len_tokens} tokens, which needs "
        "{needed_blocks}: give more memory or shorten the request"
    )
    num_blocks: int
    needed_blocks: int
    max_model_len_tokens: int


# ------------------------------------------------------------------------------------------------- invalid requests


@dataclass(eq=False)
class ConflictingWindows(InvalidRequest):
    """Full-attention layers with two different windows or chunks cannot be told apart from one type."""

    template = (
        "layers of one full-attention type have {field} {first} and {second}: give them the same, or use the sliding "
        "or chunked kind"
    )
    field: str
    first: object
    second: object


@dataclass(eq=False)
class PromotionFailed(InvalidRequest):
    """disable_hybrid_kv_cache was asked for, but the layers do not become one type."""

    template = (
        "disable_hybrid_kv_cache: layer {layer_name} ({kind}) and layer {other_layer_name} ({other_kind}) do not "
        "become "
        "one type: leave it off for this model"
    )
    layer_name: str
    kind: str
    other_layer_name: str
    other_kind: str


@dataclass(eq=False)
class KindNotPlannable(InvalidRequest):
    """A layer holds nothing that could be planned."""

    template = "layer {layer_name}: kind {kind} holds no cache: leave the layer out"
    layer_name: str
    kind: str


@dataclass(eq=False)
class LayoutCannotHoldPages(InvalidRequest):
    """The layout needs equal pages."""

    template = (
        "layout {layout} cannot hold pages of {page_sizes_bytes} bytes in {num_groups} group(s): use BLHNC or "
        "BLNHC, or "
        "give all layers the same page"
    )
    layout: str
    page_sizes_bytes: tuple[int, ...]
    num_groups: int


@dataclass(eq=False)
class LayoutMixesStrides(InvalidRequest):
    """Blocks of several groups would overlap each other."""

    template = (
        "layout {layout}: layer {layer_name} has {block_stride_bytes} bytes from block to block and layer "
        "{other_layer_name} {other_block_stride_bytes}, so that block ids of their groups overlap: use LBHNC, LBNHC "
        "or a "
        "block-outermost layout"
    )
    layout: str
    layer_name: str
    block_stride_bytes: int
    other_layer_name: str
    other_block_stride_bytes: int


@dataclass(eq=False)
class NoGroupForHiddenStates(InvalidRequest):
    """Hidden-state layers need other layers whose pages they follow."""

    template = (
        "layers {layer_names} are hidden states of different block sizes and there is no other layer: give them one "
        "block_size_tokens"
    )
    layer_names: tuple[str, ...]


@dataclass(eq=False)
class HisparseInvalid(InvalidRequest):
    """The host-resident layout does not fit the model or its settings."""

    template = "hisparse: {field} is {value}: {constraint}"
    field: str
    value: object
    constraint: str


@dataclass(eq=False)
class MatchUnitDoesNotDivide(InvalidRequest):
    """The hash unit must divide every cached group's block, and states must end on it."""

    template = (
        "prefix_match_unit_tokens {unit_tokens}: {what} {tokens} is not a multiple of what it must be: choose a "
        "divisor "
        "of all block sizes (leave it out for the largest)"
    )
    unit_tokens: int
    what: str
    tokens: int


# ------------------------------------------------------------------------------------------------------ unsupported


@dataclass(eq=False)
class PageNotUnifiable(Unsupported):
    """A layer's page neither divides the largest page nor can be padded to it."""

    template = (
        "layer {layer_name} ({kind}): its page of {page_bytes} bytes does not divide the largest page of "
        "{largest_page_bytes} and cannot be padded: use BLHNC or BLNHC, or choose block sizes whose pages divide it"
    )
    layer_name: str
    kind: str
    page_bytes: int
    largest_page_bytes: int


# ---------------------------------------------------------------------------------------------------- preconditions


@dataclass(eq=False)
class LayerSpecMismatch(PreconditionFailed):
    """One layer has different specs on two ranks."""

    template = (
        "layer {layer_name}: {field} is {value} on rank {rank} and {first_value} on rank {first_rank}: the same layer "
        "must have the same spec on all ranks"
    )
    layer_name: str
    rank: int
    first_rank: int
    field: str
    value: object
    first_value: object


@dataclass(eq=False)
class RankWithoutLayers(PreconditionFailed):
    """Some ranks have layers and this one has none."""

    template = "rank {rank} has no layers while others do: every rank must own at least one"
    rank: int


@dataclass(eq=False)
class RanksDisagree(PreconditionFailed):
    """Ranks would need different layouts for one set of block ids."""

    template = (
        "rank {rank}: {cause}, while rank {other_rank} uses the drafter's own pool: all ranks must have its shape"
    )
    rank: int
    other_rank: int
    cause: str


@dataclass(eq=False)
class GroupsDisagree(PreconditionFailed):
    """Ranks would need different block tables: their host-resident rows pack into different groups."""

    template = (
        "rank {rank}: its rows form {num_groups} groups and those of rank 0 {first_num_groups}, but block tables must "
        "be the same on all ranks: give all pipeline stages the same pattern of rows and indexers"
    )
    rank: int
    num_groups: int
    first_num_groups: int


@dataclass(eq=False)
class PageDoesNotScale(PreconditionFailed):
    """A block multiplied does not give a page multiplied."""

    template = (
        "layer {layer_name} ({kind}): {factor} times the block of {block_size_tokens} tokens gives a page of "
        "{page_bytes} bytes instead of {wanted_page_bytes}: make tokens_per_state divide the block, and leave "
        "padding out"
    )
    layer_name: str
    kind: str
    factor: int
    block_size_tokens: int
    page_bytes: int
    wanted_page_bytes: int


@dataclass(eq=False)
class PaddedPageSplit(PreconditionFailed):
    """Padding lies at the end of a page, which this layout does not keep in one piece."""

    template = (
        "layer {layer_name}: a page padded to {page_bytes} bytes with {num_heads} heads is not in one piece in layout "
        "{layout}: use LBHNC, LBNHC, BLHNC or BLNHC, or leave the padding out"
    )
    layer_name: str
    page_bytes: int
    num_heads: int
    layout: str


@dataclass(eq=False)
class PlanTooLarge(InvalidRequest):
    """A size of the plan does not fit the wire's integers."""

    template = (
        "rank {rank}: a size of {size_bytes} bytes is beyond {max_bytes}: ask for fewer blocks or shorter requests"
    )
    rank: int
    size_bytes: int
    max_bytes: int
