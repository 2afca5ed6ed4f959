"""``fuse.compile``: the model in everything but how it runs."""

from __future__ import annotations

import contextlib
import copy
import io
import multiprocessing
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fuse
from fuse.errors import FaultWarning, FuseError
from fuse.rewrite import registry
from fuse.rewrite.verdict import Verdict, rewrite
from fuse.runtime.variants import states


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.scale = 2.0

    def forward(self, x: Tensor, bonus: float = 0.0) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scale + bonus


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


def assert_fused(fused: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """The same as eager, and really compiled."""
    torch.testing.assert_close(fused(*args, **kwargs), model(*args, **kwargs))
    assert fused.last_run.fallbacks == ()
    assert fused.last_run.launches > 0


def test_it_has_the_state_and_the_attributes_of_the_model() -> None:
    model = Net()
    fused = fuse.compile(model)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert fused.inner is model.inner
    assert fused.scale == 2.0
    fused.scale = 3.0
    assert model.scale == 3.0
    assert fused.eval() is fused
    assert not model.training
    assert not model.inner.training
    fused.load_state_dict({**model.state_dict(), "calls": torch.ones(())})
    assert model.calls == 1
    fused.double()
    assert model.inner.weight.dtype == torch.float64
    assert "Linear" in repr(fused)
    assert fuse.compile(fused) is fused


def test_weights_changed_in_any_way_take_effect_at_the_next_call() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model)
    assert_fused(fused, model, x)
    model.inner.weight.data.mul_(2)
    assert_fused(fused, model, x)
    model.inner.weight.data = torch.randn(4, 4).t()
    assert_fused(fused, model, x)
    model.inner.weight = nn.Parameter(torch.randn(4, 4))
    assert_fused(fused, model, x)
    fused.load_state_dict(Net().state_dict())
    assert_fused(fused, model, x)
    model.inner.bias = None
    assert_fused(fused, model, x)


def test_attributes_and_hooks_take_effect_at_the_next_call() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model)
    assert_fused(fused, model, x)
    model.scale = 5.0
    assert_fused(fused, model, x)
    handle = model.inner.register_forward_hook(lambda module, args, output: output * 3)
    assert_fused(fused, model, x)
    handle.remove()
    assert_fused(fused, model, x)


def test_frozen_weights_stay_until_they_are_refreshed() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model, freeze=True)
    before = fused(x).clone()
    model.inner.weight.data.mul_(2)
    assert torch.equal(fused(x), before)
    fused.refresh()
    assert_fused(fused, model, x)


def test_every_signature_gets_its_own_variant() -> None:
    model = Net()
    fused = fuse.compile(model)
    for x in (torch.randn(3, 4), torch.randn(5, 4), torch.randn(4, 3).t(), torch.randn(2, 3, 4)):
        assert_fused(fused, model, x)
        assert_fused(fused, model, x, 1.5)
        assert_fused(fused, model, x, bonus=-1)


def test_the_number_of_variants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "LARGEST_VARIANTS", 3)
    model = Net()
    fused = fuse.compile(model, passes=(), dynamic_shapes=None)
    for rows in range(1, 4):
        assert_fused(fused, model, torch.randn(rows, 4))
    with pytest.warns(UserWarning, match="more than 3 different input signatures"):
        assert_fused(fused, model, torch.randn(4, 4))
    assert_fused(fused, model, torch.randn(1, 4))


