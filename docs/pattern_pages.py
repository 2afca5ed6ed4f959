# ruff: noqa: E501 (the pages have a paragraph a line)
"""Keep a page for every pattern that comes with fuse, its docstring, code and a picture, and the table of all of them.

``python docs/pattern_pages.py`` writes docs/patterns/; ``--check`` exits with 1 where a page or a picture is stale.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from fuse.check.pattern import bound
from fuse.check.samples import samples
from fuse.graph.function import Function
from fuse.report.pictures.draw import title
from fuse.report.pictures.layered import svg
from fuse.report.pictures.sketch import sketch
from fuse.report.report import Report
from fuse.report.show import show
from fuse.rewrite import registry
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.registry import alone, registered

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "patterns"
OWN = "fuse.passes.patterns."
PATTERN_PASSES = ("match_patterns", "pattern_gradients")


def example(pattern: Pattern) -> tuple[Report, str]:
    """The report on the pattern's usual call, with something that reads the result, and what that call is given."""
    usual = next(samples(pattern))
    function = bound(pattern, usual)

    def read(*given: Any) -> Any:
        results = function(*given)
        first, *rest = results if isinstance(results, tuple) else (results,)
        return (torch.tanh(first.float()), *rest) if rest else torch.tanh(first.float())

    with alone(pattern):
        report = show(Function(read), usual.arguments())
    return report, str(usual).partition(": ")[2]


INDEX = """# The patterns that come with fuse

These {count} patterns are fusions that published systems ship. All but two take at most fifteen lines of code. {on} are on, because their replacement is faster than what the passes make by themselves. {off} are off: `--patterns NAME` turns one on, `--patterns all` all of them. `fuse explain` knows every pattern.

*Found in* names a small copy of the structure, spelled as its authors spell it ([tests/passes/patterns/published.py](../../tests/passes/patterns/published.py)). Tests check that each pattern fires there and declines two near misses. The launches are those of the copy: eager, fused without the pattern, and fused with this pattern alone. *Recognised*: the pattern matches, but it has no `replace`, and its operators do not fit into one region, so that the passes fuse them as without the pattern.

{rows}

`fuse patterns` lists these patterns and your own. `fuse check-pattern NAME` tests one on generated calls and near misses. `fuse show` counts where they fired, and says why they declined. `python docs/pattern_pages.py` writes these pages.

## In published models

The table has the patterns that fire with `--patterns all` in the models of `benchmarks/zoo.py` (batch 1, at most four layers) and of `models/`. Its launches are those of eager, of fuse without patterns, and of fuse with all patterns. *Speed*, where it was measured, is the processor time without patterns divided by that with all patterns. {published}. `snntorch:leaky` and `snntorch:lapicque` have the same kernels with and without patterns. Such a program, timed against a copy of itself, gave ratios of 0.93 to 1.08: smaller differences mean nothing for so few launches. `python -m benchmarks.zoo_patterns` repeats these measurements. Each of the other patterns fires in the small copy that the table above names.

{fires}

## In other spellings, and in near misses

| command | cases | matched, of those with the same meaning | rewritten wrongly, of those with another meaning |
|---|--:|--:|--:|
| `python -m benchmarks.respelled`: these structures in other spellings (61 kinds of changes, each made at least 398 times) | 30,600 | 17,877 of 17,877 | 0 of 12,723 |
| `python -m benchmarks.metamorphic`: random expressions, from seed 100,000 on (89 kinds of changes, each made at least 200 times) | 11,300 | 6,497 of 6,500 | 0 of 4,800 |

The three missed cases contain one value twice, in two spellings. `python -m benchmarks.steps` adds up the results of several runs.

`python -m benchmarks.patterns` measures the search for all patterns, in processor time on an idle machine. In a graph with 32 copies of each of these structures (17,601 nodes) it takes 1.03 s, and the capture 0.94 s; in an unrolled LSTM loop of 21,260 nodes 0.52 s, and the capture 0.54 s. In graphs of half the size it takes 0.58 and 0.27 s. Work that is done once in a process comes on top: each pattern whose operators occur in the graph is run once, which takes about 2 s for all patterns.

`python -m benchmarks.reflexive --samples 2` makes a pattern of each of PyTorch's operators, and searches for it in a graph of that operator: alone, in a larger graph, in a loop, and under `train()`. Of 4,850 samples 3,820 match. For 998, fuse says why the pattern cannot match. 32 are missed, of 9 of the 676 operators: in a loop, steps share values that do not depend on the step (`masked.mean`, `matrix_rank`, `take_along_dim`); the others are one or two calls each of `einsum`, circular `pad`, `quantile`, `slice_scatter` and `svd`.

## What needs no pattern

The generic passes fuse neighbouring elementwise operators, reductions with their neighbours, look-ups and movement without any pattern. A pattern for one of the following structures would gain nothing, and could prevent a larger fusion. [tests/passes/patterns/test_without_patterns.py](../../tests/passes/patterns/test_without_patterns.py) tests the launches.

| becomes | structures |
|---|---|
| one kernel | {one_kernel} |
| one kernel, or a library call and one, by size | {library_call} |

Squeeze-and-excitation keeps its six launches: two products of a few numbers each, a reduction over the image before them and a broadcast after them. Written as sums of products, it has six kernels as well. Batch norm folded into a convolution's weights saves no launch, because an activation remains, and convolution, norm and activation are one kernel in any case. PyTorch's fused attention differs from eager where a whole row is masked. So that pattern is an [example](../writing-a-pattern.md) and not installed; the generated attention kernel does not differ.
"""

