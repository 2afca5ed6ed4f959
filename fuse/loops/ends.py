"""Put a loop with its prologue and epilogue into one module.

    h0 = region_0(x)                          inside the module:
    hs, h = loop(h0, x, w)         ->             h0 = before_0(x);  hs, h = loop(h0, x, w);  y = after_0(h)
    y = region_1(h)                           y, hs = region_2(x, w)

Views of values computed inside are taken inside; views of other values stay outside, where they cost nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node
from torch.nn import Module

from fuse.graph.loop_with_ends import LoopWithEnds
from fuse.graph.outputs import add_placeholder, finished
from fuse.rewrite import effects, nested, regions, surgery


@dataclass(frozen=True)
class Joined:
    """A loop with prologue and epilogue, the nodes it reads, and the nodes it replaces."""

    module: LoopWithEnds
    inputs: list[Node]
    results: list[Node]


def join(call: Node, before: Sequence[Sequence[Node]], after: Sequence[Sequence[Node]]) -> Joined:
    """Join the loop ``call`` with the operators ``before`` and ``after`` it, in program order; each group becomes a
    region."""
    return _Joining(call, before, after).run()


class _Joining:
    def __init__(self, call: Node, before: Sequence[Sequence[Node]], after: Sequence[Sequence[Node]]) -> None:
        self.loop, self.before, self.after = call, before, after
        self.members = {call, *(node for group in (*before, *after) for node in group)}
        self.graph = Graph()
        self.root = Module()
        self.inputs: list[Node] = []
        self.inner: dict[Node, Node] = {}

    def run(self) -> Joined:
        computed: list[Node] = []
        for number, group in enumerate(self.before):
            computed += self._region(f"before_{number}", group)
        computed += self._loop()
        for number, group in enumerate(self.after):
            computed += self._region(f"after_{number}", group)
        results = [node for node in computed if any(user not in self.members for user in effects.readers(node))]
        module = finished(self.graph, [self.inner[node] for node in results], self.root)
        return Joined(LoopWithEnds(module), self.inputs, results)

    def _region(self, name: str, members: Sequence[Node]) -> list[Node]:
        module, inputs, results = regions.build_body(members)
        values = tuple(node.meta["val"] for node in results)
        call = self._call(name, module, inputs, values, members[-1])
        for number, node in enumerate(results):
            self.inner[node] = self._part(call, number)
        return results

    def _loop(self) -> list[Node]:
        module = nested.called_module(self.loop)
        assert module is not None
        operands = [node for node in self.loop.args if isinstance(node, Node)]
        call = self._call("loop", module, operands, self.loop.meta["val"], self.loop)
        made: dict[object, Node] = {}
        for node in self.loop.users:
            number = node.args[1]
            assert isinstance(number, int)
            self.inner[node] = made[number] = made.get(number) or self._part(call, number)
        return [node for number, node in {node.args[1]: node for node in self.loop.users}.items()]

    def _call(self, name: str, module: Module, operands: Sequence[Node], values: object, like: Node) -> Node:
        arguments = tuple(map(self._resolved, operands))
        self.root.add_module(name, module)
        call = self.graph.call_module(name, arguments)
        call.meta.update(val=values, source=like.meta.get("source", ""))
        return call

    def _part(self, call: Node, number: int) -> Node:
        part = self.graph.call_function(operator.getitem, (call, number))
        part.meta.update(val=call.meta["val"][number], source=call.meta["source"])
        return part

    def _resolved(self, node: Node) -> Node:
        """The node inside the module for one outside: computed inside, a view of such a node, or a placeholder."""
        if node not in self.inner:
            if regions.owner(node) in self.members:
                copied = self.graph.node_copy(node, self._resolved)
                copied.meta["val"] = surgery.fake_value(self.graph, copied.target, copied.args, copied.kwargs)
                self.inner[node] = copied
            else:
                self._place(node)
        return self.inner[node]

    def _place(self, node: Node) -> None:
        anchor = self.inner[self.inputs[-1]] if self.inputs else self.graph._root
        with self.graph.inserting_after(anchor):
            placeholder = add_placeholder(self.graph, node.name)
        placeholder.meta.update(val=node.meta["val"], source=node.meta.get("source", ""))
        self.inner[node] = placeholder
        self.inputs.append(node)
