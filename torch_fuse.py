"""The command ``fuse``, under a name that no other package has: ``python -m torch_fuse`` is the same.

Other packages install a module called ``fuse``, too (bindings of file systems in user space, for one), and a file
``fuse.py`` may lie in the working directory. Python takes whichever it finds first. The command therefore begins here,
and names the conflict in one line instead of failing in code that is not its own.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

OURS = Path(__file__).resolve().parent / "fuse" / "__init__.py"
MARK = "torch-fuse"
"""What no other package of this name says of itself."""


def main() -> None:
    """Run the command, or say which other module of its name is in the way; never returns."""
    if (other := found_first()) is not None:
        print(f"fuse: error: {other} {_IN_THE_WAY}", file=sys.stderr)
        sys.exit(2)
    if (hidden := hidden_beside()) is not None:
        print(f"fuse: warning: {hidden} {_HIDDEN}", file=sys.stderr)
    from fuse.cli import main as command

    command()


_IN_THE_WAY = (
    "is another module called fuse, which Python finds before torch-fuse: uninstall or rename it, "
    "or install torch-fuse into a virtual environment of its own"
)
_HIDDEN = (
    "is another module called fuse, which torch-fuse hides: programs that import it get torch-fuse; "
    "install one of the two into a virtual environment of its own"
)


def found_first() -> str | None:
    """The file that ``import fuse`` runs, where it is not ours."""
    spec = find_spec("fuse")
    found = spec.origin if spec is not None else None
    if found is None or Path(found).resolve() != OURS:
        return str(found or "a folder without __init__.py")
    return None if MARK in OURS.read_text(encoding="utf-8")[:400] else str(OURS)  # written over by another package


def hidden_beside() -> str | None:
    """A module called ``fuse`` that lies elsewhere on the path, behind ours."""
    candidates = (Path(folder, name) for folder in sys.path for name in ("fuse.py", "fuse/__init__.py"))
    return next((str(other) for other in candidates if other.is_file() and other.resolve() != OURS), None)


if __name__ == "__main__":
    main()
