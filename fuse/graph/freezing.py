"""Freeze weights: parameters and buffers become constants, which passes may fold, join and pack.

x, weight (a parameter)  ->  x, weight (a constant, with a copy of its value)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fuse.graph.signature import InputSpec, Signature, held_tensor


def freeze(graph: GraphModule, model: nn.Module, variable: dict[int, Tensor]) -> None:
    """Turn the model's tensors into constants with their present values.

    ``variable`` has those that calls write, by their ``id``, which stay as they are; those of this call are added.
    """
    signature: Signature = graph.meta["signature"]
    written = {mutation.input_index for mutation in signature.mutations} | set(signature.reassigned)
    written |= {one.input_index for one in signature.reshaped}
    returned = {output.index for output in signature.outputs if output.kind == "input"}
    inputs = list(signature.inputs)
    for index, spec in enumerate(inputs):
        is_held = spec.kind in ("parameter", "buffer") or (spec.kind == "constant" and spec.may_change)
        if not is_held:
            continue
        value = held_tensor(spec, model)
        if index in written:
            variable[id(value)] = value
        elif index not in returned and id(value) not in variable:
            kept = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            inputs[index] = InputSpec("constant", spec.name, value=kept.copy_(value.detach()))
    graph.meta["signature"] = replace(signature, inputs=tuple(inputs))
