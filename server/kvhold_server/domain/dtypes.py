"""Element types of cached states. Two specs with different types of the same size are different specs."""

import enum


class Dtype(enum.Enum):
    """Value: the type's usual name."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    UINT8 = "uint8"
    INT8 = "int8"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return _SIZE_BYTES[self]


_SIZE_BYTES = {
    Dtype.BFLOAT16: 2,
    Dtype.FLOAT16: 2,
    Dtype.FLOAT32: 4,
    Dtype.FLOAT8_E4M3FN: 1,
    Dtype.FLOAT8_E5M2: 1,
    Dtype.UINT8: 1,
    Dtype.INT8: 1,
}
