"""Reads what a worker needs out of the wire's Plan message: one rank's placements, groups and what the bytes mean."""

from kvhold.v1 import plan_pb2, pool_pb2
from kvhold_client.host_memory import RegionExport
from kvhold_client.layout import LayerContent, Placement, StateArray
from kvhold_client.mapping import RankLayout

_DTYPE_PREFIX = "DTYPE_"


def rank_layout_from_message(plan: plan_pb2.Plan, rank: int) -> RankLayout:
    """Raises IndexError for a rank that the plan does not have."""
    rank_plan = plan.ranks[rank]
    while rank_plan.HasField("same_as_rank"):
        rank_plan = plan.ranks[rank_plan.same_as_rank]
    contents: dict[str, LayerContent] = {}
    for group in rank_plan.groups:
        contents.update(_contents_of(group, plan))
    return RankLayout(
        placements=tuple(_placement(tensor) for tensor in rank_plan.tensors),
        groups=tuple(tuple(group.layer_names) for group in rank_plan.groups),
        contents=contents,
    )


def region_export_from_message(export: pool_pb2.RegionExport) -> RegionExport:
    """Field by field."""
    return RegionExport(
        size_bytes=export.size_bytes,
        shm_name=export.shm_name,
        fd_socket_path=export.fd_socket_path,
        fd_token=export.fd_token,
        ipc_handle=export.ipc_handle,
        ipc_offset_bytes=export.ipc_offset_bytes,
        device_uuid=export.device_uuid,
        chunk_sizes_bytes=tuple(export.chunk_sizes_bytes),
        host_resident=export.host_resident,
    )


def _contents_of(group: plan_pb2.Group, plan: plan_pb2.Plan) -> dict[str, LayerContent]:
    if group.HasField("layer_spec_index"):
        content = _content(plan.layer_specs[group.layer_spec_index])
        return dict.fromkeys(group.layer_names, content)
    if len(group.member_spec_indexes) != len(group.layer_names):
        return {}  # LEGACY lists the whole model's members: such layers stay opaque bytes
    specs = (plan.layer_specs[index] for index in group.member_spec_indexes)
    return {name: _content(spec) for name, spec in zip(group.layer_names, specs, strict=True)}


def _content(spec: plan_pb2.LayerSpec) -> LayerContent:
    kind = spec.WhichOneof("kind")
    if kind == "mamba":
        return LayerContent(
            states=tuple(StateArray(shape=tuple(state.shape), dtype=_dtype(state.dtype)) for state in spec.mamba.states)
        )
    if not spec.HasField("geometry"):
        return LayerContent()
    geometry = spec.geometry
    latent = kind in ("mla_attention", "hidden_state", "sliding_window_mla")
    default_value_size = 0 if latent else geometry.head_size_elems
    has_value_size = geometry.HasField("head_size_v_elems")
    return LayerContent(
        dtype=_dtype(geometry.dtype),
        key_size_elems=geometry.head_size_elems,
        value_size_elems=geometry.head_size_v_elems if has_value_size else default_value_size,
        packed=geometry.HasField("state_content_bytes"),
    )


def _dtype(value: int) -> str:
    return plan_pb2.Dtype.Name(value).removeprefix(_DTYPE_PREFIX).lower()  # type: ignore[arg-type]


def _placement(tensor: plan_pb2.TensorPlacement) -> Placement:
    return Placement(
        layer_names=tuple(tensor.layer_names),
        offset_bytes=tensor.offset_bytes,
        layer_stride_bytes=tensor.layer_stride_bytes,
        block_stride_bytes=tensor.block_stride_bytes,
        page_size_bytes=tensor.page_size_bytes,
        num_blocks=tensor.num_blocks,
        num_heads=max(1, tensor.num_heads),
        head_stride_bytes=tensor.head_stride_bytes,
        num_states=max(1, tensor.num_states),
        state_stride_bytes=tensor.state_stride_bytes,
        content_size_bytes=tensor.content_size_bytes,
        host_resident=tensor.host_resident,
    )
