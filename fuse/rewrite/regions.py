"""Make a region of a group of nodes, and take regions apart again.

    a = mul(x, 2)                      region(x, y):                     r = region(x, y)
    b = add(a, y)            ->            a = mul(x, 2)          and    b = r[0]
    c = mm(b, w)                           return (add(a, y),)           c = mm(b, w)

Views of a group's own values are copied into the region, where they cost nothing; views of other values stay outside,
where they cost nothing either. Tensors made from nothing (``zeros``, ``arange``) are made again inside each region that
reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch.fx import Graph, GraphModule, Node
from torch.nn import Module

from fuse import ops
from fuse.graph.outputs import add_placeholder, finished, inlined
from fuse.rewrite import effects, nested, surgery
from fuse.rewrite.ordering import program_order


def owner(node: Node) -> Node:
    """The node that computes the memory of ``node``: itself, or the base of its views and parts."""
    while True:
        if node.target is operator.getitem and node.op == "call_function":
            node = node.args[0]  # type: ignore[assignment]  # FX types arguments loosely
        elif (base := effects.view_base(node)) is not None:
            node = base
        else:
            return node


def is_region(node: Node) -> bool:
    return node.op == "call_module" and nested.kind(node) == "region"


def is_constructor(node: Node) -> bool:
    """Whether ``node`` makes a tensor from numbers alone (``zeros``, ``full``, ``arange``), equal in every call."""
    return (
        node.op == "call_function"
        and not node.all_input_nodes
        and effects.is_pure(node)
        and ops.kind(node.target) == "movement"
    )


def build_body(members: Sequence[Node]) -> tuple[GraphModule, list[Node], list[Node]]:
    """A region that computes ``members`` (in program order): its module, the nodes it reads, the nodes it replaces.

    The replaced nodes are the members' values that are read outside.
    """
    builder = _BodyBuilder(members)
    for member in members:
        builder.copy(member)
    results = builder.results()
    return region_module(builder.body, [builder.inner[r] for r in results]), builder.inputs, results


def region_module(body: Graph, results: Sequence[Node]) -> GraphModule:
    """The module of a region: ``body``, which has no output node yet, returning ``results``."""
    module = finished(body, results)
    module.meta["kind"] = "region"
    return module


def copied_body(call: Node, values: Sequence[Node]) -> tuple[Graph, list[Node], list[Node]]:
    """A copy of the body of the region ``call``, without an output: the graph, its results, and ``values`` in it.

    ``values`` are parts of ``call``, or views of parts.
    """
    module = nested.called_module(call)
    assert isinstance(module, GraphModule)
    body = Graph()
    results: list[Node] = list(body.graph_copy(module.graph, {}))  # type: ignore[arg-type]  # FX types arguments loosely
    inner: dict[Node, Node] = {part: results[part.args[1]] for part in call.users}  # type: ignore[index]  # FX types arguments loosely

    def within(value: Node) -> Node:
        if value not in inner:
            inner[value] = body.node_copy(value, within)
        return inner[value]

    return body, results, [within(value) for value in values]


def exchange_body(graph: GraphModule, call: Node, module: GraphModule) -> list[Node]:
    """Make the region ``call`` run ``module``, which returns further results; returns new nodes for these, in order."""
    old = nested.called_module(call)
    assert isinstance(old, GraphModule)
    module.meta = {**old.meta, **module.meta}
    setattr(graph, str(call.target), module)
    values = module.graph.output_node().meta["val"]
    known = len(call.meta["val"])
    call.meta["val"] = values
    return results_of_call(call, range(known, len(values)))


def results_of_call(call: Node, positions: Iterable[int]) -> list[Node]:
    """New nodes behind ``call``, of a region or loop, that read its results at ``positions``."""
    parts: list[Node] = []
    at = call
    for position in positions:
        with call.graph.inserting_after(at):
            at = call.graph.call_function(operator.getitem, (call, position))
        at.meta.update(val=call.meta["val"][position], source=call.meta.get("source", ""))
        parts.append(at)
    return parts


class _BodyBuilder:
    """Copies nodes of the parent graph into the body of a region."""

    def __init__(self, members: Sequence[Node]) -> None:
        self.members = set(members)
        self.body = Graph()
        self.inputs: list[Node] = []
        self.inner: dict[Node, Node] = {}
        self.last_placeholder: Node | None = None

    def copy(self, member: Node) -> None:
        if is_region(member):
            self._inline(member)
        else:
            self._copy_call(member)

    def _copy_call(self, node: Node) -> Node:
        for argument in node.all_input_nodes:
            self.resolve(argument)
        copied = self.body.node_copy(node, lambda n: self.inner[n])
        self.inner[node] = copied
        return copied

    def resolve(self, node: Node) -> Node:
        """The body's node for an argument: a copied node, or a placeholder."""
        if node not in self.inner:
            if is_constructor(node) or (owner(node) in self.members and node not in self.members):
                self._copy_call(node)
            else:
                self._place(node)
        return self.inner[node]

    def _place(self, node: Node) -> None:
        anchor = self.last_placeholder or self.body._root
        with self.body.inserting_after(anchor):
            placeholder = add_placeholder(self.body, node.name)
        placeholder.meta.update(val=node.meta["val"], source=node.meta.get("source", ""))
        self.inner[node] = self.last_placeholder = placeholder
        self.inputs.append(node)

    def _inline(self, call: Node) -> None:
        """Copy the body of a region that joins; its results replace the parts that the parent graph reads."""
        module = nested.called_module(call)
        assert isinstance(module, GraphModule)
        results = inlined(self.body, module.graph, [self.resolve(operand) for operand in call.args])  # type: ignore[arg-type]  # FX types arguments loosely
        for part in call.users:
            self.inner[part] = results[part.args[1]]  # type: ignore[index]  # FX types arguments loosely

    def results(self) -> list[Node]:
        """The values of the group that are read outside of it, in program order."""
        found: list[Node] = []
        for member in sorted(self.members):
            parts = list(member.users) if _has_parts(member) else [member]
            found += [p for p in parts if p.target is not operator.getitem or p in self.inner or self._read(p)]
        wanted = [v for v in found if self._read(v)]
        for value in wanted:
            if value not in self.inner:
                self._copy_call(value)
        return wanted

    def _read(self, value: Node) -> bool:
        """Whether any node outside of the group reads ``value``, directly or through views."""
        stack = list(value.users)
        while stack:
            user = stack.pop()
            if user in self.members:
                continue
            if effects.view_base(user) is None:
                return True
            stack.extend(user.users)
        return False


