"""The command ``fuse``: prints data on stdout and the rest on stderr, and an error as one line.

Exit status: 0 good; 1 a check failed or a budget was exceeded; 2 usage, loading, capture or internal error.
The verbs are :mod:`fuse.verbs` and :mod:`fuse.pattern_verbs`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence

import click

from fuse.errors import FuseError
from fuse.pattern_verbs import check_pattern, explain, patterns
from fuse.verbs import GOOD, commands

for _verb in (check_pattern, explain, patterns):
    commands.add_command(_verb)

ERROR, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the command ``fuse``; never returns."""
    gc.disable()  # imported modules stay, and scanning them is slow; Request.load collects again
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command and give its exit status; an error becomes one line on stderr.

    >>> run(["--version"])
    fuse, version 0.1.0
    0
    """
    state = {"verbose": False}
    # click would take the argument after --kernels (TARGET, say) for its value, which may be left out.
    arguments = ["--kernels=source" if argument == "--kernels" else argument for argument in arguments]
    with warnings.catch_warnings(), _torch_log_for_verbose_only(state):
        warnings.showwarning = functools.partial(_show_warning, state)
        try:
            status = commands.main(arguments, prog_name="fuse", standalone_mode=False, obj=state)
            sys.stdout.flush()
            return int(status or GOOD)
        except BrokenPipeError:
            # The reader (`| head`) has closed the pipe; without this, Python complains when it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return GOOD
        except (KeyboardInterrupt, click.Abort):
            click.echo("fuse: interrupted", err=True)
            return INTERRUPTED
        except click.ClickException as error:
            message = error.format_message()
        except FuseError as error:
            message = str(error)
            _show_traceback(state)
        except Exception as error:
            message = _unexpected(error, state["verbose"])
            _show_traceback(state)
    click.echo(f"fuse: error: {_one_line(message)}{_advice(message)}", err=True)
    return ERROR


def _unexpected(error: Exception, verbose: bool) -> str:
    """An exception of the user's code at its line, or a fault of fuse."""
    from fuse.graph.sources import line_of, raised_by_user  # imports torch, which an option's help does not need

    text = f"{type(error).__name__}: {_one_line(str(error))}"
    if raised_by_user(error):
        return f"{line_of(error)} raised {text}"
    return f"internal error, {text}" + ("" if verbose else "; -v shows where")


def _advice(message: str) -> str:
    """The way out of a frequent error."""
    if unknown := re.match(r"No such command '(.+\.py(?::\w+)?)'", message):
        return f" `fuse show {unknown[1]}` counts its launches, `fuse --help` lists the commands"
    if "does not require grad and does not have a grad_fn" in message:
        return "; inference runs without gradients, --train with them"
    return ""


def _show_traceback(state: dict[str, bool]) -> None:
    if state["verbose"]:
        traceback.print_exc()


def _show_warning(
    state: dict[str, bool], message: Warning | str, category: type[Warning], filename: str, *_place: object
) -> None:
    """Print a warning as one line; torch's warnings about itself appear with ``--verbose`` only."""
    about_torch = f"{os.sep}torch{os.sep}" in filename or issubclass(category, (DeprecationWarning, FutureWarning))
    if state["verbose"] or not about_torch:
        click.echo(f"fuse: warning: {_one_line(str(message))}", err=True)


@contextlib.contextmanager
def _torch_log_for_verbose_only(state: dict[str, bool]) -> Iterator[None]:
    """Hide the tracebacks that fake tensors log for shape errors: the user gets one line of ours anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def admits(_record: logging.LogRecord) -> bool:
        return state["verbose"]

    logger.addFilter(admits)
    try:
        yield
    finally:
        logger.removeFilter(admits)


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
