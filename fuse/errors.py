"""The exception whose message is meant for the user as it stands, and the warning about faults that are not theirs."""

from __future__ import annotations


class FuseError(Exception):
    """A fault the user can act on: one line that names what, where and what to do.

    The command line prints it without a traceback and exits with 2 (``-v`` adds the traceback).

    >>> str(FuseError("no file 'model.py'; give the path of a model file"))
    "no file 'model.py'; give the path of a model file"
    """


class CaptureError(FuseError):
    """The model cannot be captured as one graph; ``fuse.compile`` runs it as eager would, with this as the reason.

    ``assigned``: attributes that the call assigns, as far as was seen: (name of the submodule, name, whether it
    is what the dictionary of that name holds).
    ``depends``: values that the call read came before it, so that another call may do without.
    """

    assigned: tuple[tuple[str, str, bool], ...] = ()
    depends: bool = False


class CompilerMissing(FuseError):
    """No compiler for kernels on this machine."""


class CompileFailed(FuseError):
    """The compiler rejected a source, took too long, or could not run."""


class FaultWarning(UserWarning):
    """Something in fuse or in a plugin failed. Results are right all the same: what it concerns runs less fused."""


def reason_of_fault(error: Exception) -> str:
    """The reason why something is declined that ``error``, which nobody expected, put an end to.

    >>> reason_of_fault(KeyError("stride"))
    "internal error, please report it: KeyError: 'stride'"
    """
    return f"internal error, please report it: {type(error).__name__}: {error}".partition("\n")[0]
