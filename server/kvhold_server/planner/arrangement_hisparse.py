"""Host-resident rows: full MLA rows in host memory, a device buffer of the rows that the indexer selects.

    host    │ rows of l0 │ l1 │ l2 │ l3 │              one block table of its own ids (source group)
    device  │ indexer l0 │ indexer l2 │                indexer rows stay on the device, and decide the bytes of a block
            │ resident l0 │ resident l1 │              rows being computed, until they are in host memory
            │ hot l0      │ hot l1      │              a fixed buffer of fetched rows per request
            │ other layers' groups …                   as usual

An index leader and the layers that follow its selection are a unit; units are packed into groups of at most the
indexers' width, so that resident and hot groups do not widen the block.
"""

from collections.abc import Sequence

from kvhold_server.domain.errors import InvalidRequest
from kvhold_server.domain.ids import LayerName
from kvhold_server.domain.kinds.hisparse_hot import HisparseHotSpec
from kvhold_server.domain.kinds.hisparse_resident import HisparseResidentSpec
from kvhold_server.domain.kinds.mla import CacheRole
from kvhold_server.domain.kinds.uniform_type import UniformTypeSpec, uniform_type_of
from kvhold_server.domain.layer_spec import Family, LayerSpec, Limits, cdiv, round_up
from kvhold_server.domain.layouts import Layout
from kvhold_server.domain.plan import GroupRole, PlanWarning, WarningType
from kvhold_server.planner.arrangement import Arrangement, Placed
from kvhold_server.planner.errors import HisparseInvalid
from kvhold_server.planner.groups import LayerGroup, request_blocks
from kvhold_server.planner.placement import bytes_per_block, check_layout, place_groups
from kvhold_server.planner.request import Hisparse, PlannerConfig

_MAX_BUFFER_ROWS = 32768
_OS_PAGE_BYTES = 4096
_Members = list[tuple[LayerName, LayerSpec]]


