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
from fuse.report.draw import title
from fuse.report.layered import svg
from fuse.report.show import Report, show
from fuse.report.sketch import sketch
from fuse.rewrite import registry
from fuse.rewrite.patterns.definition import Pattern
from fuse.rewrite.patterns.registry import alone, registered

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "patterns"
OWN = "fuse.passes.patterns."
PATTERN_PASSES = ("match_patterns", "pattern_gradients")

INDEX = """# The patterns that come with fuse

{count} fusions that published systems ship, as patterns; all but two are fifteen lines of code at most. {on} are on, because they are better than what the passes make by themselves; {off} are off. Those are looked for with `--patterns NAME`, or `--patterns all`, and known to `fuse explain`.

*Found in* is a small copy of the structure as its authors spell it ([tests/passes/patterns/published.py](../../tests/passes/patterns/published.py)); tests hold each pattern to it, and to two near misses that it declines. Launches are those of that copy: eager, fused without the pattern, fused with it alone. *Recognised*: the pattern is found, and has no `replace`, and no one region takes it in; the passes do what they do without it.

{rows}

`fuse patterns` lists them beside your own; `fuse check-pattern NAME` tries one on generated calls and near misses, as the tests do.
`fuse show` counts where they fired, and where they declined and why. These pages are made by `python docs/pattern_pages.py`.

## In published models

With `--patterns all`, batch 1, as `benchmarks/zoo.py` builds them (at most four layers) and of `models/`, these fire. Launches are eager's, and those left with no pattern and with all; *speed* is that with all of them over that with none, in processor time, where it was measured. {published}. `snntorch:leaky` and `snntorch:lapicque` have the same graph of kernels with and without; one such program beside its own copy measured 0.93 to 1.08, which is how far so few launches can be told apart. `python -m benchmarks.zoo_patterns` repeats it; every other pattern fires in the small copy of a structure that the table above names.

{fires}

## In other spellings, and in none

`python -m benchmarks.respelled` spells operators of these structures otherwise: 30,600 cases, each of 61 steps taken at least 398 times. All of 17,877 that keep the meaning matched, and none of 12,723 that change it was rewritten wrongly. `python -m benchmarks.metamorphic` does it with random expressions: 11,300 cases from seed 100,000 on, 89 steps at least 200 times each, 6,497 of 6,500 matched, none of 4,800 wrong; the three missed have one value twice, in two spellings. `python -m benchmarks.steps` sums up files of both. `python -m benchmarks.patterns` looks for all patterns in a graph with every one of these structures 32 times, 17,601 nodes: 1.03 s of processor time, where its capture takes 0.94 s (sixty of them 0.88 s); in an unrolled LSTM loop of 21,260 nodes 0.52 s, capture 0.54 s. Half the graph takes 0.58 and 0.27 s. That is of an idle machine, and without what is done once in a process: running each pattern that has its operators there, about 2 s for all.

`python -m benchmarks.reflexive --samples 2` gives operators of PyTorch's own list to themselves, alone, in a larger graph, in a loop and under `train()`: 3,820 of 4,850 samples match, 998 are told with the reason when the pattern is registered or by what it may not do, 32 are missed (99.3 % match or are told). They are of 9 of 676 operators: in a loop, values that do not depend on the step of a loop are shared between the steps (`masked.mean`, `matrix_rank`, `take_along_dim`), and a call or two each of `einsum`, `pad` in circles, `quantile`, `slice_scatter` and `svd`.

## What needs no pattern

The generic passes fuse neighbouring elementwise operators, reductions with what surrounds them, look-ups and movement, whatever they are called. A pattern for one of the following would find nothing to gain, and could keep a
larger fusion from happening. [tests/passes/patterns/test_without_patterns.py](../../tests/passes/patterns/test_without_patterns.py) holds the passes to it.

| becomes | structures |
|---|---|
| one kernel | {one_kernel} |
| one kernel, or a library call and one, by size | {library_call} |

Squeeze-and-excitation keeps its six launches: two products of a few numbers each, with reductions over the image before and a broadcast behind them; written as sums of products it has six kernels as well. Attention as one library call differs from eager
where a row is masked whole, so it is an [example](../writing-a-pattern.md) and not installed; as one generated kernel it does not. Batch norm folded into a convolution's weights saves no launch: an activation is left, and both are one kernel as they are.
"""

PAGE = """# {name}

{summary}

{text}

![before and after]({name}.svg)

{before} launches before, {after} after, in the picture: {shown}, with a `tanh` that reads the result. Tried by `fuse check-pattern {name}` on generated calls and near misses.

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
