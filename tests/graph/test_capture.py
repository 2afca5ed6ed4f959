"""What capture takes, held to eager by replaying the graph, and what it refuses, with the user's line."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

import fuse
from fuse import ops
from fuse.check.oracle import check
from fuse.cost.observe import CountingMode
from fuse.errors import CaptureError
from fuse.graph.capture import capture
from fuse.graph.checks import probing
from tests.samples import Holder

SameCall = Callable[..., GraphModule]
Pair = namedtuple("Pair", ["a", "b"])


def line_of(function: Callable[..., Any]) -> str:
    """The line that a function is on, as messages name it."""
    return f"test_capture.py:{inspect.getsourcelines(function)[1]}"


# ---- arguments and results -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    scores: Tensor
    count: int
    parts: list[Tensor]


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "nested": lambda x: {"a": [x + 1, (x * 2, None)], "b": 3, "c": "text"},
    "named_tuple": lambda x: Pair(x + 1, x),
    "ordered": lambda x: OrderedDict(z=x + 1, y=2),
    "dataclass": lambda x: [Answer(x + 1, 2, [x * 2])],
    "shape": lambda x: (x.shape, x + 1),
    "nothing": lambda x: None,
    "number": lambda x: 3,
    "object_twice": lambda x: (lambda y: (y, y, y[0], y[0]))(x + 1),
    "view_object_twice": lambda x: (lambda y: (y, y))(x[0]),
    "input": lambda x: (x, x[1], x.t(), x),
    "views_of_one_value": lambda x: (lambda y: (y[0], y[1:], y.t()))(x + 1),
    "value_and_its_twin": lambda x: (lambda y: (y, y.detach(), y.view(3, 4)))(x + 1),
    "parts": lambda x: (x + 1).split(2, 1),
    "written_input": lambda x: x.add_(1),
    "view_of_written_input": lambda x: (x[1].add_(1), x),
    "made_from_numbers": lambda x: (torch.tensor([1.0, 2.0]), torch.zeros(3), torch.arange(3), torch.full((2,), 1.5)),
    "integers_and_booleans": lambda x: (x.int() // 2, x > 0, (x > 0).any(), (x > 0) & (x < 1), x.argmax(1)),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS.keys())
def test_results_keep_their_structure_objects_and_aliases(
    result: Callable[[Tensor], Any], same_function: SameCall
) -> None:
    same_function(result, torch.randn(3, 4))


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(4, 3).t(),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "later_in_its_storage": lambda: torch.randn(6, 4)[2:5],
    "empty": lambda: torch.randn(3, 0),
    "double": lambda: torch.randn(3, 4, dtype=torch.float64),
    "integer": lambda: torch.arange(12).view(3, 4),
    "with_gradient": lambda: torch.randn(3, 4, requires_grad=True),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_arguments_of_any_layout_give_eagers_layouts(layout: Callable[[], Tensor], same_function: SameCall) -> None:
    same_function(lambda x: (x * 2, x[1:], x.t(), x.sum(0), x), layout())


def test_registering_nothing_a_dataclass_stays_a_leaf_to_everyone_else(same_function: SameCall) -> None:
    same_function(lambda x: Answer(x + 1, 2, []), torch.randn(3))
    assert Answer not in pytree.SUPPORTED_NODES


def test_keyword_and_nested_arguments_are_named_after_themselves(same_function: SameCall, calls: Any) -> None:
    x, y, z = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)
    graph = same_function(lambda x, *, y, options: x * y + options["bias"][0] * options["scale"], x, y=y,
                          options={"bias": [z], "scale": 2})  # fmt: skip
    assert [spec.name for spec in graph.meta["signature"].inputs] == ["args[0]", "y", "options['bias'][0]"]


def test_one_tensor_given_twice_is_one_placeholder(same_function: SameCall) -> None:
    x = torch.randn(3)
    graph = same_function(lambda a, b: (a.add_(1), b * 2), x, x)
    assert len(graph.meta["signature"].inputs) == 1


def test_overlapping_arguments_may_be_read_but_not_written(same_function: SameCall, calls: Any) -> None:
    x = torch.randn(4, 4)
    same_function(lambda a, b: a + b, x[:3], x[1:])
    with pytest.raises(CaptureError, match="shares memory with another"):
        capture(calls(lambda a, b: (a.add_(1), b * 2)), (x[:3], x[1:]))


def test_fake_arguments_and_weights_are_captured_without_memory() -> None:
    with FakeTensorMode():
        model = nn.Linear(100_000, 100_000)
        x = torch.randn(100_000, 100_000)
    graph = capture(model, (x,))
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_function"] == [
        "aten.t.default", "aten.addmm.default",
    ]  # fmt: skip


def test_every_node_carries_a_fake_value_and_the_users_line(calls: Any) -> None:
    function = lambda x: x + 1  # noqa: E731
    graph = capture(calls(function), (torch.randn(3),))
    (node,) = (n for n in graph.graph.nodes if n.op == "call_function")
    assert isinstance(node.meta["val"], FakeTensor)
    assert node.meta["source"] == line_of(function)


def test_a_captured_graph_can_be_copied_and_captured_again(same_call: SameCall) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    graph = capture(model, (x,))
    twin = copy.deepcopy(graph)
    weight, bias = model[0].weight, model[0].bias
    assert torch.equal(twin(x, weight, bias)[0], model(x))
    same_call(torch.fx.symbolic_trace(model), (x,))


# ---- modules ---------------------------------------------------------------------------------------------------------


def tied_embedding() -> nn.Module:
    embedding, output = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    output.weight = embedding.weight
    return nn.Sequential(embedding, output)


def repeated_layer() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, layer, nn.ReLU())


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, result: result + 1)
    return nn.Sequential(layer)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "repeated_layer": repeated_layer,
    "hooks": hooked,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "buffer_in_place": lambda: Holder(lambda s, x: (s.b_n.add_(1), x * s.b_n)[1], b_n=torch.zeros(())),
    "buffer_view": lambda: Holder(lambda s, x: (s.b_n[1:].copy_(x[0]), s.b_n * 1)[1], b_n=torch.zeros(5)),
    "parameter_in_place": lambda: Holder(lambda s, x: s.p.mul_(2) + x, p=nn.Parameter(torch.randn(4))),
    "parameter_returned": lambda: Holder(lambda s, x: (s.p, s.p[0], s.p.t()), p=nn.Parameter(torch.randn(2, 2))),
    "parameter_list": lambda: Holder(
        lambda s, x: sum(x * p for p in s.ps), ps=nn.ParameterList([torch.randn(4) for _ in range(3)])
    ),
    "module_dictionary": lambda: Holder(
        lambda s, x: s.d["a"](x) + s.d["b"](x), d=nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})
    ),
    "attribute_set_to_what_it_is": lambda: Holder(lambda s, x: (setattr(s, "n", 4), x * s.n)[1], n=4),
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "batch_norm_without_statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "batch_norm_without_weights": lambda: nn.BatchNorm1d(4, affine=False),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.AlphaDropout(0.3), nn.Dropout(0.25)),
    "random_relu": lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU()),
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_modules_replay_as_eager_runs_them(make: Callable[[], nn.Module], train: bool, same_call: SameCall) -> None:
    same_call(make().train(train), (torch.randn(3, 4),))


def test_a_shared_weight_is_one_placeholder(same_call: SameCall) -> None:
    graph = same_call(tied_embedding(), (torch.arange(3),))
    assert [spec.kind for spec in graph.meta["signature"].inputs] == ["argument", "parameter"]


def test_convolutions_keep_channels_last(same_call: SameCall) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    same_call(model, (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),))


def test_tensors_that_are_not_registered_become_constants(same_call: SameCall) -> None:
    held = Holder(lambda s, x: (x * s.w + s.ws[1], s.w.add_(1)), w=torch.randn(4), ws=[torch.ones(4), torch.randn(4)])
    model = copy.deepcopy(held)
    graph = capture(model, (torch.randn(3, 4),))
    specs = {id(spec.value) for spec in graph.meta["signature"].inputs if spec.kind == "constant"}
    assert specs == {id(model.w), id(model.ws[1])}
    same_call(held, (torch.randn(3, 4),))


def test_a_tensor_made_from_numbers_is_new_in_every_call(calls: Any) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        numbers = torch.tensor([1.0, 2.0])
        numbers.add_(x)
        return numbers, torch.tensor([3.0])

    graph = capture(calls(function), (torch.ones(2),))
    constants = [spec.value for spec in graph.meta["signature"].inputs if spec.kind == "constant"]
    for _ in range(2):
        first, second = graph(torch.ones(2), *constants)
        assert first.tolist() == [2.0, 3.0]
        second.zero_()
    assert graph.meta["signature"].mutations == ()


STORES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "list": (lambda s, x: s.seen.append(x), "Holder.seen"),
    "dictionary": (lambda s, x: s.cache.update(key=x), "Holder.cache.key"),
    "object": (lambda s, x: setattr(s.config, "scores", x), "Holder.config.scores"),
    "module_removed": (lambda s, x: delattr(s, "child"), "Holder.child"),
}


@pytest.mark.parametrize(("store", "name"), STORES.values(), ids=STORES.keys())
def test_what_forward_stores_in_the_model_is_named_and_undone(store: Callable[..., Any], name: str) -> None:
    config = Answer(torch.zeros(1), 0, [])
    model = Holder(lambda s, x: (store(s, x), x + 1)[1],
                   n=1, b_n=torch.zeros(()), seen=[], cache={}, config=config, child=nn.Tanh())  # fmt: skip
    before = {key: copy.copy(value) for key, value in model.__dict__.items()}
    with pytest.raises(CaptureError, match=f"forward changes {name};"):
        capture(model, (torch.randn(3),))
    assert model.__dict__.keys() == before.keys()
    assert (model.n, model.seen, model.cache) == (1, [], {})
    assert type(model.b_n) is Tensor
    assert type(config.scores) is Tensor
    assert isinstance(model.child, nn.Tanh)


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_blocks_without_gradient_and_in_inference_mode_are_recorded(same_function: SameCall) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            a = x * 2
        with torch.inference_mode():
            b = F.linear(a, w) @ w
            c = torch.einsum("ij,kj->ik", b, b)
        return a, b + 0, c + 0

    same_function(function, torch.randn(3, 4), torch.randn(4, 4))


def test_a_gradient_taken_in_forward_is_recorded(same_call: SameCall) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            y = self.layer(x).tanh()
            (gradient,) = torch.autograd.grad(y.sum(), self.layer.weight)
        return y.detach(), gradient

    same_call(Holder(forward, layer=nn.Linear(4, 4)), (torch.randn(3, 4),))


def test_a_result_that_needs_gradients_is_refused(calls: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.layer(x)

    with pytest.raises(CaptureError, match="the result needs gradients"):
        capture(Holder(forward, layer=nn.Linear(4, 4)), (torch.randn(3, 4),))


def test_casts_of_autocast_are_recorded_and_not_remembered(same_call: SameCall) -> None:
    model = Holder(lambda s, x: s.layer(x) + s.layer(x + 1), layer=nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same_call(model, (torch.randn(3, 4),))
        assert type(model(torch.randn(3, 4))) is Tensor


def test_random_operators_keep_their_order_and_count(same_function: SameCall) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        torch.rand(3)
        noise = torch.randn_like(x)
        return x + noise + torch.rand(4), torch.randperm(5), torch.bernoulli(x.sigmoid()), torch.randint(0, 9, (3,))

    graph = same_function(function, torch.randn(3, 4))
    drawn = [n.target for n in graph.graph.nodes if n.op == "call_function" and ops.is_random(n.target)]
    assert len(drawn) == 6


# ---- what eager really launches --------------------------------------------------------------------------------------

LIBRARY_LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lstm": (lambda: nn.LSTM(8, 8), 1),
    "lstm_two_layers_both_ways": (lambda: nn.LSTM(8, 8, 2, bidirectional=True, batch_first=True), 1),
    "lstm_without_biases": (lambda: nn.LSTM(8, 8, bias=False), 1),
    "lstm_with_dropout": (lambda: nn.LSTM(8, 8, 2, dropout=0.5), 1),
    "lstm_with_projections": (lambda: nn.LSTM(8, 8, proj_size=4), 1),
    "lstm_in_double": (lambda: nn.LSTM(8, 8).double(), 1),
    "lstm_in_bfloat16": (lambda: nn.LSTM(8, 8).bfloat16(), 1),
    "gru": (lambda: nn.GRU(8, 8, 2, bidirectional=True), 1),
    "rnn": (lambda: nn.RNN(8, 8, nonlinearity="relu"), 1),
    "attention": (lambda: nn.MultiheadAttention(8, 2), 3),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), 1),
    "encoder_sequence_first": (lambda: nn.TransformerEncoderLayer(8, 2, 16), 1),
    "decoder": (lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2),
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("make", "inputs"), LIBRARY_LAYERS.values(), ids=LIBRARY_LAYERS.keys())
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:LSTM with projections")
def test_library_layers_dispatch_and_compute_what_eager_does(
    make: Callable[[], nn.Module], inputs: int, train: bool, same_call: SameCall
) -> None:
    model = make().train(train)
    dtype = next(model.parameters()).dtype
    args = tuple(torch.randn(5, 3, 8, dtype=dtype) for _ in range(inputs))
    graph = same_call(model, args)
    with torch.no_grad(), CountingMode() as counting:
        model(*args)
    recorded = [ops.info(d.op) for d in graph.meta["signature"].dispatches]
    assert sum(facts.launches if facts else 1 for facts in recorded) == counting.launches


# ---- what a graph cannot hold ----------------------------------------------------------------------------------------

SIZED: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
}


@pytest.mark.parametrize("function", SIZED.values(), ids=SIZED.keys())
def test_a_size_that_depends_on_values_is_learned_at_the_users_line(
    function: Callable[[Tensor], Any], calls: Any
) -> None:
    x = torch.randn(3, 4)
    graph = capture(calls(function), (x,))
    (learned,) = [one for one in graph.meta["signature"].learning.learned if one.guard == "size" and one.expected[0]]
    assert (learned.expected, learned.source) == (tuple(function(x).shape), line_of(function))


FAILING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "error_of_the_model": (lambda x: [][1], "IndexError: list index out of range"),
    "shapes": (lambda x: x @ x, "same reduction dim"),
}


@pytest.mark.parametrize(("function", "text"), FAILING.values(), ids=FAILING.keys())
def test_a_forward_that_fails_is_named_by_line_and_error(
    function: Callable[[Tensor], Any], text: str, calls: Any
) -> None:
    with pytest.raises(CaptureError, match=f"^forward failed at {line_of(function)}: .*{text}"):
        capture(calls(function), (torch.randn(3, 4),))


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "numpy": (lambda x: x.numpy(), "the result holds a ndarray"),
    "seed": (lambda x: (torch.manual_seed(3), torch.rand(4) + x), "seeds the random number generator"),
    "generator": (lambda x: torch.rand(4, generator=torch.Generator()) + x, "draws from a generator of its own"),
    "other_dtype_of_one_memory": (lambda x: torch.view_as_real(torch.complex(x, x)), "a view of torch.complex64"),
}


@pytest.mark.parametrize(("function", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_graph_cannot_hold_is_refused(function: Callable[[Tensor], Any], text: str, calls: Any) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(calls(function), (torch.randn(3, 4),))


def test_inputs_and_models_that_are_not_plain_are_refused(calls: Any) -> None:
    with pytest.raises(CaptureError, match=r"layout torch\.sparse_coo"):
        capture(calls(lambda x: x), (torch.eye(3).to_sparse(),))
    with pytest.raises(CaptureError, match="ScriptModule"):
        capture(torch.jit.script(nn.Linear(4, 4)), (torch.randn(3, 4),))


def test_marks_for_the_profiler_are_no_operators(calls: Any) -> None:
    def marked(x: Tensor) -> Tensor:
        with torch.profiler.record_function("here"):
            return x.tanh()

    graph = capture(calls(marked), (torch.ones(2),))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_function", "output"]
    assert len(graph.meta["signature"].dispatches) == 1


class Chosen(nn.Module):
    def forward(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition, x, y) * 2


def test_a_condition_of_bytes_is_followed_as_eager_follows_it() -> None:
    condition = torch.tensor([0, 1, 2], dtype=torch.uint8)
    report = check(Chosen(), (condition, torch.randn(3), torch.randn(3)))
    assert (report.problems, report.fallbacks, report.observed) == ((), (), (2, 1))


class ChoosesByBytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, elements: Tensor, rows: Tensor) -> Any:
        y = x * self.scale
        z = y + 1
        z[rows] = y[rows] * 2
        return y[elements] * 3, y[rows, 2] + 1, z


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("train", [False, True])
def test_masks_of_bytes_choose_as_in_eager(train: bool) -> None:
    elements = torch.tensor([[0, 1, 2, 0, 255], [0, 0, 3, 1, 1]], dtype=torch.uint8)
    rows = torch.tensor([0, 7], dtype=torch.uint8)
    report = check(ChoosesByBytes(), (torch.randn(2, 5), elements, rows), train=train)
    assert (report.problems, report.fallbacks) == ((), ())
    assert (report.observed, report.observed_backward) == ((9, 5), (18, 5) if train else None)


def test_a_number_is_not_written_by_a_mask_of_bytes_which_eager_refuses(calls: Any) -> None:
    def writes(x: Tensor, mask: Tensor) -> Tensor:
        y = x.tanh()
        y[mask] = 0.5
        return y

    fused = fuse.compile(calls(writes))
    with pytest.raises(RuntimeError, match="only supports boolean masks"):
        fused(torch.ones(2), torch.ones(2, dtype=torch.uint8))


class Grouped(nn.Module):
    def forward(self, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(rows.tanh(), matrices, offs=ends) * 2


def test_products_of_groups_are_captured_in_every_dtype_that_eager_has() -> None:
    ends = torch.tensor([2, 4, 6], dtype=torch.int32)
    report = check(Grouped(), (torch.randn(6, 8), torch.randn(3, 8, 8), ends))
    assert (report.problems, report.fallbacks) == ((), ())
    assert report.observed[0] == report.observed[1] == 3


@pytest.mark.parametrize("turned", [False, True])
def test_products_of_groups_are_trained_in_every_dtype_that_eager_has(turned: bool) -> None:
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    matrices = torch.randn(3, 8, 4).transpose(1, 2) if turned else torch.randn(3, 4, 8)
    report = check(Grouped(), (torch.randn(6, 4, requires_grad=True), matrices.requires_grad_(), ends), train=True)
    assert (report.problems, report.fallbacks) == ((), ())


class TwoDtypes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, x.bfloat16())


def test_a_failing_capture_logs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch's fake tensors would print a traceback of thirty lines."""
    with pytest.raises(CaptureError):
        capture(TwoDtypes(), (torch.zeros(2, 3, 3),))
    assert capfd.readouterr() == ("", "")


def test_asking_eager_for_an_operator_warns_of_nothing(
    same_function: SameCall, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(probing, "_answers", {})
    same_function(lambda x: (x.std(0), x.var((0, 1)), torch.std_mean(x, -1)), torch.randn(3, 4), exact=False)
    assert not recwarn.list
