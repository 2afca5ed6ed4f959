"""Write a result file whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fuse.errors import FuseError


def write(path: Path, text: str) -> None:
    """Write ``text`` to ``path``: a complete temporary file beside it is renamed to it.

    Links are followed. A file that is not regular (``/dev/null``, a pipe) is written directly. Raises
    ``FuseError`` when the file cannot be written; an existing file is then unchanged.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "report.json"
    >>> write(path, "{}")
    >>> path.read_text()
    '{}'
    """
    final = Path(os.path.realpath(path))
    try:
        if final.exists() and not final.is_file():
            final.write_text(text, encoding="utf-8")
            return
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise FuseError(f"cannot write {path}: {error.strerror or error}; give another file") from error
