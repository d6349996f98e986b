"""The memory of tensors that have no buffer of Python's kind, such as those of torch.

Nothing is imported: a tensor is whatever has the few methods used here.
"""

from __future__ import annotations

import ctypes
from typing import Any


def memory_of(tensor: Any) -> ctypes.Array[ctypes.c_ubyte]:
    """Returns the bytes of a contiguous tensor in host memory, without a copy.

    What is returned keeps the tensor alive. Raises `TypeError` with the reason if there are none.
    """
    if not hasattr(tensor, "data_ptr"):
        raise TypeError("it is neither a buffer nor a tensor")
    device = tensor.device.type
    if device != "cpu":
        raise TypeError(f"it is in the memory of {device}, not of the host")
    if not tensor.is_contiguous():
        raise TypeError("it is not contiguous")
    size = tensor.numel() * tensor.element_size()
    memory: ctypes.Array[ctypes.c_ubyte] = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    vars(memory)["tensor"] = tensor
    return memory