PAGE = """# {name}

{summary}

{text}

![before and after]({name}.svg)

The picture shows the pattern on {shown}, followed by a `tanh`: {before} launches before, {after} after. `fuse check-pattern {name}` tests it on generated calls and near misses.

```text
{code}
```

[{file}](../../{file})
"""


def contents() -> dict[str, str]:
    """Every file of the folder, by name."""
    patterns = sorted((one for one in registered() if one.origin.startswith(OWN)), key=lambda one: one.origin)
    files: dict[str, str] = {}
    rows = [
        "| pattern | is | from | found in | eager | without | with | default |",
        "|---|---|---|---|--:|--:|--:|---|",
    ]
    for one in patterns:
        report, shown = example(one)
        files[f"{one.name}.svg"] = picture(report)
        files[f"{one.name}.md"] = page(one, report, shown)
        rows.append(row(one))
    sys.path.insert(0, str(ROOT))
    from benchmarks import zoo_patterns

    structures, on = _structures(), sum(one.enabled for one in patterns)
    files["README.md"] = INDEX.format(
        count=len(patterns),
        on=on,
        off=len(patterns) - on,
        rows="\n".join(rows),
        published=zoo_patterns.sentence(),
        fires=zoo_patterns.table(),
        one_kernel=structures["ONE_KERNEL"],
        library_call=structures["LIBRARY_CALL_AND_ONE"],
    )
    return files


def row(pattern: Pattern) -> str:
    """The line of the table of all patterns: launches of the structure that the pattern is for."""
    published = _published()[pattern.name]
    model, given = Function(published.function), published.arguments
    others = [one.name for one in registry.select(None, (), ()) if one.name not in PATTERN_PASSES]
    without = show(model, given, passes=others)
    with alone(pattern):
        report = show(model, given)
    fired = any(one.pattern == pattern.name for one in report.fired)
    default = "on" if pattern.enabled else "off" if fired else "off; recognised"
    (source,) = re.findall(r"Source: (\S+),\s+(\S+)\.$", inspect.getdoc(owner(pattern)) or "", re.MULTILINE)
    counts = without.before.launches, without.after.launches, report.after.launches
    link = f"[{pattern.name}]({pattern.name}.md)"
    told = [link, pattern.summary.replace("``", "`"), f"{source[0]}: `{source[1]}`", published.where]
    return f"| {' | '.join(map(str, (*told, *counts, default)))} |"


def picture(report: Report) -> str:
    """Both graphs beside each other."""
    titles = (title("before", report.before.launches), title("after", report.after.launches))
    return svg(report.before_sketch, sketch(report.graph), titles)


def page(pattern: Pattern, report: Report, shown: str) -> str:
    """The page of one pattern."""
    summary, _, text = (inspect.getdoc(owner(pattern)) or "").partition("\n\n")
    file = Path(inspect.getsourcefile(pattern.function) or "").relative_to(ROOT)
    parts = [one for one in (pattern.function, pattern.check, pattern.replace) if one is not None]
    code = "\n".join(textwrap.dedent(inspect.getsource(one)) for one in parts).rstrip()
    return PAGE.format(
        name=pattern.name,
        summary=summary.replace("``", "`"),
        text=text.replace("``", "`"),
        before=report.before.launches,
        after=report.after.launches,
        shown=shown,
        code=code,
        file=file,
    )


def owner(pattern: Pattern) -> Any:
    """The class that its author wrote."""
    return getattr(inspect.getmodule(pattern.function), pattern.name)


def _published() -> dict[str, Any]:
    """The structures that the patterns are for, by pattern."""
    sys.path.insert(0, str(ROOT))
    from tests.passes.patterns.published import PUBLISHED

    return PUBLISHED


def _structures() -> dict[str, str]:
    """What the tests say needs no pattern, in words."""
    sys.path.insert(0, str(ROOT))
    from tests.passes.patterns import test_without_patterns as held

    return {name: ", ".join(getattr(held, name)) for name in ("ONE_KERNEL", "LIBRARY_CALL_AND_ONE")}


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a page is stale")
    check = parser.parse_args().check
    files = contents()
    there = {path.name: path.read_text() for path in FOLDER.glob("*")}
    stale = [name for name in files.keys() | there.keys() if files.get(name) != there.get(name)]
    for name in sorted(stale):
        if check:
            print(f"docs/patterns/{name} is stale; run python docs/pattern_pages.py", file=sys.stderr)
        elif name in files:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / name).write_text(files[name])
        else:
            (FOLDER / name).unlink()
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
