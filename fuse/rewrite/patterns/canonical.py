"""From an operator call to its term: arguments bound to the schema, then the operator's rule.

    aten.softmax(x, dim=-1)  and  aten.softmax(x, 1)      ->      _softmax(x, dim=1, half_to_float=False)

Binding makes keywords, positions and defaults alike. Dimensions are counted from the front, lists become tuples, and
numbers beside a floating-point tensor become floats. An operator without a rule keeps its name and arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fuse import ops
from fuse.rewrite.patterns import views
from fuse.rewrite.patterns.rules import OperatorArguments, Rule, made_by_rule, operand, rule_for
from fuse.rewrite.patterns.terms import FILL, KNOWN, PART, TensorType, Term, Terms, shortest, type_of

_DIMENSIONS = frozenset(["dim", "dims", "dim0", "dim1"])
_OPERANDS = frozenset(["self", "other", "exponent"])
"""Arguments of elementwise operators that may be a tensor or a number."""


_NUMBERS = frozenset(["other", "exponent", "value", "min", "max"])
"""Arguments that rules receive as a tensor's term, or as an unchanged number."""


@dataclass(frozen=True)
class _Schema:
    """The parts of an operator's schema that terms depend on."""

    name: str
    defaults: Mapping[str, Any]
    numbers: frozenset[str]
    tensors: frozenset[str]
    elementwise: bool
    commutative: bool
    rule: Rule | None
    makes: frozenset[str]


@cache
def _schema(op: OpOverload) -> _Schema:
    arguments = op._schema.arguments
    packet = op._schema.name.removeprefix("aten::").replace("::", ".")
    elementwise = ops.is_pointwise(op)
    name = packet if elementwise or op._overloadname in ("", "default") else f"{packet}.{op._overloadname}"
    return _Schema(
        name,
        {argument.name: argument.default_value for argument in arguments},
        frozenset(argument.name for argument in arguments if str(argument.type).startswith(("number", "Optional[num"))),
        frozenset(argument.name for argument in arguments if str(argument.type) in ("Tensor", "Optional[Tensor]")),
        elementwise,
        ops.is_commutative(op),
        rule_for(packet),
        made_by_rule(packet) | {name},
    )


def may_make(op: OpOverload) -> frozenset[str]:
    """The names of the computing terms that a call of ``op`` may become.

    >>> import torch
    >>> sorted(may_make(torch.ops.aten.sqrt.default))
    ['pow', 'sqrt']
    """
    return _schema(op).makes


def term_of_node(terms: Terms, node: Node, term_of: Callable[[Node], Term]) -> Term:
    """The term of a ``call_function`` node; ``term_of`` returns the terms of its operands."""
    args, kwargs = _with_terms(node.args, term_of), _with_terms(node.kwargs, term_of)
    terms.origin = node
    if node.target is operator.getitem:
        whole, index = args
        return terms.make(PART, [whole], whole.type[index], [("index", index)])
    assert isinstance(node.target, OpOverload)
    return term_of_call(terms, node.target, args, kwargs, type_of(node.meta["val"]))


def _with_terms(arguments: Any, term_of: Callable[[Node], Term]) -> Any:
    """Arguments with terms in place of nodes."""
    if isinstance(arguments, Node):
        return term_of(arguments)
    if isinstance(arguments, (tuple, list)):
        return [_with_terms(argument, term_of) for argument in arguments]
    if isinstance(arguments, dict):
        return {name: _with_terms(argument, term_of) for name, argument in arguments.items()}
    return arguments


