"""``fuse.pipeline``: host work is cut off by line and runs ahead; results, order, seeds and errors stay."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuse
from fuse.errors import FuseError
from fuse.graph.host_work import DeviceStage, HostWork, NoHostWork, host_work

pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture(autouse=True)
def _seeded_and_none_left() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        yield
    assert multiprocessing.active_children() == []


class Scores(nn.Module):
    """Words are looked up in a dictionary, then embedded."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = {word: i for i, word in enumerate(["a", "b", "c", "d"])}
        self.embedding = nn.Embedding(4, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, texts: list[str], scale: float = 2.0) -> Tensor:
        """A docstring is no host work."""
        rows = [[self.vocabulary[word] for word in text.split()] for text in texts]
        width = max(len(row) for row in rows)
        numbers = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        given = torch.tensor([[i < len(row) for i in range(width)] for row in rows])
        mask = given.unsqueeze(2).to(torch.float32)
        h = (self.embedding(numbers) * mask).sum(1) * scale
        return self.last(torch.tanh(h))


BATCHES = [["a b", "c d"], ["b b", "d a"], ["c a", "a"], ["d", "a d"], ["a a", "b"]]


def plainly(model: nn.Module, batches: list[Any]) -> list[Tensor]:
    with torch.no_grad():
        return [model(batch) for batch in batches]


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# ---- the cut -------------------------------------------------------------------------------------------------------


def test_the_cut_lies_behind_the_last_statement_on_the_host() -> None:
    model = Scores()
    work = host_work(model, (BATCHES[0],), {})
    start = Scores.forward.__code__.co_firstlineno
    assert [line.number - start for line in work.lines] == [2, 5]
    assert work.crossing == ("given", "numbers", "scale")
    values = work.run(model, (BATCHES[0],), {})
    torch.testing.assert_close(DeviceStage(model, work)(**values), model(BATCHES[0]))
    torch.testing.assert_close(
        DeviceStage(model, work)(**work.run(model, (BATCHES[0],), {"scale": 3.0})), model(BATCHES[0], scale=3.0)
    )


class Closes(Scores):
    """Uses ``super``, private names, names of its surroundings and an import."""

    __factor = 3.0

    def forward(self, texts: list[str], scale: float = 1.0) -> Tensor:
        import math as arithmetic

        factor = torch.tensor([arithmetic.floor(self.__factor) * len(texts)])
        return super().forward(texts, scale) * factor * outer


outer = 0.5


def test_both_parts_have_the_surroundings_of_forward() -> None:
    model = Closes()
    work = host_work(model, (BATCHES[0],), {})
    assert work.crossing == ("factor", "scale", "texts")
    values = work.run(model, (BATCHES[0],), {})
    torch.testing.assert_close(DeviceStage(model, work)(**values), model(BATCHES[0]))


