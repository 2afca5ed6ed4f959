"""Read and execute the one Python file a user named, and blame failures on the user's own line.

The file runs with the user's rights, as a module under a name of its own. Its folder is importable while it loads, as
it would be with ``python model.py``, and no longer than that.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

from fuse.errors import FuseError
from fuse.graph.loading.settings import Override, apply_settings

_LIBRARIES = (Path(__file__).parents[2], Path(sysconfig.get_path("stdlib")))


@dataclass(frozen=True)
class ModelFile:
    """A model file, read and compiled with its settings applied, not yet executed.

    ``shown`` is the path as the user wrote it, for messages; ``choice`` is the ``Name`` of ``path.py:Name``.
    """

    path: Path
    shown: str
    choice: str | None
    code: CodeType


def read_model_file(target: str, settings: Sequence[Override] = ()) -> ModelFile:
    """Read ``path/to/model.py`` or ``path/to/model.py:Name`` without executing anything.

    Raises ``FuseError`` for a file that is missing, unreadable, not Python or not valid Python, and for a setting that
    does not fit it.

    >>> read_model_file("models/absent/none.py")
    Traceback (most recent call last):
    fuse.errors.FuseError: no file models/absent/none.py
    """
    shown, choice = _split_target(target)
    path = Path(shown).resolve()
    if path.is_dir():
        raise FuseError(
            f"{shown} is a folder; give the path of a model file, such as {os.path.join(shown, 'model.py')}"
        )
    if path.suffix != ".py":
        raise FuseError(f"{shown} is not a .py file; give the path of a model file, or path/to/model.py:Name")
    if not path.exists():
        raise FuseError(_missing(shown))
    try:
        tree = ast.parse(path.read_bytes(), str(path))
        tree = apply_settings(tree, settings, shown)
        code = compile(tree, str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise FuseError(f"cannot read {shown}: {error.strerror}") from error
    except SyntaxError as error:
        raise FuseError(f"{shown}:{error.lineno or 1}: {type(error).__name__}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise FuseError(f"{shown} is not Python source: {error}") from error
    return ModelFile(path, shown, choice, code)


def _split_target(target: str) -> tuple[str, str | None]:
    path, colon, choice = target.rpartition(":")
    if colon and path.endswith(".py"):
        if not choice.isidentifier():
            raise FuseError(f"{target!r} names no class or object; write path/to/model.py:Name")
        return path, choice
    return target, None


def _missing(shown: str) -> str:
    folder = Path(shown).parent
    siblings = [file.name for file in folder.glob("*.py")] if folder.is_dir() else []
    close = difflib.get_close_matches(Path(shown).name, siblings, n=1)
    return f"no file {shown}" + (f"; did you mean {folder / close[0]}?" if close else "")


def execute(file: ModelFile) -> ModuleType:
    """Run the file as a module and return it. What it raises comes out as it is (see ``blame``).

    The module stays in ``sys.modules``, where pickling and type hints look for it, under a name no import clashes with.
    """
    name = f"fuse_model_{file.path.stem}_{zlib.crc32(os.fsencode(file.path)):08x}"
    module = ModuleType(name)
    module.__file__ = str(file.path)
    sys.modules[name] = module
    try:
        exec(file.code, module.__dict__)
    except BaseException:  # Ctrl-C and exit too
        del sys.modules[name]
        raise
    return module


@contextmanager
def user_code_runs(folder: Path) -> Iterator[None]:
    """A context in which ``folder`` comes first on ``sys.path``, and prints go to stderr.

    Modules imported from the folder are forgotten afterwards. So the ``helper.py`` of one model file is never used for
    another, and a module imported under fake tensors is never used for real.
    """
    path_before, modules_before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:] = path_before
        imported = {name for name in sys.modules if name.partition(".")[0] not in modules_before}
        local = {name for name in imported if "." not in name and _lives_in(sys.modules[name], folder)}
        for name in imported:
            if name.partition(".")[0] in local:
                del sys.modules[name]


def _lives_in(module: ModuleType, folder: Path) -> bool:
    """Whether a top-level module was imported directly from this folder, not from an environment in a subfolder."""
    spec = module.__spec__
    if spec is None:
        return False
    paths = spec.submodule_search_locations or ([spec.origin] if spec.has_location and spec.origin else [])
    return any(Path(path).parent == folder for path in paths)


@contextmanager
def blame(file: ModelFile, doing: str, fallback: str | None = None, misfit: str = "") -> Iterator[None]:
    """A context that turns any error of user code into one line, which starts with the user's line (or ``fallback``).

    ``misfit`` is added where the call itself failed, because its arguments did not fit. Ctrl-C passes through.
    """
    try:
        yield
    except FuseError:
        raise
    except SystemExit as error:
        line = user_line(error, file) or file.shown
        advice = 'put what should only run as a script under `if __name__ == "__main__":`'
        raise FuseError(f"{line}: the file called exit while {doing}; {advice}") from error
    except SyntaxError as error:
        raise FuseError(f"{_shown(error.filename or '', file)}:{error.lineno}: {summary(error)}") from error
    except ImportError as error:
        advice = "install what is missing into the environment that runs fuse"
        raise FuseError(f"{user_line(error, file) or file.shown}: {summary(error)}; {advice}") from error
    except Exception as error:  # whatever the user's code raises
        passed = user_line(error, file)
        advice = misfit if passed is None and isinstance(error, TypeError) else ""
        raise FuseError(f"{passed or fallback or file.shown}: {doing}: {summary(error)}{advice}") from error


def summary(error: BaseException) -> str:
    """The exception's type and the first line of its message.

    >>> summary(ValueError("sizes differ\\nlong story"))
    'ValueError: sizes differ'
    """
    message = error.msg if isinstance(error, SyntaxError) else str(error).strip()
    first = message.splitlines()[0] if message else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def user_line(error: BaseException, file: ModelFile) -> str | None:
    """``model.py:41``: the innermost line of the file, or of modules beside it, that the exception passed through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_code(frame.filename, file):
            return f"{_shown(frame.filename, file)}:{frame.lineno}"
    return None


def is_user_code(filename: str, file: ModelFile) -> bool:
    """Whether a source file is the model file, or lies beside or below it and belongs to no library."""
    path = Path(filename)
    if path == file.path:
        return True
    is_library = "site-packages" in path.parts or any(path.is_relative_to(library) for library in _LIBRARIES)
    return path.is_relative_to(file.path.parent) and not is_library


def _shown(filename: str, file: ModelFile) -> str:
    path = Path(filename)
    if path == file.path or not path.is_relative_to(file.path.parent):
        return file.shown if path == file.path else filename
    return str(Path(file.shown).parent / path.relative_to(file.path.parent))
