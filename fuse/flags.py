"""The flags that several verbs share: where output goes, which model is loaded, which launch budget holds.

Nothing here imports torch before a method needs it, so that ``fuse --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fuse.graph.loading.load import LoadedModel

T = TypeVar("T")
Verb = Callable[..., int]
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Console:
    """Where results go: data to stdout or a file, everything else to stderr."""

    as_json: bool
    output: Path | None
    quiet: bool
    color: str

    def emit(self, values: dict[str, Any], table: Callable[[], RenderableType]) -> None:
        """The result as JSON or as a table; the table is made only when it is shown."""
        from fuse.report.columns import as_text

        self.write(json_text(values) if self.as_json else as_text(table(), self._in_color()))

    def write(self, text: str) -> None:
        """Text to stdout, or to the file of ``--output``, which then appears whole or not at all."""
        from fuse.report.files import write

        if self.output is None:
            click.echo(text, color=True)  # the text has colours already, if wanted
        else:
            write(self.output, text + "\n")

    def say(self, note: str) -> None:
        """One line on stderr, unless ``--quiet``."""
        if not self.quiet:
            click.echo(f"fuse: {note}", err=True)

    def stage(self, doing: str) -> AbstractContextManager[None]:
        """Print ``doing`` on stderr if it takes over a second, unless ``--quiet``."""
        from fuse.report.progress import stage

        return stage(doing, self.quiet)

    def _in_color(self) -> bool:
        if self.color != "auto":
            return self.color == "always"
        return self.output is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


@dataclass(frozen=True)
class Request:
    """Options of a verb with a TARGET; options that the verb does not have keep these defaults."""

    target: str
    inputs: tuple[str, ...]
    settings: tuple[str, ...]
    patterns: tuple[str, ...]
    select: tuple[str, ...] | None
    ignore: tuple[str, ...] | None
    extend_select: tuple[str, ...] | None
    seed: int
    train: bool = False
    fuel: int | None = None
    max_launches: int | None = None
    fail_on_increase: Path | None = None

    def load(self, to: Console, real: bool, tuned: bool = False) -> LoadedModel:
        """The model and its inputs, on real or fake tensors; notes on how it was loaded go to stderr."""
        from fuse.graph.loading.load import load

        if not gc.isenabled():  # the command's own process: the collector never scans the modules imported so far
            gc.freeze()
            gc.enable()
        with to.stage(f"loading {self.target}"):
            loaded = load(
                self.target, self.inputs, self.settings, real=real, train=self.train, seed=self.seed, tuned=tuned
            )
        for note in loaded.notes:
            to.say(note)
        return loaded

    def with_model(self, to: Console, use: Callable[[LoadedModel], T]) -> T:
        """The result of ``use`` on the model with fake tensors; with real ones, and a note, if ``use`` needs values."""
        from fuse.graph.values.evaluating import NoData

        try:
            return use(self.load(to, real=False))
        except NoData as why:
            to.say(f"loaded for real, with its weights allocated, because {why}")
            return use(self.load(to, real=True))

    def with_patterns(self) -> AbstractContextManager[None]:
        """Register the patterns and files that ``--patterns`` names, within this context."""
        if not self.patterns:
            return contextlib.nullcontext()
        from fuse.rewrite.patterns.registry import also

        return also(self.patterns)

    def setting(self, name: str, value: int) -> Request:
        """The same request with one more constant set."""
        return replace(self, settings=(*self.settings, f"{name}={value}"))

    def passes(self) -> list[str]:
        """Names of the passes that the flags select; ``FuseError`` with a suggestion for an unknown one."""
        from fuse.rewrite.registry import select

        return [info.name for info in select(self.select, self.ignore or (), self.extend_select or ())]

    def within_budget(self, launches: int) -> bool:
        """Whether ``launches`` after the passes stay within the budget; if not, stderr says which limit they exceed."""
        from fuse.report.diff import launches_after, read

        excess = []
        if self.max_launches is not None and launches > self.max_launches:
            excess.append(f"more than --max-launches {self.max_launches:,}")
        if self.fail_on_increase is not None and launches > (base := launches_after(read(self.fail_on_increase))):
            excess.append(f"more than the {base:,} of {self.fail_on_increase}")
        plural = "" if launches == 1 else "es"
        for reason in excess:
            click.echo(f"fuse: failed: {launches:,} launch{plural} after the passes, {reason}", err=True)
        return not excess


def json_text(value: Any, levels: int = 3, indent: str = "") -> str:
    """JSON for people and programs: indented for ``levels`` levels; each deeper value stands on one line.

    >>> print(json_text({"a": [1, [2, 3]]}, levels=2))
    {
      "a": [
        1,
        [2, 3]
      ]
    }
    """
    if not levels or not value or not isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(name)}: {json_text(item, levels - 1, deeper)}" for name, item in value.items()]
    else:
        parts = [json_text(item, levels - 1, deeper) for item in value]
    begin, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{begin}\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}{end}"


def names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """``a,b`` as a tuple of names; None where the flag is not given."""
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


def path_option(*spellings: str, **keywords: Any) -> Decorator:
    """An option that takes the path of a file to write or read."""
    return click.option(*spellings, type=click.Path(dir_okay=False, path_type=Path), **keywords)


def _note_verbose(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    # The option is eager, and stored where errors are reported, so that it also holds for an error in a later flag.
    context.obj["verbose"] = context.obj["verbose"] or value


_OUTPUT_OPTIONS = (
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
    path_option("-o", "--output", help="Write the result to this file, whole or not at all."),
    click.option("-q", "--quiet", is_flag=True, help="No progress and no notes on stderr."),
    click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_note_verbose,
        help="Show tracebacks of errors, and warnings of torch.",
    ),
    click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="Bold headings; auto: on a terminal, unless NO_COLOR is set.",
    ),
)

_TARGET_OPTIONS = (
    click.argument("target"),
    click.option("--input", "inputs", multiple=True, metavar="NAME=f32[64,16]", help="Replace an input of the model."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set a constant of the file before the model is built.",
    ),
    click.option(
        "--patterns", multiple=True, metavar="NAME|FILE[:Name]", help="Match this pattern, or those of this file, too."
    ),
    click.option("--select", callback=names, metavar="PASSES", help="Run only these passes (commas between them)."),
    click.option("--ignore", callback=names, metavar="PASSES", help="Leave these passes out."),
    click.option("--extend-select", callback=names, metavar="PASSES", help="Run these passes as well."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and inputs."),
)

train_option = click.option("--train", is_flag=True, help="Training mode instead of eval(), with gradients.")
fuel_option = click.option("--fuel", type=click.IntRange(min=0), metavar="N", help="Stop after N rewrites.")
budget_options = (
    click.option(
        "--max-launches", type=click.IntRange(min=0), metavar="N", help="Exit with 1 if more launches are left."
    ),
    path_option("--fail-on-increase", metavar="BASE.json", help="Exit with 1 if more are left than in this report."),
)
tolerance_options = (
    click.option("--atol", type=float, help="Absolute tolerance; by default the dtype's."),
    click.option("--rtol", type=float, help="Relative tolerance; by default the dtype's."),
)


def output_verb(*own: Decorator) -> Callable[[Verb], Verb]:
    """Give a verb its ``own`` options and those of ``Console``, which it receives as one argument ``to``."""

    def decorate(function: Verb) -> Verb:
        @functools.wraps(function)
        def verb(**flags: Any) -> int:
            to = Console(**{name: flags.pop(name) for name in Console.__dataclass_fields__})
            return function(to=to, **flags)

        return _with_options(verb, (*own, *_OUTPUT_OPTIONS))

    return decorate


def target_verb(*own: Decorator) -> Callable[[Verb], Verb]:
    """Give a verb with a TARGET its options; it receives a ``request`` and a ``Console`` besides its ``own``."""

    def decorate(function: Verb) -> Verb:
        @functools.wraps(function)
        def verb(**flags: Any) -> int:
            request = Request(**{name: flags.pop(name) for name in Request.__dataclass_fields__ if name in flags})
            with request.with_patterns():
                return function(request=request, **flags)

        return output_verb(*_TARGET_OPTIONS, *own)(verb)

    return decorate


def _with_options(function: Callable[..., Any], options: tuple[Decorator, ...]) -> Callable[..., Any]:
    """All ``options`` applied, so that ``--help`` lists them in this order."""
    return functools.reduce(lambda decorated, option: option(decorated), reversed(options), function)
