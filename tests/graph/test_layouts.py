"""The strides of captured results are eager's, whatever the operands' layouts: orders, gaps, broadcasts, dtypes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fuse
from fuse import ops
from fuse.graph.capture import capture
from fuse.graph.fakes.fake_operators import FakeRunner
from fuse.graph.fakes.layouts import eager_strides
from fuse.graph.outputs import outputs_of
from fuse.kernel import lower  # noqa: F401  (importing registers the recipes)
from fuse.kernel.recipes.registry import find_recipe
from tests.samples import Holder

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float32, torch.int64, torch.float64, torch.bool, torch.float16)
CALLS_EACH = 12


def lowered_elementwise() -> Iterator[OpOverload]:
    """Operators whose layout no run ever confirms, because a generated kernel computes them."""
    for name in sorted(dir(aten)):
        packet = getattr(aten, name, None)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            of_torchscript = overload == "hacked_twin"  # which is never dispatched
            if of_torchscript or not any(str(argument.type) == "Tensor" for argument in op._schema.arguments):
                continue
            if find_recipe(op) and ops.is_pointwise(op) and not ops.mutates(op) and not ops.is_composite(op):
                yield op


def tensor(rng: random.Random, shape: list[int], dtype: torch.dtype) -> Tensor:
    """Ones, their dimensions in any order in memory, perhaps with gaps or broadcast along one."""
    order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.6 else list(range(len(shape)))
    sizes = [shape[d] for d in order]
    if sizes and rng.random() < 0.25:
        value = torch.ones([*sizes[:-1], 2 * sizes[-1]], dtype=dtype)[..., ::2]
    elif sizes and rng.random() < 0.33:
        spread = rng.randrange(len(sizes))
        value = torch.ones([1 if d == spread else n for d, n in enumerate(sizes)], dtype=dtype).expand(sizes)
    else:
        value = torch.ones(sizes, dtype=dtype)
    return value.permute([order.index(d) for d in range(len(shape))])


def arguments(rng: random.Random, op: OpOverload) -> tuple[Any, ...]:
    """Operands of one shape after broadcasting, other arguments left out where they may be."""
    whole = [rng.choice([1, 2, 3, 4]) for _ in range(rng.randrange(5))]
    mixed = rng.random() < 0.5 and "backward" not in op._schema.name  # a gradient has the dtype of what it belongs to
    dtypes = DTYPES if mixed else (rng.choice(DTYPES),)
    values: list[Any] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            break
        if kind == "Tensor" or (kind == "Optional[Tensor]" and "clamp" in op._schema.name):
            own = [1 if rng.random() < 0.2 else n for n in whole[rng.choice([0, 0, rng.randrange(len(whole) + 1)]) :]]
            dtype = torch.bool if argument.name in ("condition", "mask") else rng.choice(dtypes)
            values.append(tensor(rng, own, dtype))
        elif argument.has_default_value() and "clamp" not in op._schema.name:
            values.append(argument.default_value)
        else:
            values.append(rng.choice([0, 1, 2.5]))
    return tuple(values)


def strides(result: Any) -> list[tuple[Any, ...]]:
    """Dtype, shape, and the strides of dimensions of more than one element."""
    leaves = pytree.tree_leaves(result)
    return [(t.dtype, t.shape, [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]) for t in leaves]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", lowered_elementwise(), ids=str)
def test_an_elementwise_result_lies_as_in_eager(op: OpOverload) -> None:
    rng = random.Random(str(op))
    compared = 0
    for _ in range(20 * CALLS_EACH):
        args = arguments(rng, op)
        kwargs = {"rounding_mode": "floor"} if op._overloadname.endswith("_mode") else {}
        try:
            expected = op(*args, **kwargs)
        except RuntimeError:  # not for these dtypes or shapes
            continue
        mode = FakeTensorMode()
        fakes = pytree.tree_map_only(Tensor, mode.from_tensor, args)
        with mode:
            assert strides(FakeRunner(mode).run(op, fakes, kwargs)) == strides(expected), [
                strides([a]) if isinstance(a, Tensor) else a for a in args
            ]
        compared += 1
        if compared == CALLS_EACH:
            return
    assert compared


def test_a_lookup_lies_as_in_eager() -> None:
    """Indices in any order in memory, broadcast, of both dtypes, neighbours or not."""
    rng = random.Random(0)
    for _ in range(300):
        shape, common = ([rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 4))] for _ in range(2))
        indices: list[Tensor | None] = []
        for _ in range(rng.randint(1, len(shape))):
            own = [1 if rng.random() < 0.2 else n for n in common[rng.choice([0, rng.randrange(len(common))]) :]]
            dtype = rng.choice([torch.int64, torch.int64, torch.int32])
            indices.append(None if rng.random() < 0.4 else torch.zeros_like(tensor(rng, own, dtype)))
        if all(index is None for index in indices):
            continue
        args = tensor(rng, shape, torch.float32), indices
        mode = FakeTensorMode()
        with mode:
            result = FakeRunner(mode).run(aten.index.Tensor, pytree.tree_map_only(Tensor, mode.from_tensor, args), {})
        assert strides(result) == strides(aten.index.Tensor(*args)), (shape, indices)


@pytest.mark.parametrize("along", [0, 1])
def test_a_lookup_by_a_transposed_index(along: int, same_function: Any) -> None:
    index = torch.randint(0, 4, (16, 4)).t()
    same_function(lambda x: x[index] if along == 0 else x[:, index] * 2, torch.randn(4, 4), exact=False)


ORDERS = {"rows": (0, 1, 2, 3), "channels_last": (0, 2, 3, 1), "batch_inside": (1, 2, 3, 0), "reversed": (3, 2, 1, 0)}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 3, 4, 4), (2, 1, 4, 4), (2, 3, 1, 1)])
def test_batch_norm_lies_as_in_eager(
    size: tuple[int, ...], order: tuple[int, ...], training: bool, same_function: Any
) -> None:
    x = torch.randn([size[d] for d in order]).permute([order.index(d) for d in range(4)])
    mean, variance = torch.zeros(size[1]), torch.ones(size[1])
    same_function(lambda x: F.batch_norm(x, mean.clone(), variance.clone(), training=training) * 2, x, exact=False)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 3, 4, 4), (2, 1, 4, 4), (2, 3, 1, 1)])
def test_the_gradient_of_batch_norm_lies_as_in_eager(size: tuple[int, ...], order: tuple[int, ...]) -> None:
    def laid(order: tuple[int, ...]) -> Tensor:
        return torch.randn([size[d] for d in order]).permute([order.index(d) for d in range(4)])

    op, weight = aten.native_batch_norm_backward.default, torch.ones(size[1])
    for values in (laid(order), laid((1, 2, 0, 3))):
        for gradient in (*map(laid, ORDERS.values()), torch.ones(()).expand(size)):
            statistics = values.mean((0, 2, 3)), values.std((0, 2, 3), correction=0)
            args = (gradient, values, weight, None, None, *statistics, True, 1e-5, [True, True, True])
            result = op(*args)[0]
            assert eager_strides(op, args, {}, result) == result.stride()


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)])
def test_an_encoder_layer_lies_as_in_eager(order: tuple[int, ...], norm_first: bool, same_function: Any) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first).eval()
    size = (2, 5, 16)
    x = torch.randn([size[d] for d in order]).permute([order.index(d) for d in range(3)])
    same_function(lambda x: layer(x) * 2, x, exact=False)


OF_IMAGES: dict[str, Any] = {
    "group_norm": lambda x: F.group_norm(x, 1),
    "instance_norm": lambda x: F.instance_norm(F.pad(x, (1, 0))),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "convolution": lambda x: F.conv2d(x, torch.ones(2, x.shape[1], 2, 2), padding=1),
    "transposed_convolution": lambda x: F.conv_transpose2d(x, torch.ones(x.shape[1], 2, 2, 2)),
    "max_pool": lambda x: F.max_pool2d(x, 2, padding=1),
    "max_unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, padding=1, return_indices=True), 2),
    "average_pool": lambda x: F.avg_pool2d(x, 2, padding=1),
    "adaptive_pool": lambda x: F.adaptive_avg_pool2d(x, (2, 1)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "padded": lambda x: F.pad(x, (1, 1, 0, 1)),
    "reflected": lambda x: F.pad(x, (1, 0, 0, 0), mode="replicate"),
    "shuffled": lambda x: F.pixel_unshuffle(F.pixel_shuffle(F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 4)), 2), 2),
    "softmax": lambda x: F.softmax(x, 1),
    "joined": lambda x: torch.cat([x, x + 1], 1),
    "stacked": lambda x: torch.stack([x, x + 1], 1),
    "summed": lambda x: x.sum(1, keepdim=True),
    "cumulated": lambda x: x.cumsum(1),
    "sorted": lambda x: x.sort(1)[0],
    "rolled": lambda x: x.roll(1, 1),
    "channels shuffled": lambda x: F.channel_shuffle(torch.cat([x, x], 1), 2),
    "flipped": lambda x: x.flip(1),
    "repeated": lambda x: x.repeat(1, 2, 1, 1),
    "masked": lambda x: x.masked_fill(x > 0, 1.0),
    "shifted": lambda x: x + 1,
    "compared": lambda x: x > 0,
    "doubled": lambda x: x + x,
    "rectified": lambda x: torch.relu(x),
    "clamped": lambda x: x.clamp(-1, 1),
    "squared": lambda x: x**2,
    "subtracted": lambda x: 1 - x,
    "divided": lambda x: 1 / (x + 2),
    "steep": lambda x: F.leaky_relu(x, 0.2),
    "added": lambda x: x + torch.ones(x.shape[-1]),
    "chosen": lambda x: torch.where(x > 0, x, 0.0),
    "converted": lambda x: x.double(),
    "cloned": lambda x: x.clone(),
    "labelled": lambda x: F.nll_loss(x, (x[:, 0] * 0).long(), reduction="none"),
    "against": lambda x: F.binary_cross_entropy(torch.full(x.shape, 0.5), (x > 0).float(), reduction="none"),
    "phase": lambda x: torch.complex(x, x + 1).angle(),
    "viewed": lambda x: x.flatten(2).unsqueeze(1),
}


class Log(TorchDispatchMode):
    """What eager dispatches, and how the results lie."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self.entries.append((str(op), layouts(result)))
        return result