class Tricky(nn.Module):
    """Views and the very same objects among the results, plain values, a written buffer and a written input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.total += x.sum(0)
        y.mul_(2)
        z = x + y
        return {"x": x, "row": y[1], "whole": z, "part": z[1:].t(), "again": z, "n": 3, "buffer": self.total}


def test_views_objects_and_writes_are_those_of_eager() -> None:
    model, twin = Tricky(), Tricky()
    fused = fuse.compile(model)
    for _ in range(2):
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        expected, result = twin(x, their := y.clone()), fused(x, y)
        assert torch.equal(y, their)
        torch.testing.assert_close(result, expected)
        assert result["x"] is x
        assert result["buffer"] is model.total
        assert result["again"] is result["whole"]
        assert result["row"].data_ptr() == y[1].data_ptr()
        assert result["part"].data_ptr() == result["whole"][1:].data_ptr()
        assert result["part"].stride() == expected["part"].stride()
    torch.testing.assert_close(model.total, twin.total)


def test_overlapping_inputs_that_are_written_run_eager() -> None:
    fused = fuse.compile(Tricky())
    base = torch.randn(4, 4)
    fused(torch.randn(3, 4), torch.randn(3, 4))
    expected = Tricky()((twin := base.clone())[:3], twin[1:])
    with pytest.warns(UserWarning, match="shares memory"):
        result = fused(base[:3], base[1:])
    assert torch.equal(base, twin)
    torch.testing.assert_close(result["whole"], expected["whole"])


def test_batch_norm_in_training_updates_its_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    twin = copy.deepcopy(model)
    fused = fuse.compile(model)
    for _ in range(3):
        x = torch.randn(8, 4)
        torch.testing.assert_close(fused(x), twin(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert fused.last_run.fallbacks == ()
    fused.eval()
    torch.testing.assert_close(fused(x), twin.eval()(x))


def test_dropout_draws_the_same_numbers_as_eager() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Dropout(0.3))
    fused, x = fuse.compile(model), torch.randn(8, 4)
    for _ in range(2):
        torch.manual_seed(3)
        expected, after = model(x), torch.rand(1)
        torch.manual_seed(3)
        torch.testing.assert_close(fused(x), expected)
        assert torch.equal(torch.rand(1), after)


def test_a_call_with_frozen_weights_that_needs_gradients_runs_eager_with_one_warning() -> None:
    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    fused = fuse.compile(model, freeze=True)
    with torch.enable_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused(x).sum().backward()
        fused(x).sum().backward()
    assert len(caught) == 1
    assert "needs gradients" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert model.inner.weight.grad is not None
    assert "needs gradients" in fused.last_run.fallbacks[0].reason
    assert_fused(fused, model, x)


def test_lazy_parameters_are_initialized_by_eager_and_the_next_call_is_fused() -> None:
    model, x = nn.Sequential(nn.LazyLinear(3), nn.Tanh()), torch.randn(2, 4)
    fused = fuse.compile(model)
    with pytest.warns(UserWarning, match="initializes lazy parameters"):
        assert fused(x).shape == (2, 3)
    assert_fused(fused, model, x)


class Resized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 1).resize_(1)


def test_what_cannot_be_captured_runs_eager_and_names_the_line() -> None:
    fused = fuse.compile(Resized())
    with pytest.warns(UserWarning, match=r"test_module\.py:\d+"):
        assert torch.equal(fused(torch.ones(2)), torch.ones(1))
    assert torch.equal(fused(-torch.ones(2)), -torch.ones(1))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * self.steps


def test_attributes_written_in_forward_are_written_as_eager_does() -> None:
    fused = fuse.compile(model := Counts())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = [fused(torch.ones(1)).item() for _ in range(12)]
    assert values == list(range(1, 13))
    assert model.steps == 12


@pytest.mark.parametrize("args", [(torch.randn(3, 5),), (), (torch.randn(3, 4), "text"), (None,)])
def test_exceptions_are_those_of_eager(args: tuple[Any, ...]) -> None:
    model = Net()
    fused = fuse.compile(model)
    with pytest.raises(Exception) as expected:
        model(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(expected.type) as raised:
            fused(*args)
    assert str(raised.value) == str(expected.value)


class SameViews(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(x[0]) + y[0]


def test_the_same_view_of_several_inputs_is_captured_in_inference_mode() -> None:
    model, x, y = SameViews(), torch.randn(3, 4), torch.randn(3, 4)
    with torch.inference_mode():
        assert_fused(fuse.compile(model), model, x, y)


def test_inference_mode_gives_inference_tensors() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model)
    assert_fused(fused, model, x)
    with torch.inference_mode():
        assert_fused(fused, model, x)
        assert fused(x).is_inference()
        assert_fused(fused, model, torch.randn(3, 4))
    assert not fused(x).is_inference()


class WritesParts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[0].add_(1)
        x.view(-1)[3:5] = 7.0
        return x.sin()


def test_views_are_written_in_inference_mode() -> None:
    fused = fuse.compile(WritesParts())
    with torch.inference_mode():
        for _ in range(2):
            x, y = torch.ones(3, 3), torch.ones(3, 3)
            torch.testing.assert_close(fused(x), WritesParts()(y))
            assert torch.equal(x, y)
            assert fused.last_run.fallbacks == ()


def test_autocast_is_followed() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model)
    with torch.autocast("cpu"):
        expected, result = model(x), fused(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)
    assert_fused(fused, model, x)


def test_without_a_compiler_the_model_runs_op_by_op_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuse.errors import CompilerMissing
    from fuse.runtime.cpu import functions

    def missing(sources: list[str]) -> None:
        raise CompilerMissing("no C++ compiler")

    monkeypatch.setattr(functions, "build_many", missing)
    twin = copy.deepcopy(model := Tricky())
    fused = fuse.compile(model)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        result = fused(x, y.clone())
    torch.testing.assert_close(result, twin(x, y.clone()))
    torch.testing.assert_close(model.total, twin.total)
    assert fused.last_run.aten > 0


class SortedSteps(nn.Module):
    """24 steps of four operators, of which ``sort`` has no kernel."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        for t in range(24):
            h = torch.sort(torch.tanh(h + x[t]) * 2, -1)[0]
        return h


