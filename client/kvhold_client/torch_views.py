"""Torch tensors over mapped memory, on the CPU and on CUDA: the only file of the client that imports torch."""

import warnings
from importlib.util import find_spec
from typing import Any

from kvhold_client.layout import DTYPE_SIZE_BYTES, StridedView
from kvhold_client.mapping_errors import LibraryMissing


class DevicePointer:
    """Device memory as CUDA's array interface, which torch wraps without copying."""

    def __init__(self, address: int, size_bytes: int, *, read_only: bool) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, read_only),
            "version": 2,
        }


class TorchViews:
    """Makes tensors; a tensor keeps host memory mapped as long as it lives.

    Torch has no read-only tensors. Over a read-only mapping, writing to one ends the process with SIGSEGV.
    """

    library = "torch"

    def __init__(self, memory: "memoryview | DevicePointer", device: str) -> None:
        """`device`: "cpu", or "cuda:1" with this process's ordinal. Raises LibraryMissing."""
        try:
            import torch
        except ImportError:
            raise LibraryMissing("torch", "kvhold[torch]") from None
        self._torch = torch
        self._on_cpu = device == "cpu" and find_spec("numpy") is not None
        if isinstance(memory, memoryview):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # "not writable": said in our docstring
                self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            self._bytes = torch.as_tensor(memory, device=device)

    def view(self, view: StridedView) -> Any:
        """The tensor: shares memory, copies nothing. The layout has checked that elements are aligned."""
        size = DTYPE_SIZE_BYTES[view.dtype]
        typed = self._bytes.view(getattr(self._torch, view.dtype))
        strides = [stride // size for stride in view.strides_bytes]
        return typed.as_strided(view.shape, strides, view.offset_bytes // size)

    def copy_blocks(self, layers: Any, sources: list[int], targets: list[int]) -> None:
        """layers[:, targets] = layers[:, sources]: one gather and one scatter, on the device where the memory lies."""
        if self._on_cpu:  # torch's own indexing goes element by element here, numpy's in runs
            array = layers.numpy()
            array[:, targets] = array[:, sources]
            return
        picked = layers.index_select(1, self._index(layers, sources))
        layers.index_copy_(1, self._index(layers, targets), picked)

    def zero_blocks(self, layers: Any, blocks: list[int]) -> None:
        """layers[:, blocks] = 0 in one fill."""
        if self._on_cpu:
            layers.numpy()[:, blocks] = 0
            return
        layers.index_fill_(1, self._index(layers, blocks), 0)

    def close(self) -> None:
        """Lets go of the memory."""
        self._bytes = self._torch.empty(0, dtype=self._torch.uint8)

    def _index(self, layers: Any, blocks: list[int]) -> Any:
        return self._torch.tensor(blocks, dtype=self._torch.int64, device=layers.device)


def torch_is_installed() -> bool:
    """Without importing it, which takes seconds."""
    return find_spec("torch") is not None
