"""``fuse precision``: errors in a narrow dtype, the operator where they begin, and the operators to keep in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from fuse.check.precision.chains import Chain, Operator
from fuse.check.precision.errors import Errors, PrecisionTarget
from fuse.check.precision.keep import Cost, Recommendation, recommend
from fuse.check.precision.run import chains
from fuse.errors import FuseError
from fuse.graph.precision import Precision


@dataclass(frozen=True)
class PrecisionReport:
    """The result of :func:`precision`: the operators of both graphs, and the operators to keep in float32.

    ``fused`` are the operators after the passes, run as generated kernels.
    """

    dtype: str
    target: PrecisionTarget
    eager: Chain
    fused: Chain
    recommended: Recommendation | None
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether no operator errs by more than its dtype explains, and both results reach the target."""
        right = all(chain.first_beyond is None for chain in (self.eager, self.fused))
        return right and all(self.target.met(chain.result) for chain in (self.eager, self.fused))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; infinities are written as text."""
        return {
            "schema_version": 1,
            "dtype": self.dtype,
            "goal": str(self.target),
            "passed": self.passed,
            **{name: _chain(chain, self.target) for name, chain in (("eager", self.eager), ("fused", self.fused))},
            "keep": _recommended(self.recommended) if self.recommended else None,
            "keep_reason": self.reason or (self.recommended.reason if self.recommended else "") or None,
        }


def precision(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: str = "bf16",
    target: str = "sqnr>=40",
    passes: Sequence[str] | None = None,
    seed: int = 0,
) -> PrecisionReport:
    """Run a float32 model in ``dtype`` and say where it loses accuracy.

    Raises:
        FuseError: the call cannot be captured in that dtype, or the dtype or target does not exist.

    >>> import torch
    >>> report = precision(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(2, 4),))
    >>> report.passed, report.eager.first_beyond, report.recommended.precision
    (True, None, fuse.Precision('bf16', keep=()))
    """
    goal = PrecisionTarget.parse(target)
    eager, fused = chains(model, args, kwargs or {}, Precision(dtype), passes=passes, seed=seed)
    assert fused is not None
    try:
        found = recommend(model, args, kwargs or {}, dtype, goal, passes=passes, seed=seed)
    except FuseError as error:
        return PrecisionReport(dtype, goal, eager, fused, None, str(error))
    return PrecisionReport(dtype, goal, eager, fused, found)


def crossing(chain: Chain, target: PrecisionTarget) -> Operator | None:
    """The first operator at whose result the propagated error misses the target."""
    return next((one for one in chain.operators if "float" in one.dtype and not target.met(one.propagated)), None)


def _chain(chain: Chain, target: PrecisionTarget) -> dict[str, Any]:
    crossed = crossing(chain, target)
    return {
        "result": _errors(chain.result),
        "first_beyond": chain.first_beyond.name if chain.first_beyond else None,
        "crosses": crossed.name if crossed else None,
        "operators": [_operator(one) for one in chain.operators],
    }


def _operator(one: Operator) -> dict[str, Any]:
    return {
        "name": one.name,
        "op": one.op,
        "source": one.source,
        "dtype": one.dtype,
        "shape": list(one.shape),
        "propagated": _errors(one.propagated),
        "isolated": _errors(one.isolated) if one.isolated else None,
        "allowed": one.allowed,
        "beyond": one.beyond,
        "range": asdict(one.range),
        "note": one.note,
    }


def _errors(found: Errors) -> dict[str, Any]:
    return {name: finite(value) for name, value in {**asdict(found), "sqnr": found.sqnr}.items()}


def _recommended(found: Recommendation) -> dict[str, Any]:
    return {
        "code": found.code if found.precision else None,
        "keep": list(found.precision.keep) if found.precision else None,
        "before": _errors(found.before),
        "after": _errors(found.after),
        "confirmed": _errors(found.confirmed) if found.confirmed else None,
        "cost": {name: _cost(cost) for name, cost in (("before", found.plain), ("after", found.kept))},
        "trials": found.trials,
    }


def _cost(cost: Cost | None) -> dict[str, Any] | None:
    return asdict(cost) if cost else None


def finite(value: float) -> float | str:
    """A number that JSON can hold.

    >>> finite(1.5), finite(math.inf)
    (1.5, 'inf')
    """
    return value if math.isfinite(value) else str(value)
