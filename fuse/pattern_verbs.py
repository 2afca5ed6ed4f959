"""The verbs of the command ``fuse`` for patterns: explain why one did or did not fire, check one, list all.

Like the other verbs (:mod:`fuse.verbs`), each calls what Python users call."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fuse.errors import FuseError
from fuse.flags import Console, Request, output_verb, target_verb
from fuse.verbs import FAILED, GOOD, TRUST, broken_told

if TYPE_CHECKING:
    from fuse.graph.loading.load import LoadedModel
    from fuse.report.explain import Explanation


@click.command(epilog=TRUST)
@target_verb(
    click.argument("pattern", required=False),
    click.option("--near", type=click.IntRange(1), metavar="N", help="Rank installed patterns by how close they come."),
)
def explain(request: Request, to: Console, pattern: str | None, near: int | None) -> int:
    """Explain why a pattern did or did not fire, by its nearest candidate, or list what was tried on a line.

    PATTERN is the name of an installed pattern, or path/to/file.py[:Name], a file that is run like TARGET's. With
    FILE.py:LINE[-LINE] in its place, list every rewrite tried on the operators of these lines, by pass and pattern,
    with the reasons of those that were declined.
    """
    from fuse.report import explain_lines as by_lines
    from fuse.report.explain import explain as find_reason
    from fuse.report.explain import explanation_table
    from fuse.rewrite.patterns import registry

    if (pattern is None) == (near is None):
        raise FuseError("say what to explain: a PATTERN, FILE.py:LINE[-LINE], or --near N")
    passes = request.passes()

    def close(loaded: LoadedModel) -> list[by_lines.Close]:
        with to.stage("capturing and matching"):
            return by_lines.nearest_patterns(loaded.model, loaded.args, loaded.kwargs, passes=passes)

    if pattern is None:
        patterns = request.with_model(to, close)[:near]
        to.emit(by_lines.values_of(request.target, patterns), lambda: by_lines.nearest_table(request.target, patterns))
        return GOOD
    if lines := by_lines.lines_of(pattern):
        told = request.with_model(
            to,
            lambda one: by_lines.explain_lines(
                one.model, one.args, one.kwargs, lines, passes=passes, target=request.target
            ),
        )
        to.emit(told.to_dict(), lambda: by_lines.lines_table(told))
        return GOOD
    file, name = registry.split(pattern)
    chosen = registry.load(file, name) if file is not None else registry.find(pattern)

    def found(loaded: LoadedModel) -> Explanation:
        with to.stage("capturing and matching"):
            return find_reason(loaded.model, loaded.args, loaded.kwargs, chosen, passes=passes, target=request.target)

    explanation = request.with_model(to, found)
    to.emit(explanation.to_dict(), lambda: explanation_table(explanation))
    return GOOD


@click.command(name="check-pattern", epilog=TRUST.replace("The file of TARGET", "FILE"))
@output_verb(click.argument("file"))
def check_pattern(to: Console, file: str) -> int:
    """Try patterns on generated calls, and on near misses that they must decline.

    FILE is path/to/file.py[:Name], or the name of an installed pattern. Shapes, strides, dtypes, special values,
    aliased inputs and gradients vary; a pattern that fails is not used anywhere, and its counterexample is printed.
    Patterns of one file that shadow each other, turn into each other, or can never fire, are named.
    """
    from rich.text import Text

    from fuse.check.lint import lint
    from fuse.check.pattern import SCHEMA_VERSION, verify
    from fuse.rewrite.patterns import registry

    path, name = registry.split(file)
    if path is None:
        chosen = [registry.find(file)]
    elif name is None:
        chosen = list(registry.load_all(path).values())
    else:
        chosen = [registry.load(path, name)]
    if not chosen:
        raise FuseError(f"{file} has no pattern")
    verifications = []
    for one in chosen:
        with to.stage(f"trying {one.name}"):
            verifications.append(verify(one))
    findings = lint([one.pattern for one in verifications if one.passed])
    values = {
        "schema_version": SCHEMA_VERSION,
        "patterns": [one.to_dict() for one in verifications],
        "together": [asdict(finding) for finding in findings],
    }
    lines = map(str, (*verifications, *findings))
    to.emit(values, lambda: Text("\n".join(lines), no_wrap=True, overflow="ignore"))
    return GOOD if all(one.passed for one in verifications) else FAILED


@click.command()
@output_verb()
def patterns(to: Console) -> int:
    """List the installed patterns, in the order in which they are matched."""
    from fuse.report.columns import columns
    from fuse.rewrite.patterns.registry import broken_plugins, registered

    installed: list[dict[str, Any]] = [
        {
            "name": one.name,
            "origin": one.origin,
            "source": one.source,
            "priority": one.priority,
            "enabled": one.enabled,
            "summary": one.summary,
        }
        for one in sorted(registered(), key=lambda one: -one.priority)
    ]
    broken = broken_told(broken_plugins(), to)
    rows = [[one["name"], one["source"], one["summary"]] for one in installed]
    to.emit(
        {"patterns": installed, "broken": broken},
        lambda: columns(["pattern", "from", "is"], rows, numbers_from=3),
    )
    return GOOD
