"""Comparison of dtypes by the values that they can represent."""

from __future__ import annotations

import torch


def holds(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether dtype ``wide`` can represent every value of dtype ``narrow``.

    >>> holds(torch.bfloat16, torch.float32), holds(torch.float16, torch.bfloat16), holds(torch.int32, torch.float32)
    (True, False, False)
    """
    if narrow == wide or narrow == torch.bool:
        return True
    if narrow.is_complex or wide.is_complex:
        return False
    if wide == torch.bool or (narrow.is_floating_point and not wide.is_floating_point):
        return False
    if not narrow.is_floating_point:
        integer = torch.iinfo(narrow)
        if not wide.is_floating_point:
            return torch.iinfo(wide).min <= integer.min and integer.max <= torch.iinfo(wide).max
        return integer.bits <= significant_bits(wide) and integer.max <= torch.finfo(wide).max
    one, other = torch.finfo(narrow), torch.finfo(wide)
    return significant_bits(narrow) <= significant_bits(wide) and one.max <= other.max and one.tiny >= other.tiny


def significant_bits(dtype: torch.dtype) -> int:
    """The number of significant bits of a floating-point dtype, including the leading one.

    >>> significant_bits(torch.float32)
    24
    """
    return 1 - int(torch.log2(torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64)))
