"""Rewrite the matches of registered patterns.

    a = sigmoid(x)                    r = region(x):
    b = mul(a, x)        ->               return mul(sigmoid(x), x)        @fuse.pattern
                                                                           def swish(x): return x * torch.sigmoid(x)

A match becomes the pattern's ``replace``, or else one region, which one generated kernel runs. The pass runs after
loops are rolled and before other operators are fused, so that patterns see operators, and later passes see the regions.
Declined with the verdict of :mod:`fuse.rewrite.patterns.matching` on each candidate, and in loops that run as one
kernel, where no launch is left to save.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fuse import ops
from fuse.errors import FuseError
from fuse.kernel.domain import Domain, domain_of, join
from fuse.kernel.kernel import Declined
from fuse.kernel.lower import lower
from fuse.rewrite import nested, regions
from fuse.rewrite.patterns import registry
from fuse.rewrite.patterns.conditions import Misfit, Surroundings, VerdictKind
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.differences import called
from fuse.rewrite.patterns.exact_match import FoundMatch
from fuse.rewrite.patterns.forms import known_runs, takes_lists
from fuse.rewrite.patterns.matching import Prepare, match
from fuse.rewrite.patterns.replacing import Replacement, put, replacement
from fuse.rewrite.registry import register_pass
from fuse.rewrite.verdict import Verdict, declined, rewrite

IN_KERNEL: VerdictKind = "in a loop kernel"
OR_REPLACE = "a method replace(self, ...)"


@dataclass(frozen=True)
class Region:
    """A match that one kernel can run."""

    members: tuple[Node, ...]
    domain: Domain | None


@register_pass(stage="match", after="pattern_gradients")
def match_patterns(graph: GraphModule) -> Iterator[Verdict]:
    """Rewrite the matches of registered patterns."""
    patterns = yield from sound(lambda pattern: True)
    moved: dict[Node, Node] = {}
    for outcome in match(graph, patterns, prepare) if patterns else ():
        name = outcome.pattern.name
        if outcome.found is not None and outcome.kind == "matched":
            yield rewrite(outcome.found.members, build, graph, outcome.prepared, moved, pattern=name)
        else:
            nodes = (outcome.node or outcome.candidate, outcome.candidate)
            yield declined(nodes, f"{outcome.kind}: {outcome.reason}", pattern=name)
    if moved:
        regions.sort(graph.graph)
    for loop, body in nested.loop_kernels(graph) if patterns else ():
        for outcome in match(body, patterns, in_loop_kernel):
            if outcome.kind == IN_KERNEL:
                yield declined(loop, f"{outcome.kind}: {outcome.reason}", pattern=outcome.pattern.name)


def graphs_to_match(graph: GraphModule) -> list[tuple[GraphModule, Prepare]]:
    """``graph`` and the bodies of its loops, each with the function that prepares a match there."""
    bodies = [body for body, _ in nested.walk(graph)]
    kernels = [kernel for body in bodies for _, kernel in nested.loop_kernels(body)]
    return [*((body, prepare) for body in bodies), *((kernel, in_loop_kernel) for kernel in kernels)]


def in_loop_kernel(_found: FoundMatch, _around: Surroundings) -> Misfit:
    """Why a match in the body of a loop that runs as one kernel is not rewritten."""
    return Misfit(IN_KERNEL, "one launch runs all steps of the loop, with these operators in it")


def sound(wanted: Callable[[Pattern], bool]) -> Generator[Verdict, None, list[Pattern]]:
    """The enabled ``wanted`` patterns that can match; the broken ones are declined."""
    patterns = []
    for pattern in registry.registered():
        if not (pattern.enabled and wanted(pattern)):
            continue
        if reason := why_broken(pattern):
            yield declined((), reason, pattern=pattern.name)
        else:
            patterns.append(pattern)
    return patterns


def why_broken(pattern: Pattern) -> str | None:
    """Why a pattern cannot be matched in any graph, or None."""
    return known_runs(pattern, max(1, takes_lists(pattern))).error or None


def prepare(found: FoundMatch, around: Surroundings) -> Region | Replacement | Misfit:
    """The region or replacement of a match, if the pattern is right on such calls; untried classes are tried now."""
    try:
        if reason := registry.refusal(found.form.pattern):
            return Misfit("refused", reason.removeprefix("refused: "))
        made = prepare_untried(found, around)
        if isinstance(made, Replacement) and (reason := registry.objection(found)):
            return Misfit("refused", reason)
        return made
    except FuseError as error:
        return Misfit("refused", str(error))


def prepare_untried(found: FoundMatch, around: Surroundings) -> Region | Replacement | Misfit:
    """The replacement that the pattern gives, or the region of a match, if a kernel can be generated for it."""
    if found.form.pattern.replace is not None:
        return replacement(found, around)
    nodes = found.members
    if len(nodes) < 2:
        return Misfit("refused by lowering", "it is one operator, and one launch already")
    if library := next((node for node in nodes if ops.is_product(node.target)), None):
        reason = f"`{called(library)}` stays a library call, outside of loops: no kernel takes it in"
        return Misfit("refused by lowering", reason, library, f"leave `{called(library)}` out, or {OR_REPLACE}")
    calls = found.setting.table.calls
    joined, declined = around.known(calls.alike(nodes), lambda: (domain(nodes), why_not_lowered(nodes)))
    return Misfit("refused by lowering", declined, None, OR_REPLACE) if declined else Region(tuple(nodes), joined)


def why_not_lowered(nodes: Sequence[Node]) -> str | None:
    """Why no kernel can be generated for ``nodes`` together, or None."""
    verdict = lower(regions.build_body(nodes)[0])
    return verdict.reason if isinstance(verdict, Declined) else None


def build(graph: GraphModule, prepared: Region | Replacement, moved: dict[Node, Node]) -> None:
    """Insert the region or the replacement; ``moved`` maps the old results to the new ones."""
    if isinstance(prepared, Replacement):
        put(prepared, moved)
        return
    body, inputs, results = regions.build_body(prepared.members)
    if prepared.domain is not None:
        body.meta["domain"] = prepared.domain
    call = regions.insert_region(graph, prepared.members, body, inputs, results)
    moved.update(zip(results, call.users, strict=True))


def domain(nodes: Sequence[Node]) -> Domain | None:
    """The common domain of all ``nodes``, for the passes that grow regions; None if they differ."""
    domains = [domain_of(node) for node in nodes]
    found: Domain | str | Declined = domains[0]
    for one in domains[1:]:
        if isinstance(found, Domain) and isinstance(one, Domain):
            found = join(found, one)
        else:
            return None
    return found if isinstance(found, Domain) else None