class HisparseArrangement(Arrangement):
    """Built from groups whose first holds all MLA layers. Raises HisparseInvalid from everything but the
    constructor.
    """

    def __init__(self, groups: Sequence[LayerGroup], config: PlannerConfig) -> None:
        super().__init__(groups, config)
        assert config.hisparse is not None
        self._hisparse: Hisparse = config.hisparse
        self._reserve_bytes = bytes_per_block(self.groups)

    @property
    def reserve_bytes(self) -> int:
        """The null block is reserved as if rows stayed on the device: a little more than needed."""
        return self._reserve_bytes

    @property
    def block_bytes(self) -> int:
        """The widest device group."""
        return bytes_per_block(self._device_groups())

    def need_bytes(self, limits: Limits) -> int:
        """Indexer rows and the other groups; rows themselves are the host's."""
        indexers = self._members(CacheRole.INDEXER)
        need = sum(spec.max_request_blocks(limits) * spec.page_size_bytes for _, spec in indexers)
        return need + sum(g.spec.max_request_blocks(limits) * g.spec.page_size_bytes for g in self.groups[1:])

    def host_num_blocks(self) -> int | None:
        """Host blocks of all rows. Raises HisparseInvalid."""
        blocks = self._hisparse.host_pool_bytes // self._host_block_stride()
        if blocks <= 0:
            raise HisparseInvalid(
                field="host_pool_bytes",
                value=self._hisparse.host_pool_bytes,
                constraint=f"must hold at least one block of {self._host_block_stride()} bytes",
            )
        return blocks

    def scheduler_groups(self) -> tuple[LayerGroup, ...]:
        """The source group first, then those of the device."""
        return (self._source_group(), *self._device_groups())

    def fits(self, limits: Limits, spare_bytes: int) -> bool:
        """At least one request at once, in device and host blocks alike."""
        try:
            host_blocks = self.host_num_blocks()
            override = self.config.num_blocks_override
            num_blocks = self.num_blocks(spare_bytes, limits) if override is None else override - 1
            self._check_layout()
        except InvalidRequest:
            return False
        assert host_blocks is not None
        needed = request_blocks(self.scheduler_groups(), limits)
        return num_blocks >= needed.device and host_blocks >= needed.host and self.need_bytes(limits) <= spare_bytes

    def place(self, num_blocks: int, limits: Limits, host_num_blocks: int | None) -> Placed:
        """Raises HisparseInvalid and the refusals of the layout."""
        self._check_layout()
        own_host_blocks = self.host_num_blocks()
        host_blocks = own_host_blocks if host_num_blocks is None else host_num_blocks
        assert host_blocks is not None
        source, device = self._source_group(), self._device_groups()
        block_bytes = bytes_per_block(device)
        host_row_bytes = source.block_width_bytes
        host = place_groups([source], host_blocks, host_row_bytes, Layout.LBHNC, host_resident=True)
        return Placed(
            groups=(source, *device),
            tensors=(*host, *place_groups(device, num_blocks, block_bytes, self.config.layout)),
            region_size_bytes=num_blocks * block_bytes,
            host_num_blocks=host_blocks,
            host_block_stride_bytes=self._host_block_stride(),
            host_region_size_bytes=host_blocks * self._host_block_stride(),
            shared_host_pool=self._hisparse.shared_host_pool,
        )

    # --- parts -----------------------------------------------------------------------------------------------------

    def _wrapper(self) -> UniformTypeSpec:
        first = self.groups[0]
        if not isinstance(first.spec, UniformTypeSpec) or not all(s.family & Family.MLA for s in first.spec.each()):
            raise HisparseInvalid(field="layers", value=first.spec.kind, constraint="the model must have MLA layers")
        versions = [spec.model_generation for spec in first.spec.each()]
        if "deepseek_v4" in versions:
            raise HisparseInvalid(field="model_version", value="deepseek_v4", constraint="is not supported")
        return first.spec

    def _members(self, role: CacheRole) -> _Members:
        self._wrapper()
        members = [
            (name, spec) for name, spec in self.groups[0].layers() if spec.selects_rows == (role is CacheRole.INDEXER)
        ]
        if not members:
            raise HisparseInvalid(field="cache_role", value=role.value, constraint="at least one layer must have it")
        return members

    def _block_tokens(self) -> int:
        blocks = sorted({spec.block_size_tokens for spec in self._wrapper().each()})
        if len(blocks) != 1:
            raise HisparseInvalid(
                field="block_size_tokens", value=blocks, constraint="must be the same in all MLA layers"
            )
        return blocks[0]

    def _buffer_rows(self) -> int:
        query, topk = self.config.decode_query_tokens, self._hisparse.index_topk
        asked = self._hisparse.device_buffer_rows
        rows = (query + 1) * topk if asked is None else asked
        if not query * topk <= rows <= _MAX_BUFFER_ROWS:
            raise HisparseInvalid(
                field="device_buffer_rows",
                value=rows,
                constraint=f"must be {query * topk} (rows of a decode query) to {_MAX_BUFFER_ROWS}",
            )
        return rows

    def warnings(self) -> tuple[PlanWarning, ...]:
        """What is to be said about the settings. Raises HisparseInvalid."""
        asked, block = self._hisparse.device_buffer_rows, self._block_tokens()
        if asked is None or asked % block == 0:
            return ()
        following = round_up(asked, block)
        return (
            PlanWarning(
                type=WarningType.HISPARSE_BUFFER_ROWS_UNUSED,
                message=f"device_buffer_rows {asked} leaves {following - asked} rows of its last block unused: "
                f"{following} costs the same",
                args=(("unused_rows", str(following - asked)), ("next_multiple_rows", str(following))),
            ),
        )

    def _source_group(self) -> LayerGroup:
        return _wrapped(self._members(CacheRole.SPARSE), GroupRole.HISPARSE_SOURCE, host_resident=True)

    def _device_groups(self) -> tuple[LayerGroup, ...]:
        indexers = self._members(CacheRole.INDEXER)
        block, hot_blocks = self._block_tokens(), cdiv(self._buffer_rows(), self._block_tokens())
        residents, hots = [], []
        for pack in self._packs(sum(spec.page_size_bytes for _, spec in indexers)):
            page = pack[0][1].page_size_bytes
            names = [name for name, _ in pack]
            resident = HisparseResidentSpec(block_size_tokens=block, row_page_size_bytes=page)
            hot = HisparseHotSpec(block_size_tokens=block, row_page_size_bytes=page, num_request_blocks=hot_blocks)
            residents.append(_derived(names, "hisparse_resident", resident))
            hots.append(_derived(names, "hisparse_hot", hot))
        return (_wrapped(indexers, GroupRole.HISPARSE_INDEXER), *residents, *hots, *self.groups[1:])

    def _packs(self, width_bytes: int) -> list[_Members]:
        units: list[_Members] = []
        for name, spec in self._members(CacheRole.SPARSE):
            if not units or spec.leads_selection:
                units.append([])
            units[-1].append((name, spec))
        packs: list[_Members] = []
        used = 0
        for unit in units:
            unit_bytes = sum(spec.page_size_bytes for _, spec in unit)
            if packs and used + unit_bytes <= width_bytes:
                packs[-1].extend(unit)
                used += unit_bytes
            else:
                packs.append(list(unit))
                used = unit_bytes
        for pack in packs:
            pages = sorted({spec.page_size_bytes for _, spec in pack})
            if len(pages) != 1:
                raise HisparseInvalid(
                    field="page_size_bytes", value=pages, constraint="must be one size in a group of rows"
                )
        return packs

    def _host_block_stride(self) -> int:
        stride = sum(spec.page_size_bytes for _, spec in self._members(CacheRole.SPARSE))
        return round_up(stride, _OS_PAGE_BYTES) if self._hisparse.shared_host_pool else stride

    def _check_layout(self) -> None:
        check_layout(self.config.layout, self._device_groups())
        if not self.config.layout.block_outermost:
            raise HisparseInvalid(
                field="layout", value=self.config.layout.value, constraint="must be block-outermost: BLHNC or BLNHC"
            )


def _wrapped(members: _Members, role: GroupRole, *, host_resident: bool = False) -> LayerGroup:
    names = tuple(name for name, _ in members)
    spec = uniform_type_of(names, [spec for _, spec in members])
    return LayerGroup(layer_names=names, spec=spec, role=role, host_resident=host_resident)


def _derived(names: list[LayerName], suffix: str, spec: LayerSpec) -> LayerGroup:
    derived = tuple(LayerName(f"{name}.{suffix}") for name in names)
    return LayerGroup(layer_names=derived, spec=spec, enable_kv_transfer=False)