def _has_parts(node: Node) -> bool:
    return is_region(node) or isinstance(node.meta.get("val"), (tuple, list))


def insert_region(
    graph: GraphModule, members: Sequence[Node], module: Module, inputs: list[Node], results: list[Node]
) -> Node:
    """Insert a region of :func:`build_body` at the last member. The members are erased; their users read its parts.

    If the members were not neighbours, the caller restores the program order with :func:`sort`.
    """
    name = _free_name(graph)
    graph.add_submodule(name, module)
    last = members[-1]
    with graph.graph.inserting_after(last):
        call = graph.graph.call_module(name, tuple(inputs))
    call.meta["val"] = tuple(r.meta["val"] for r in results)
    call.meta["source"] = last.meta.get("source", "")
    for result, part in zip(results, results_of_call(call, range(len(results))), strict=True):
        part.meta["source"] = result.meta.get("source", "")
        result.replace_all_uses_with(part)
    _erase_group(members)
    return call


def _erase_group(members: Sequence[Node]) -> None:
    """Erase the members, and those of their views and parts that nothing reads any more."""
    worklist = list(reversed(members))
    for node in worklist:
        erase_with_users(node)


def erase_with_users(node: Node) -> None:
    """Erase ``node`` with its views and parts, which nothing reads."""
    found, waiting = {node: None}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found[user] = None
                waiting.append(user)
    surgery.erase(*found)


def _free_name(graph: GraphModule) -> str:
    number = graph.meta.get("regions_made", 0)
    graph.meta["regions_made"] = number + 1
    return f"region_{number}"


def sort(graph: Graph) -> None:
    """Restore program order: every node behind its operands, otherwise as before; effects keep their order."""
    order = program_order(graph.nodes, lambda node: node.all_input_nodes, _has_effects)
    output = order[-1]
    for node in order:
        if node.op not in ("placeholder", "output"):
            output.prepend(node)


def _has_effects(node: Node) -> bool:
    return node.op not in ("placeholder", "output") and not effects.is_pure(node)
