"""What can go wrong between an exported region and tensor views of it. None leaves anything mapped."""

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar

from kvhold_client.errors import KvholdError

_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class MappingError(KvholdError):
    """Base of all of them. `template` formats the fields for people; `reason` is the class name in UPPER_SNAKE."""

    template: ClassVar[str] = ""

    def __post_init__(self) -> None:
        assert dataclasses.is_dataclass(self)
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        super().__init__(
            self.template.format(**fields),
            reason=_WORD_START.sub("_", type(self).__name__).upper(),
            metadata={name: str(value) for name, value in fields.items()},
        )


@dataclass(eq=False)
class ChannelNotReachable(MappingError):
    """The fd channel's socket is not there, not ours to open, or nobody listens."""

    template = "{path}: {problem} (we are uid {uid}, gid {gid}; the socket is {socket})"
    path: str
    problem: str
    uid: int
    gid: int
    socket: str  # "uid 0, gid 10001, mode 660", or "missing"


@dataclass(eq=False)
class ChannelRefused(MappingError):
    """The daemon answered no. `refusal` is its error's name, e.g. UNKNOWN_TOKEN, PEER_NOT_ALLOWED, UNKNOWN_REGION."""

    template = "{path}: {refusal}: {explanation}"
    path: str
    refusal: str
    explanation: str


@dataclass(eq=False)
class ChannelBroken(MappingError):
    """The daemon went away, or what answers is not a kvhold daemon."""

    template = "{path}: {problem}"
    path: str
    problem: str


@dataclass(eq=False)
class RegionNotMappable(MappingError):
    """The region's bytes cannot be reached from this process."""

    template = "{region}: {problem}"
    region: str
    problem: str


@dataclass(eq=False)
class RegionSizeMismatch(MappingError):
    """The memory is smaller than the export says: another plan's, or truncated by somebody."""

    template = "{region} has {actual_bytes} bytes, the export says {expected_bytes}"
    region: str
    actual_bytes: int
    expected_bytes: int


@dataclass(eq=False)
class DeviceNotVisible(MappingError):
    """The region lies on a GPU that this process does not see."""

    template = (
        "the region lies on GPU {device_uuid}, this process sees {visible}; "
        "give it the same device (CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES, or one shared resource claim)"
    )
    device_uuid: str
    visible: str


@dataclass(eq=False)
class PageOutsideRegion(MappingError):
    """The plan and the region do not belong together."""

    template = "layers {first_layer}…: pages reach byte {end_bytes}, the region has {region_bytes}"
    first_layer: str
    end_bytes: int
    region_bytes: int


@dataclass(eq=False)
class LayoutUnusable(MappingError):
    """This view of the layer cannot be had in this layout."""

    template = "layer {layer_name}: {problem}"
    layer_name: str
    problem: str


@dataclass(eq=False)
class MappingInUse(MappingError):
    """Somebody still holds a view: unmapping now would turn its next touch into a crash."""

    template = "{region}: views of it are still referenced; drop them, then unmap"
    region: str


@dataclass(eq=False)
class LibraryMissing(MappingError):
    """The package that makes such views is not installed."""

    template = "{library} is not installed: pip install '{package}'"
    library: str
    package: str


@dataclass(eq=False)
class CudaCallFailed(MappingError):
    """A CUDA driver call returned an error."""

    template = "{call} failed: {name} ({error_code})"
    call: str
    error_code: int
    name: str


@dataclass(eq=False)
class InvalidCopy(MappingError):
    """A batch of block copies that has no defined result."""

    template = "copies: {problem}"
    problem: str
