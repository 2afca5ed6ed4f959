"""Names of nodes: a placeholder has the name of its parameter, its buffer, or its part of an argument."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import Graph
from torch.utils import _pytree as pytree

from fuse.graph.signature import Attribute


def parameter_names(model: nn.Module) -> list[str]:
    """Names of the positional arguments of a model's ``forward``.

    >>> parameter_names(nn.Linear(2, 2))
    ['input']
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        return [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in positional]
    except (TypeError, ValueError):
        return []


def argument_name(path: Any, names: list[str]) -> str:
    """``x`` for a parameter of ``forward``, ``x[0]['mask']`` for a part of it, ``args[3]`` for an unnamed argument."""
    outer, first = path[:2]
    if outer.idx == 1:
        head = str(first.key)
    elif first.idx < len(names):
        head = names[first.idx]
    else:
        head = f"args[{first.idx}]"
    return head + pytree.keystr(path[2:])


def named_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by the names that ``forward`` gives them.

    >>> named_arguments(nn.Bilinear(1, 1, 1), (1,), {"input2": 2}), named_arguments(nn.Identity(), (3, 4), {})
    ({'input1': 1, 'input2': 2}, {'input': 3, 'args[1]': 4})
    """
    names = parameter_names(model)
    return {names[i] if i < len(names) else f"args[{i}]": value for i, value in enumerate(args)} | dict(kwargs)


def names_of_state(model: nn.Module, mutated: Sequence[Attribute]) -> dict[int, tuple[str, str]]:
    """``id`` of each parameter and buffer -> its kind and name, without the ``mutated`` attributes."""
    others = {str(attribute) for attribute in mutated}
    buffers, parameters = (
        {id(t): (kind, name) for name, t in reversed(list(tensors)) if name not in others}
        for kind, tensors in (
            ("buffer", model.named_buffers(remove_duplicate=False)),
            ("parameter", model.named_parameters(remove_duplicate=False)),
        )
    )
    return buffers | parameters


def identifier(name: str) -> str:
    """``name`` as a valid Python identifier.

    >>> identifier("layers.0.weight"), identifier("x[0]['mask']"), identifier("0")
    ('layers_0_weight', 'x_0_mask', 'input_0')
    """
    text = "".join(c if c.isalnum() else "_" for c in name).strip("_")
    while "__" in text:
        text = text.replace("__", "_")
    return f"input_{text}" if not text or text[0].isdigit() else text


def new_name(graph: Graph, base: str) -> str:
    """The name that torch.fx would give a new node called ``base``, without parsing a base again.

    >>> graph = Graph()
    >>> [new_name(graph, "add") for _ in range(3)]
    ['add', 'add_1', 'add_2']
    >>> [new_name(graph, "slice") for _ in range(3)]
    ['slice_1', 'slice_2', 'slice_3']
    """
    namespace = graph._graph_namespace
    used = namespace._used_names
    number = namespace._base_count.get(base)
    if number is None or (base not in used and not hasattr(builtins, base)):
        return namespace.create_name(base, None)
    number += 1
    while (name := f"{base}_{number}") in used:
        number += 1
    used.add(name)
    namespace._base_count[base] = number
    return name
