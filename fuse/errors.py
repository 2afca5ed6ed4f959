"""The one exception type whose message is meant for the user as it stands."""

from __future__ import annotations


class FuseError(Exception):
    """A fault the user can act on: one line that names what, where and what to do.

    The command line prints it without a traceback and exits with 2 (``-v`` adds the traceback).

    >>> str(FuseError("no file 'model.py'; give the path of a model file"))
    "no file 'model.py'; give the path of a model file"
    """


class CaptureError(FuseError):
    """The model cannot be captured as one graph; ``fuse.compile`` runs it as eager would, with this as the reason."""