class Plain(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        half = x / 2
        return super().forward(half)


class Returns(Scores):
    def forward(self, texts: list[str], scale: float = 2.0) -> Tensor:
        numbers = torch.tensor([len(text) for text in texts])
        if not texts:
            return numbers
        return self.embedding(numbers % 4)


class Weightless(nn.Module):
    def forward(self, texts: list[str]) -> Tensor:
        return torch.tensor([len(text) for text in texts])


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scores()

    def forward(self, texts: list[str]) -> Tensor:
        return self.inner(texts)


def hooked() -> nn.Module:
    model = Scores()
    model.register_forward_hook(lambda module, args, result: None)
    return model


DECLINED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "tensors only": (lambda: Plain(2, 2), torch.ones(3, 2), "does host work"),
    "a return among it": (Returns, BATCHES[0], "return at test_pipeline.py"),
    "no weights": (Weightless, BATCHES[0], "no operator reads a weight"),
    "host work of a submodule": (Inside, BATCHES[0], "does host work"),
    "a hook": (hooked, BATCHES[0], "has hooks"),
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_cannot_be_cut_off_is_declined_with_a_reason_and_runs_as_plain_calls(name: str) -> None:
    make, batch, reason = DECLINED[name]
    model = make()
    with pytest.raises(NoHostWork, match=reason):
        host_work(model, (batch,), {})
    with torch.no_grad(), pytest.warns(UserWarning, match=reason):
        assert_same(list(fuse.pipeline(fuse.compile(model), [batch, batch])), [model(batch)] * 2)


# ---- results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_and_their_order_are_those_of_the_plain_loop(workers: int) -> None:
    model = Scores()
    with torch.no_grad():
        results = list(fuse.pipeline(fuse.compile(model), BATCHES * 3, workers=workers))
    assert_same(results, plainly(model, BATCHES * 3))


def test_a_batch_is_a_tuple_of_arguments_or_a_dictionary() -> None:
    model = Scores()
    batches: list[Any] = [(BATCHES[0], 3.0), {"texts": BATCHES[1], "scale": 3.0}, (BATCHES[2],)]
    with torch.no_grad():
        expected = [model(BATCHES[0], 3.0), model(BATCHES[1], 3.0), model(BATCHES[2])]
        assert_same(list(fuse.pipeline(fuse.compile(model), batches)), expected)
        assert list(fuse.pipeline(fuse.compile(model), [])) == []


def test_training_between_results_takes_effect() -> None:
    model = Scores()
    other, fused = copy.deepcopy(model), fuse.compile(model)
    optimizers = [torch.optim.SGD(one.parameters(), 0.05) for one in (model, other)]
    for result, batch in zip(fuse.pipeline(fused, BATCHES), BATCHES, strict=True):
        for one, loss in zip(optimizers, (result.square().sum(), other(batch).square().sum()), strict=True):
            one.zero_grad()
            loss.backward()
            one.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


class Augments(nn.Module):
    """Host work that draws from Python's and torch's generators."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 3), dropout

    def forward(self, rows: list[list[float]]) -> Tensor:
        moved = [[value + random.random() for value in row] for row in rows]
        x = torch.tensor(moved) + torch.rand(len(rows), 1) * torch.tensor([len(rows)])
        return F.dropout(self.layer(x), self.dropout)


ROWS = [[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]], [[7.0, 8.0, 9.0]], [[0.0, 1.0, 0.0]]]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_seed_gives_the_numbers_that_it_gives_without(workers: int) -> None:
    model = Augments()
    found = []
    for run in (lambda: plainly(model, ROWS), lambda: list(fuse.pipeline(fuse.compile(model), ROWS, workers=workers))):
        torch.manual_seed(5)
        random.seed(5)
        with torch.no_grad():
            found.append([*run(), torch.rand(2), torch.tensor(random.random())])
    assert_same(*found)


def test_where_the_rest_draws_too_nothing_runs_ahead() -> None:
    model = Augments(dropout=0.5)
    torch.manual_seed(5)
    random.seed(5)
    expected = plainly(model, ROWS)
    torch.manual_seed(5)
    random.seed(5)
    with torch.no_grad(), pytest.warns(UserWarning, match="both draw from the generator torch"):
        assert_same(list(fuse.pipeline(fuse.compile(model), ROWS)), expected)


def test_a_loop_that_draws_too_is_an_error() -> None:
    results = (random.random() and one for one in fuse.pipeline(fuse.compile(Augments()), ROWS))
    with torch.no_grad(), pytest.raises(FuseError, match="both draw from the generator random"):
        list(results)


class Grows(Scores):
    """A vocabulary that learns words."""

    def forward(self, texts: list[str], scale: float = 2.0) -> Tensor:
        numbers = torch.tensor([self.vocabulary.setdefault(text, len(self.vocabulary)) % 4 for text in texts])
        return self.embedding(numbers)


def test_host_work_that_changes_the_model_is_done_by_this_process() -> None:
    model, batches = Grows(), [["x"], ["y", "z"], ["z", "x", "a"]]
    other = copy.deepcopy(model)
    with torch.no_grad(), pytest.warns(UserWarning, match=r"changes .*vocabulary"):
        results = list(fuse.pipeline(fuse.compile(model), batches))
    assert_same(results, plainly(other, batches))
    assert model.vocabulary == other.vocabulary


def test_a_change_that_comes_later_is_an_error() -> None:
    with torch.no_grad(), pytest.raises(FuseError, match=r"changes .*vocabulary"):
        list(fuse.pipeline(fuse.compile(Grows()), [["a"], ["b"], ["c"], ["a"], ["x"], ["y"]]))


def test_a_weight_that_is_read_later_is_an_error() -> None:
    class Later(Scores):
        def forward(self, texts: list[str], scale: float = 2.0) -> Tensor:
            first = 0.0
            if len(texts) > 2:
                first = self.last.weight[0, 0].item()
            numbers = torch.tensor([len(text) % 4 for text in texts])
            return self.embedding(numbers) + first

    with torch.no_grad(), pytest.raises(FuseError, match="reads a weight"):
        list(fuse.pipeline(fuse.compile(Later()), [["a"], ["b"], ["a", "b", "c"]]))


# ---- errors --------------------------------------------------------------------------------------------------------


def consumed(model: nn.Module, batches: Any, workers: int = 1) -> tuple[int, BaseException | None]:
    """How many results come, and what is raised then."""
    count = 0
    try:
        with torch.no_grad():
            for _ in fuse.pipeline(fuse.compile(model), batches, workers=workers):
                count += 1
    except Exception as error:
        return count, error.with_traceback(None)
    return count, None


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_host_work_raises_is_raised_when_it_is_the_turn_of_its_batch(workers: int) -> None:
    count, error = consumed(Scores(), [*BATCHES[:3], ["unknown"], *BATCHES], workers)
    assert (count, type(error), str(error)) == (3, KeyError, "'unknown'")


def test_what_the_loader_raises_is_raised_when_it_is_its_turn() -> None:
    def loader() -> Iterator[list[str]]:
        yield from BATCHES[:3]
        raise OSError("the disk is gone")

    assert (consumed(Scores(), loader())[0], *map(str, consumed(Scores(), loader())[1:])) == (3, "the disk is gone")


def test_no_more_batches_are_read_ahead_than_there_are_workers() -> None:
    read = []

    def loader() -> Iterator[list[str]]:
        for i in range(20):
            read.append(i)
            yield BATCHES[i % 5]

    with torch.no_grad():
        for done, _ in enumerate(fuse.pipeline(fuse.compile(Scores()), loader(), workers=2), start=1):
            assert len(read) <= done + 2


def test_a_worker_that_is_killed_is_an_error_and_none_is_left() -> None:
    results = fuse.pipeline(fuse.compile(Scores()), BATCHES * 9, workers=2)
    with torch.no_grad():
        next(results), next(results)
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(FuseError, match=r"a worker of fuse\.pipeline ended by signal 9"):
            list(results)
    assert multiprocessing.active_children() == []


def test_an_interrupt_leaves_no_worker() -> None:
    def interrupted() -> Iterator[list[str]]:
        yield from BATCHES
        os.kill(os.getpid(), signal.SIGINT)
        yield from BATCHES

    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        list(fuse.pipeline(fuse.compile(Scores()), interrupted(), workers=2))


def test_an_iterator_that_is_left_leaves_no_worker() -> None:
    results = fuse.pipeline(fuse.compile(Scores()), BATCHES * 9)
    with torch.no_grad():
        next(results), next(results)
    assert len(multiprocessing.active_children()) == 1
    results.close()
    assert multiprocessing.active_children() == []


def test_what_no_process_can_send_is_an_error() -> None:
    class Crosses(Scores):
        def forward(self, texts: list[str], scale: float = 2.0) -> Tensor:
            pick = lambda t: t % 4  # noqa: E731
            numbers = torch.tensor([len(text) for text in texts])
            return self.embedding(pick(numbers))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count, error = consumed(Crosses(), BATCHES)
    assert count == 1
    assert "cannot be pickled" in str(error)


class Sums(nn.Module):
    """Adds up in its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, words: list[str], total: Tensor) -> Tensor:
        lengths = torch.tensor([[float(len(word))] for word in words])
        result = lengths * self.weight + total
        total.copy_(result)
        return result