def term_of_call(
    terms: Terms, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], tensor_type: Any
) -> Term:
    """The term of one call of ``op`` with a result of type ``tensor_type``; tensor arguments are terms.

    >>> terms = Terms()
    >>> import torch
    >>> x = terms.leaf("x", TensorType((2, 8), torch.float32, None))
    >>> aten = torch.ops.aten
    >>> quarter = term_of_call(terms, aten.div.Tensor, (x, 4), {}, x.type)
    >>> str(quarter), quarter is term_of_call(terms, aten.mul.Tensor, (x,), {"other": 0.25}, x.type)
    ('mul(x, 0.25)', True)
    """
    schema = _schema(op)
    arguments: OperatorArguments = {**schema.defaults, **dict(zip(schema.defaults, args, strict=False)), **kwargs}
    if schema.elementwise and isinstance(tensor_type, TensorType):
        arguments = _with_numbers(terms, schema, arguments)
    if (
        schema.rule is not None
        and isinstance(tensor_type, TensorType)
        and (term := schema.rule(terms, arguments, tensor_type)) is not None
    ):
        return term
    return _as_it_is(terms, schema, arguments, tensor_type)


def _with_numbers(terms: Terms, schema: _Schema, arguments: OperatorArguments) -> OperatorArguments:
    """Arguments with number terms for numbers in place of tensors, and for uniform tensors beside another: ``sub(1,
    x)``."""
    tensors = [value for value in arguments.values() if isinstance(value, Term) and value.name not in KNOWN]
    if not tensors:
        return arguments
    beside = next((term for term in tensors if term.dtype != torch.bool), tensors[0])
    found = {}
    for name, value in arguments.items():
        if name in schema.tensors - _NUMBERS and isinstance(value, (int, float, complex)):
            value = terms.number(value, beside)
        elif isinstance(value, Term) and value.name == FILL and _acts_as_number(value, beside):
            coarse = value.dtype == torch.float32 and beside.dtype not in (torch.float64, torch.complex128)
            value = shortest(value.value) if coarse else value.value
            value = value if schema.rule is not None and name in _NUMBERS else terms.number(value, beside)
        found[name] = value
    return found


def _acts_as_number(fill: Term, beside: Term) -> bool:
    """Whether replacing the uniform tensor ``fill`` by a Python number would give the same elements."""
    if fill.dtype == beside.dtype:
        return True
    numbers = fill.dtype != torch.bool and beside.dtype != torch.bool
    return not fill.shape and numbers and (beside.dtype.is_floating_point or not fill.dtype.is_floating_point)


def _as_it_is(terms: Terms, schema: _Schema, arguments: OperatorArguments, tensor_type: Any) -> Term:
    """The term of an operator without a rule: its tensors are operands, all other arguments constants."""
    first = next((term for value in arguments.values() for term in _terms_in(value)), None)
    operands: list[Term] = []
    constants = []
    for name, value in arguments.items():
        if schema.elementwise and name in schema.numbers and first is not None and value is not None:
            number = operand(terms, value, first)
            if name in _OPERANDS:
                operands.append(number)
                continue
            value = number.value
        if name in _DIMENSIONS and first is not None and isinstance(first.type, TensorType):
            value = _counted_from_front(value, len(first.shape))
        operands.extend(_terms_in(value))
        if not isinstance(value, Term):
            constants.append((name, _without_terms(value)))
    if schema.elementwise and isinstance(tensor_type, TensorType):
        return views.pointwise(terms, schema.name, operands, tensor_type, constants, commutative=schema.commutative)
    return terms.make(schema.name, operands, tensor_type, constants)


def _terms_in(value: Any) -> list[Term]:
    if isinstance(value, Term):
        return [value]
    return [term for item in value for term in _terms_in(item)] if isinstance(value, (list, tuple)) else []


def _without_terms(value: Any) -> Any:
    """``value`` as a constant: lists become tuples, and tensors in lists a placeholder."""
    if isinstance(value, Term):
        return "tensor"
    return tuple(_without_terms(item) for item in value) if isinstance(value, (list, tuple)) else value


def _counted_from_front(dims: Any, rank: int) -> Any:
    if isinstance(dims, int):
        return dims % rank if -rank <= dims < rank else dims
    return tuple(_counted_from_front(dim, rank) for dim in dims) if isinstance(dims, (list, tuple)) else dims