def test_without_a_compiler_the_regions_in_a_loop_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuse.errors import CompilerMissing
    from fuse.runtime.cpu import functions

    def missing(sources: list[str]) -> None:
        raise CompilerMissing("no C++ compiler")

    monkeypatch.setattr(functions, "build_many", missing)
    fused = fuse.compile(model := SortedSteps())
    x, h = torch.randn(24, 4, 8), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        torch.testing.assert_close(fused(x, h), model(x, h))
    assert fused.last_run.launches == 24 * 4


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh().detach()


def test_without_a_compiler_what_needs_no_gradient_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuse.errors import CompilerMissing
    from fuse.runtime.cpu import functions

    def missing(sources: list[str]) -> None:
        raise CompilerMissing("no C++ compiler")

    monkeypatch.setattr(functions, "build_many", missing)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert not fuse.compile(Detached())(torch.randn(3, 4)).requires_grad


@torch.library.custom_op("fuse_tests::turned", mutates_args=())
def turned(x: Tensor, length: int) -> Tensor:
    """Something that is laid out, and as long, as no one could know before it runs."""
    return x[:length].t().contiguous().t()


@turned.register_fake
def _(x: Tensor, length: int) -> Tensor:
    return torch.empty(3, 4)


class Mispredicted(nn.Module):
    """Draws, writes its argument, and calls an operator whose fake result is not eager's."""

    def forward(self, x: Tensor, length: int) -> Tensor:
        noisy = torch.nn.functional.dropout(x, 0.5)
        x.add_(1)
        return turned(noisy, length) * 2 + x.sum()


@pytest.mark.parametrize(("length", "told"), [(3, r"strides \(1, 3\)"), (2, r"float32\[2, 4\]")])
def test_a_result_that_capture_predicted_wrongly_is_noticed(length: int, told: str) -> None:
    model = Mispredicted()
    fused, x = fuse.compile(model), torch.randn(3, 4)
    mine, theirs = x.clone(), x.clone()
    for call in range(2):
        torch.manual_seed(call)
        expected, state = model(theirs, length), torch.get_rng_state()
        torch.manual_seed(call)
        if call == 0:
            with pytest.warns(UserWarning, match=told):
                result = fused(mine, length)
        else:
            result = fused(mine, length)
        assert torch.equal(result, expected)
        assert result.stride() == expected.stride()
        assert torch.equal(mine, theirs)
        assert torch.equal(torch.get_rng_state(), state)
        assert fused.compiled is None
        (reason,) = fused.last_run.fallbacks
        assert reason.op == "fuse_tests.turned.default"
        assert "test_module.py" in reason.source


def test_a_pass_that_fails_is_left_out_with_a_warning() -> None:
    @registry.register_pass(before="fuse_pointwise", enabled=False)
    def crash(graph: GraphModule) -> Iterator[Verdict]:
        node = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)[0]
        yield rewrite(node, lambda: graph.graph.erase_node(node))

    model, x = Net(), torch.randn(3, 4)
    try:
        fused = fuse.compile(model, passes=["crash", "fuse_pointwise"])
        with pytest.warns(FaultWarning, match="pass 'crash' .* was left out"):
            result = fused(x)
    finally:
        registry.unregister("crash")
    torch.testing.assert_close(result, model(x))
    assert fused.last_run.launches == 2  # a product, and all that follows as one kernel
    (fallback,) = fused.last_run.fallbacks
    assert fallback.op == "pass crash"
    assert fallback.source.startswith("test_module.py:")
    assert "failed and was left out" in fallback.reason