class Scaled(nn.Module):
    """Reads a weight as a number among the host work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, words: list[str]) -> Tensor:
        lengths = torch.tensor([[float(len(word))] for word in words])
        scale = float(self.weight.data.abs().max())
        return lengths * self.weight * scale


def test_what_is_written_to_an_argument_is_there_for_the_next_batch() -> None:
    total = torch.zeros(2, 1)
    batches = [(["a", "bb"], total)] * 4
    with torch.no_grad(), pytest.warns(UserWarning, match="writes to its arguments"):
        results = [r.clone() for r in fuse.pipeline(fuse.compile(Sums()), batches, workers=1)]
    torch.testing.assert_close(torch.cat(results, 1), torch.tensor([[1.0, 2, 3, 4], [2, 4, 6, 8]]))


def test_a_weight_that_is_read_by_its_data_is_read() -> None:
    model, results = Scaled(), []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for result in fuse.pipeline(fuse.compile(model), [["a"]] * 4, workers=1):
            results.append(float(result))
            model.weight.mul_(2)
    assert results == [1, 4, 16, 64]


# ---- show ----------------------------------------------------------------------------------------------------------


def test_show_counts_the_stages_apart() -> None:
    report = fuse.show(Scores().eval(), (BATCHES[0],))
    assert report.host is not None
    assert [one.name for one in report.host.crosses] == ["given", "numbers", "scale"]
    assert report.host.launches == 0  # making tensors of numbers launches nothing
    assert report.host.before.launches > report.host.after.launches > 0
    assert "host stage" in str(report)
    assert report.to_dict()["host"]["lines"][0].startswith("test_pipeline.py:")
    assert fuse.show(nn.Linear(2, 2), (torch.ones(1, 2),)).host is None


def test_a_host_part_is_plain_values() -> None:
    assert isinstance(host_work(Scores(), (BATCHES[0],), {}), HostWork)
