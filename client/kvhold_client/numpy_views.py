"""Numpy arrays over mapped host memory.

Numpy has no bfloat16 and no float8: those come as bit patterns, uint16 and uint8.
"""

from typing import Any

from kvhold_client.layout import StridedView
from kvhold_client.mapping_errors import LibraryMissing

NUMPY_DTYPES = {
    "bfloat16": "uint16",
    "float16": "float16",
    "float32": "float32",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "uint8": "uint8",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
}


class NumpyViews:
    """Makes arrays; an array keeps the mapping open as long as it lives, and is read-only if the mapping is."""

    library = "numpy"

    def __init__(self, buffer: memoryview) -> None:
        """Raises LibraryMissing."""
        try:
            import numpy
        except ImportError:
            raise LibraryMissing("numpy", "kvhold[cli]") from None
        self._numpy = numpy
        # Arrays over a plain buffer would not keep the mapping open; arrays over this array do.
        self._bytes = numpy.frombuffer(buffer, dtype=numpy.uint8)

    def view(self, view: StridedView) -> Any:
        """The array: shares memory, copies nothing."""
        return self._numpy.ndarray(
            view.shape,
            dtype=NUMPY_DTYPES[view.dtype],
            buffer=self._bytes,
            offset=view.offset_bytes,
            strides=view.strides_bytes,
        )

    def copy_blocks(self, layers: Any, sources: list[int], targets: list[int]) -> None:
        """layers[:, targets] = layers[:, sources] in one indexed copy."""
        layers[:, targets] = layers[:, sources]

    def zero_blocks(self, layers: Any, blocks: list[int]) -> None:
        """layers[:, blocks] = 0 in one indexed fill."""
        layers[:, blocks] = 0

    def close(self) -> None:
        """Lets go of the buffer."""
        self._bytes = self._numpy.empty(0, dtype=self._numpy.uint8)