class Factorised(nn.Module):
    """What numerical code does where a matrix may not be positive definite."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.linalg.cholesky(x * 2).tanh() + 1
        except torch.linalg.LinAlgError:
            return x.abs() + torch.rand(2)


def test_an_error_that_forward_catches_is_caught_in_later_calls_too() -> None:
    fused, model = fuse.compile(Factorised()), Factorised()
    good, bad = torch.eye(2), -torch.eye(2)
    torch.testing.assert_close(fused(good), model(good))
    torch.manual_seed(3)
    expected = model(bad)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="Factorised runs eager: an operator raised _LinAlgError"):
        assert torch.equal(fused(bad), expected)
    assert [one.reason[:35] for one in fused.last_run.fallbacks] == ["an operator raised _LinAlgError: li"]
    with warnings.catch_warnings(action="error"):
        fused(torch.diag(torch.tensor([1.0, -1.0])))  # the error names another row: no reason to warn again
    torch.testing.assert_close(fused(good), model(good))
    assert fused.last_run.fallbacks == ()


def test_an_error_of_a_later_call_is_eagers_own() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Flatten())
    model.register_forward_hook(lambda module, args, result: torch.linalg.cholesky(result * 2))
    fused = fuse.compile(model)
    fused(torch.eye(2))
    with pytest.raises(torch.linalg.LinAlgError) as raised:
        fused(-torch.eye(2))
    assert raised.value.__context__ is None
    assert fused(torch.eye(2)).shape == (2, 2)


def test_a_position_out_of_range_raises_what_eager_raises() -> None:
    class LooksUp(nn.Module):
        def forward(self, table: Tensor, positions: Tensor) -> Tensor:
            table.mul_(2)
            return table.tanh() + table[positions] * 2

    model = LooksUp()
    fused, table = fuse.compile(model), torch.ones(4)
    fused(table.clone(), torch.tensor([0, 1, 2, 3]))
    mine, theirs = table.clone(), table.clone()
    with pytest.raises(IndexError) as eager:
        model(theirs, torch.tensor([0, 1, 2, 4]))
    with pytest.raises(IndexError) as ours:
        fused(mine, torch.tensor([0, 1, 2, 4]))
    assert str(ours.value) == str(eager.value)
    assert torch.equal(mine, theirs)


def test_calls_from_many_threads_are_right() -> None:
    model = Net()
    weight, bias = model.inner.weight.detach().clone(), model.inner.bias.detach().clone()
    fused = fuse.compile(model)
    wrong: list[int] = []
    finished: list[int] = []

    def work(rows: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                x = torch.randn(rows, 4)
                if not torch.allclose(fused(x), torch.tanh(x @ weight.t() + bias) * 2, atol=1e-6):
                    wrong.append(rows)
        finished.append(rows)

    threads = [threading.Thread(target=work, args=(1 + i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(finished) == 8  # none died of an exception


def test_a_forked_process_runs_what_its_parent_compiled() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model)
    fused(x)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child() -> None:
        with torch.no_grad():
            queue.put(fused(x).tolist())

    process = context.Process(target=child)
    process.start()
    result = queue.get(timeout=30)
    process.join()
    torch.testing.assert_close(torch.tensor(result), model(x))


class Blocks(nn.Sequential):
    """A container that is also a context."""

    entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *error: object) -> None:
        self.entered -= 1


def test_a_compiled_container_is_a_container() -> None:
    model = Blocks(nn.Linear(4, 4), nn.Tanh())
    fused, x = fuse.compile(model), torch.randn(3, 4)
    assert fused[0] is model[0]
    assert list(fused) == list(model)
    assert list(fused[:1]) == [model[0]]
    assert len(fused) == 2
    assert model[1] in fused
    with fused:
        assert fused.entered == 1
    assert_fused(fused, model, x)
    fused[1] = nn.ReLU()
    assert_fused(fused, model, x)
    del fused[1]
    assert len(model) == 1
    assert_fused(fused, model, x)
    assert len(copy.deepcopy(fused)) == len(pickle.loads(pickle.dumps(fused))) == 1
    assert isinstance(fused, type(fuse.compile(Net())))
    assert bool(fuse.compile(Net()))
    assert not hasattr(fuse.compile(Net()), "__len__")


class Overrides(Net):
    """Has its own say in what ``nn.Module`` does."""

    precision = "float32"

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield self.inner.bias

    def to(self, *args: Any, **kwargs: Any) -> Overrides:
        self.precision = str(args[0])
        return super().to(*args, **kwargs)

    def eval(self) -> Overrides:
        super().eval()
        self.inner.train()
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "calls"] = state_dict.pop(prefix + "count")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_extra_state(self) -> str:
        return self.precision

    def set_extra_state(self, state: str) -> None:
        self.precision = state


def test_methods_of_modules_are_the_models_where_it_has_its_own() -> None:
    model = Overrides()
    fused, x = fuse.compile(model), torch.randn(3, 4)
    assert list(fused.parameters()) == [model.inner.bias]
    assert fused.to(torch.float64) is fused
    assert model.precision == "torch.float64"
    assert fused.eval() is fused
    assert model.inner.training
    assert_fused(fused, model, x.double())
    whole = nn.Sequential(fuse.compile(other := Overrides()))
    state = nn.Sequential(fused).state_dict()
    state["0.count"] = state.pop("0.calls") + 7
    whole.load_state_dict(state)
    assert other.calls == 7
    assert other.precision == "torch.float64"
    torch.testing.assert_close(whole(x), other(x))


def test_hooks_for_the_state_of_a_compiled_model_are_called() -> None:
    model, called = Net(), []
    fused = fuse.compile(model)
    fused.register_state_dict_pre_hook(lambda *_: called.append("save"))
    fused.register_state_dict_post_hook(lambda *_: called.append("saved"))
    fused.register_load_state_dict_pre_hook(lambda *_: called.append("load"))
    fused.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
    fused.load_state_dict(fused.state_dict())
    assert called == ["save", "saved", "load", "loaded"]


def test_backward_hooks_of_a_compiled_model_are_called() -> None:
    model, x = Net(), torch.randn(3, 4, requires_grad=True)
    fused, called = fuse.compile(model), []
    with torch.enable_grad():
        fused(x)
        handle = fused.register_full_backward_hook(lambda _, given, __: called.append(given[0]))
        fused(x).sum().backward()
        assert torch.equal(called[0], x.grad)
        handle.remove()
        fused(x).sum().backward()
    assert len(called) == 1
    assert model._is_full_backward_hook is None  # the model itself has no hook


def test_gradients_may_be_on_in_inference_mode() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model)
    with torch.inference_mode(), torch.enable_grad():
        with pytest.warns(UserWarning, match="gradients are on in inference"):
            result = fused(x)
        torch.testing.assert_close(result, model(x))
    assert result.is_inference()


class Sets(nn.Module):
    """Leaves a setting of torch changed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        SETTINGS[self.name][1]()
        return y.tanh()


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad mode": (torch.is_grad_enabled, lambda: torch._C._set_grad_enabled(True)),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "number of threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_torch_that_forward_changes_is_changed_by_each_call(name: str) -> None:
    fused, x, read = fuse.compile(Sets(name)), torch.randn(3, 4), SETTINGS[name][0]
    for call in range(2):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            if call == 0:
                stack.enter_context(pytest.warns(UserWarning, match=f"forward sets .*{name}"))
            before = read()
            fused(x)
            assert read() != before


