"""Compare three matchers on ten fusions, with six spellings and six near misses of each.

    pattern, model --matcher--> found? --run--> still right?      benchmarks/results/comparison.json, docs/comparison.md

A fusion is replaced by itself, so that a match is right exactly if the model then computes what it did. All three are
given ATen operators (``make_fx``; fuse's own capture), which already evens out methods and keywords; Inductor is given
functional ones, as it has them in a compilation. ``python -m benchmarks.comparison`` writes both files.
"""

from __future__ import annotations

import copy
import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, subgraph_rewriter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from benchmarks.common import ROOT, save
from benchmarks.fusions import NEAR_MISSES, SPELLINGS, Function, Fusion
from benchmarks.more_fusions import FUSIONS
from fuse.check.pattern import judged
from fuse.rewrite.patterns.definition import Pattern, define

PAGE = ROOT / "docs" / "comparison.md"

Matcher = Callable[[Fusion, Function], str]
AS_WRITTEN = "as written"
FOUND, MISSED, WRONG, FAILS = "found", "missed", "**wrong**", "fails"


def fused(fusion: Fusion, function: Function) -> str:
    """fuse"""
    verdict = judged(as_pattern(fusion), function, fusion.arguments())
    return (WRONG if verdict.wrong else FOUND) if verdict.fired else MISSED


def as_pattern(fusion: Fusion) -> Pattern:
    """The fusion as a pattern of fuse that is replaced by itself."""
    itself = staticmethod(fusion.pattern)
    return define(type("Itself", (), {"pattern": itself, "replace": itself, "examples": lambda _: fusion.arguments()}))


def rewritten(fusion: Fusion, function: Function) -> str:
    """torch.fx.subgraph_rewriter"""
    try:
        module, pattern = (make_fx(one)(*fusion.arguments()) for one in (function, fusion.pattern))
        for graph in (module.graph, pattern.graph):
            graph.eliminate_dead_code()  # a pattern with dead code is refused
        matches = subgraph_rewriter.replace_pattern(module, pattern, copy.deepcopy(pattern))
    except Exception as error:  # of any kind: it counts as failed
        return f"{FAILS} ({type(error).__name__})"
    return _verdict(bool(matches), module, fusion, function)


def registered(fusion: Fusion, function: Function) -> str:
    """Inductor's register_replacement"""
    from torch._inductor import pattern_matcher
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    try:
        patterns = pattern_matcher.PatternMatcherPass()
        arguments = fusion.arguments()
        with torch.no_grad():
            pattern_matcher.register_replacement(
                _named(fusion), _named(fusion), arguments, pattern_matcher.fwd_only, patterns, skip_duplicates=True
            )
        functional = torch.func.functionalize(function, remove="mutations")
        with torch.no_grad():
            decompositions = pattern_matcher.select_decomp_table()
            module = make_fx(functional, decompositions, tracing_mode="fake")(*arguments)
        remove_noop_ops(module.graph)  # as in a compilation; the pattern's trace has it done, too
        count = patterns.apply(module.graph)
        module.recompile()
    except Exception as error:  # likewise
        return f"{FAILS} ({type(error).__name__})"
    return _verdict(count > 0, module, fusion, function)


def _named(fusion: Fusion) -> Function:
    """The pattern as a function with a name and parameters of its own, which the registration asks for."""
    names = [f"argument_{place}" for place in range(len(fusion.shapes))]
    made: dict[str, Any] = {"pattern": fusion.pattern}
    exec(f"def named({', '.join(names)}): return pattern({', '.join(names)})", made)
    function: Function = made["named"]
    return function


def _verdict(matched: bool, module: GraphModule, fusion: Fusion, function: Function) -> str:
    if not matched:
        return MISSED
    try:
        with torch.no_grad():
            results = pytree.tree_leaves(module(*fusion.arguments()))
    except Exception:  # what does not run is no right result
        return WRONG
    wanted = pytree.tree_leaves(function(*fusion.arguments()))
    same = all(_same(one, other) for one, other in zip(results, wanted, strict=True))
    return FOUND if same else WRONG


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, atol=1e-5)


MATCHERS: tuple[Matcher, ...] = (fused, rewritten, registered)


def cases(matchers: Sequence[Matcher] = MATCHERS) -> Iterator[dict[str, str]]:
    """Every cell: the fusion, what was changed, and what each matcher made of it."""
    for fusion in FUSIONS:
        as_written = {AS_WRITTEN: fusion.pattern, **fusion.spellings}
        for group, kinds in ((as_written, (AS_WRITTEN, *SPELLINGS)), (fusion.near_misses, NEAR_MISSES)):
            for kind in kinds:
                if kind in group:
                    verdicts = {str(one.__doc__): one(fusion, group[kind]) for one in matchers}
                    yield {"fusion": fusion.name, "change": kind, **verdicts}


def page(found: Sequence[dict[str, str]]) -> str:
    """The comparison as a page."""
    names = [str(one.__doc__) for one in MATCHERS]
    lines = [
        "# What three matchers find",
        "",
        _paragraph(
            "Ten fusions are written as patterns for three matchers: fuse, `torch.fx.subgraph_rewriter` and Inductor's "
            "`register_replacement`. Each matcher searches other spellings of the same computation, which it should "
            "find, and near misses, which it must not rewrite wrongly. A fusion is replaced by itself. *wrong* means "
            "that the rewritten model computes another result, or fails. `-` means that a change does not apply."
        ),
        "",
        _paragraph(
            "`python -m benchmarks.comparison` runs every cell and writes this page; the functions are in "
            "[benchmarks/fusions.py](../benchmarks/fusions.py) and "
            "[benchmarks/more_fusions.py](../benchmarks/more_fusions.py). The other two matchers get graphs of ATen "
            "operators, in which methods and keywords are already uniform."
        ),
        "",
        f"PyTorch {torch.__version__}.",
        "",
        "| | patterns found as written | other spellings found | near misses rewritten wrongly |",
        "|---|--:|--:|--:|",
    ]
    spelled = [one for one in found if one["change"] in SPELLINGS]
    near = [one for one in found if one["change"] in NEAR_MISSES]
    for name in names:
        right = sum(one[name] == FOUND for one in spelled)
        wrong = sum(one[name] == WRONG for one in near)
        own = sum(one[name] == FOUND for one in found if one["change"] == AS_WRITTEN)
        lines.append(f"| {name} | {own} of {len(FUSIONS)} | {right} of {len(spelled)} | {wrong} of {len(near)} |")
    for title, kinds in (("Spellings", (AS_WRITTEN, *SPELLINGS)), ("Near misses", NEAR_MISSES)):
        lines += ["", f"## {title}", "", f"Each cell has the results of {', '.join(names)}.", ""]
        lines += [f"| fusion | {' | '.join(kinds)} |", f"|---{'|---' * len(kinds)}|"]
        for fusion in FUSIONS:
            cells = [_cell(found, fusion.name, kind, names) for kind in kinds]
            lines.append(f"| {fusion.name} | {' | '.join(cells)} |")
    lines += [
        "",
        _paragraph(
            "A near miss that is *found* was rewritten and is still right, because the pattern holds there, too: with "
            "a broadcast operand, for example, or with the transpose of a weight."
        ),
    ]
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 160, break_long_words=False)


def _cell(found: Sequence[dict[str, str]], fusion: str, kind: str, names: Sequence[str]) -> str:
    one = next((one for one in found if (one["fusion"], one["change"]) == (fusion, kind)), None)
    return "-" if one is None else ", ".join(one[name] for name in names)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    everything = list(cases())
    save("comparison", everything)
    PAGE.write_text(page(everything))
    print(page(everything))
