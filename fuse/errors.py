"""The exceptions whose messages are printed to users unchanged, and the warning about internal faults."""

from __future__ import annotations


class FuseError(Exception):
    """A fault the user can act on: one line that names what, where and what to do.

    The command line prints it without a traceback and exits with 2 (``-v`` adds the traceback).

    >>> str(FuseError("no file 'model.py'; give the path of a model file"))
    "no file 'model.py'; give the path of a model file"
    """


class CaptureError(FuseError):
    """The model cannot be captured as one graph; ``fuse.compile`` runs it as eager would, with this as the reason.

    ``assigned``: the attributes that the call was seen to assign: (name of the submodule, name of the attribute,
    whether the call changed entries of a dictionary there).
    ``depends``: whether the call read values of tensors before it failed; with other values, it may be captured.
    """

    assigned: tuple[tuple[str, str, bool], ...] = ()
    depends: bool = False


class CompilerMissing(FuseError):
    """No compiler for kernels on this machine."""


class CompileFailed(FuseError):
    """The compiler rejected a source, took too long, or could not run."""


class FaultWarning(UserWarning):
    """Something in fuse or in a plugin failed. Results are still right: the affected part runs less fused."""


def reason_of_fault(error: Exception) -> str:
    """The reason to decline a candidate on which the unexpected ``error`` was raised.

    >>> reason_of_fault(KeyError("stride"))
    "internal error, please report it: KeyError: 'stride'"
    """
    return f"internal error, please report it: {type(error).__name__}: {error}".partition("\n")[0]