def test_a_copy_is_independent() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model)
    other = copy.deepcopy(fused)
    model.inner.weight.data.zero_()
    assert not torch.equal(other(x), fused(x))


def test_a_model_that_was_called_is_saved_whole() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model, freeze=True)
    with torch.no_grad():
        expected = fused(x)
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(read(x), expected)
        assert read.last_run.fallbacks == ()
        assert read.last_run.launches == fused.last_run.launches
        model.inner.weight.zero_()
        torch.testing.assert_close(read(x), expected)


def test_gradients_by_torch_func_of_a_models_weights_are_eagers() -> None:
    model, x = Net(), torch.randn(3, 4)
    fused = fuse.compile(model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def gradients(run: nn.Module) -> dict[str, Tensor]:
        return torch.func.grad(lambda held: torch.func.functional_call(run, held, (x,)).sum())(weights)

    with pytest.warns(UserWarning, match=r"the call is being transformed by torch\.func"):
        found = gradients(fused)
    torch.testing.assert_close(found, gradients(model))


def test_inside_another_module_and_under_vmap_it_works() -> None:
    inner = Net()
    outer = nn.Sequential(fuse.compile(inner), nn.Tanh())
    x = torch.randn(3, 4)
    torch.testing.assert_close(outer(x), torch.tanh(inner(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.vmap(fuse.compile(inner))(x), inner(x))


def test_only_modules_and_known_passes_are_accepted() -> None:
    with pytest.raises(FuseError, match=r"takes an nn\.Module"):
        fuse.compile(torch.tanh)
    with pytest.raises(FuseError, match="no_such_pass"):
        fuse.compile(Net(), passes=["no_such_pass"])


def test_forward_that_seeds_the_generator_runs_eager() -> None:
    class Seeds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(5)
            return x + torch.rand_like(x)

    fused, x = fuse.compile(Seeds()), torch.zeros(3)
    with pytest.warns(UserWarning, match="seeds the random number generator"):
        first = fused(x)
    assert torch.equal(fused(x), first)


def test_random_operators_follow_the_generator() -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + torch.rand_like(x)) * torch.randn(3)

    fused, x = fuse.compile(Draws()), torch.zeros(3)
    torch.manual_seed(7)
    expected = [Draws()(x) for _ in range(3)]
    torch.manual_seed(7)
    torch.testing.assert_close([fused(x) for _ in range(3)], expected)
    assert fused.last_run.fallbacks == ()


def test_lazily_conjugated_tensors_are_read_as_what_they_mean() -> None:
    class Conjugates(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.fft.fft(x)
            return y.conj().clone() * 2, y.conj().imag @ torch.ones(4, 4)

    x = torch.randn(4, 4)
    torch.testing.assert_close(fuse.compile(Conjugates())(x), Conjugates()(x))


def test_sparse_inputs_run_eager() -> None:
    class Sparse(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x @ y

    x, y = torch.eye(3).to_sparse(), torch.randn(3, 3)
    with pytest.warns(UserWarning, match="layout"):
        assert torch.equal(fuse.compile(Sparse())(x, y), y)


def test_calls_of_a_fused_part_do_not_make_the_whole_stale() -> None:
    part = fuse.compile(nn.Linear(4, 4))
    whole = fuse.compile(nn.Sequential(part, nn.Tanh()))
    with torch.no_grad():
        whole(torch.randn(2, 4))
        program = whole.compiled
        for rows in (3, 4):
            part(torch.randn(rows, 4))
        whole(torch.randn(2, 4))
    assert whole.compiled is program


class Codebook(nn.Module):
    """Returns and stores its weight, and parts of it, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.table = self.weight.detach()[1:]
        return x * 2, self.weight.detach(), self.weight.data, self.weight.detach().view(-1), self.weight[1:]


@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_weight_without_gradients_is_returned_without_gradients(gradients: Callable[[], Any]) -> None:
    model = Codebook()
    fused = fuse.compile(model)
    for _ in range(2):
        with gradients():
            results = fused(torch.ones(2, 3))
            expected = model(torch.ones(2, 3))
        for mine, theirs in zip(results, expected, strict=True):
            assert torch.equal(mine, theirs)
            assert mine.requires_grad == theirs.requires_grad
            assert mine.data_ptr() == theirs.data_ptr() or mine is results[0]
        assert not model.table.requires_grad
    assert not fused.last_run.fallbacks


class RowWithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            row = self.linear.weight[0]
        return row, self.linear(x)


def test_a_view_taken_without_gradients_passes_none_to_its_weight() -> None:
    model = RowWithoutGradients()
    with torch.enable_grad():
        with pytest.warns(UserWarning, match="keeps gradients to itself"):
            row, _ = fuse.compile(model)(torch.ones(2, 3))
        row.sum().backward()
    assert row.is_leaf
    assert model.linear.weight.grad is None


def test_what_atens_operator_returns_of_a_parameter_is_detached_where_that_is_returned() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))

        def forward(self) -> Tensor:
            return torch.sort(self.weight, dim=0)[0].detach()

    model = Sorted()
    with torch.enable_grad():
        result = fuse.compile(model)()
    assert torch.equal(result, model())
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (nn.Linear, r"takes a module, not its class; give Linear\(\.\.\.\)"),
        (torch.relu, "not one of type builtin_function_or_method; wrap a function in a module"),
    ],
)
def test_what_is_no_module_is_refused_with_what_to_give_instead(given: Any, said: str) -> None:
    with pytest.raises(FuseError, match=said):
        fuse.compile(given)