def layouts(result: Any) -> list[Any]:
    """Strides, and what decides how the next operator lays out its result."""
    values = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
    return [*strides(values), *(suggest_memory_format(value) for value in values if value.dim() == 4)]


@pytest.mark.parametrize("size", [(2, 3, 4, 5), (1, 3, 4, 4), (2, 1, 4, 4), (2, 3, 1, 1)])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("name", OF_IMAGES)
def test_what_is_made_of_an_image_lies_as_in_eager(name: str, order: tuple[int, ...], size: tuple[int, ...]) -> None:
    x = torch.randn([size[d] for d in order]).permute([order.index(d) for d in range(4)])
    model = Holder(lambda s, x: OF_IMAGES[name](x))
    with Log() as log, torch.no_grad():
        model(x)
    last = capture(model, (x,)).meta["signature"].dispatches[-1]
    assert (str(last.op), layouts(last.result)) == log.entries[-1]


X = torch.rand(3, 4, 5) + 3
EXPONENTS = torch.randint(0, 3, (3, 4, 5))


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (lambda x: torch.mvlgamma(x, 2), (X.transpose(0, 2),)),
        (lambda x: torch.mvlgamma(x, 2), (X.permute(1, 2, 0),)),
        (torch.ldexp, (X, EXPONENTS.transpose(0, 2).contiguous().transpose(0, 2))),
        (torch.ldexp, (X[:, ::2], EXPONENTS[:, :2].transpose(0, 1).contiguous().transpose(0, 1))),
        (torch.ldexp, (X.transpose(0, 1).contiguous().transpose(0, 1), EXPONENTS[:1].transpose(1, 2).transpose(1, 2))),
        (torch.ldexp, (X.expand(2, 3, 4, 5), EXPONENTS.long().transpose(0, 2).contiguous().transpose(0, 2))),
    ],
)
def test_operators_of_several_steps_lie_as_their_last_one_makes_them(
    function: Any, operands: tuple[Tensor, ...]
) -> None:
    graph = capture(Holder(lambda _, *given: function(*given)), operands)
    (result,) = outputs_of(graph.graph)
    assert result.meta["val"].stride() == function(*operands).stride()


@pytest.mark.parametrize("options", [(2,), ([3], 1, (1,)), (2, [3], 1, 2, True)])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3)), (1, 0)])
def test_pooled_rows_lie_as_in_eager(order: tuple[int, ...], options: tuple[Any, ...], same_function: Any) -> None:
    size = (2, 7, 9)[-len(order) :]
    x = torch.randn([size[d] for d in order]).permute([order.index(d) for d in range(len(order))])
    same_function(lambda x: F.max_pool1d(x, *options), x)


def test_pooled_rows_with_gradients_lie_as_in_eager() -> None:
    x = torch.randn(2, 8, 4, requires_grad=True).transpose(1, 2)
    assert (
        fuse.compile(Holder(lambda _, x: F.max_pool1d(x, 2)))(x).stride() == F.max_pool1d(x, 2).stride() == (16, 1, 4)
    )
