"""Reads of one piece of a concatenation have the piece, and decoders that keep their tokens in one tensor roll."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fuse.check.oracle import check
from fuse.graph.function import Function
from fuse.testing import assert_fuses

NAME = "forward_pieces"
ROWS, TOKENS, WIDTH = 3, 10, 8


class Decoder(nn.Module):
    """The next token is chosen by the last one, which is read from all tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(TOKENS, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, TOKENS)

    def last(self, tokens: Tensor) -> Tensor:
        return tokens[:, -1]

    def forward(self, tokens: Tensor, h: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        for _ in range(steps):
            h = self.cell(self.embedding(self.last(tokens)), h)
            tokens = torch.cat([tokens, self.scores(h).argmax(-1, keepdim=True)], 1)
        return tokens, h


class Sliced(Decoder):
    def last(self, tokens: Tensor) -> Tensor:
        return tokens[:, -1:].squeeze(1)


class Stacked(Decoder):
    def forward(self, tokens: Tensor, h: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        found = [tokens[:, 0]]
        for _ in range(steps):
            h = self.cell(self.embedding(torch.stack(found, 1)[:, -1]), h)
            found.append(self.scores(h).argmax(-1))
        return torch.stack(found, 1), h


class Beam(Decoder):
    """The tokens so far are those of the beam that each best continuation belongs to."""

    def forward(self, tokens: Tensor, h: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        total = torch.zeros(ROWS, 1)
        for _ in range(steps):
            h = self.cell(self.embedding(tokens[:, -1]), h)
            total, best = (total + self.scores(h).log_softmax(-1)).view(1, -1).topk(ROWS)
            parent, token = (best // TOKENS).view(-1), (best % TOKENS).view(-1, 1)
            tokens, h, total = torch.cat([tokens[parent], token], 1), h[parent], total.view(-1, 1)
        return tokens, total


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "launches"), [(Decoder, 2), (Sliced, 2), (Stacked, 2), (Beam, 1)])
@pytest.mark.parametrize("steps", [6, 13])
def test_a_decoder_that_reads_its_last_token_rolls(model: Callable[[], nn.Module], launches: int, steps: int) -> None:
    tokens = torch.randint(TOKENS, (ROWS, 2))
    with torch.no_grad():
        assert_fuses(model(), tokens, torch.randn(ROWS, WIDTH), steps, launches=launches, fired={"roll_whole_loops": 1})


class Fed(nn.Module):
    """Each state follows from the last one of all states so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, xs: Tensor) -> Tensor:
        states = xs[:1]
        for x in xs[1:]:
            states = torch.cat([states, torch.tanh(x + self.linear(states[-1])).unsqueeze(0)])
        return states


def test_gradients_are_those_of_the_pieces() -> None:
    launches = []
    for steps in (20, 33):
        xs = torch.randn(steps, ROWS, WIDTH)
        xs[3, 0, 0], xs[4, 1] = torch.nan, -0.0
        report = check(Fed(), (xs.requires_grad_(),), train=True)
        assert report.passed, report
        launches.append(report.launches_after)
    assert launches[0] == launches[1]


PARTS = {
    "a place of the second piece": lambda x: torch.cat([x, x.exp()], 1)[:, 7],
    "the last place of the first piece": lambda x: torch.cat([x, x.exp()], 1)[:, 5],
    "a whole piece": lambda x: torch.cat([x, x.exp()])[4:],
    "places within a piece": lambda x: torch.cat([x, x.exp()], 1)[:, 7:9],
    "a place of a stack": lambda x: torch.stack([x, x.exp()], 1)[:, -1],
    "a piece behind a vector without elements": lambda x: torch.cat([torch.empty(0), x, x.exp()], 1)[:, 8],
}
OTHERS = {
    "places of two pieces": lambda x: torch.cat([x, x.exp()], 1)[:, 5:7],
    "every second place": lambda x: torch.cat([x, x.exp()], 1)[:, 6::2],
    "another dimension": lambda x: torch.cat([x, x.exp()], 1)[2],
    "places of a stack": lambda x: torch.stack([x, x.exp()], 1)[:, 1:],
    "each place of a stack": lambda x: sum(place.relu() for place in torch.stack([x, x.exp()], 1).unbind(1)),
}
DECLINED = {
    "steps of a loop may each read another part": lambda x: sum(
        torch.stack([x, x + 1, x.exp(), -x, x * 2])[i].relu() for i in range(4)
    ),
    "the piece has another dtype": lambda x: torch.cat([x.double(), x.exp()], 1)[:, 7] * 2,
    "the result of exp would have another layout": lambda x: torch.cat([x.t().sin(), x.t()])[:6].exp(),
}


@pytest.mark.parametrize("function", PARTS.values(), ids=PARTS)
def test_a_part_of_one_piece_is_read_from_the_piece(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([-0.0, 0.0, torch.nan, torch.inf, 1.0, 1.0]).repeat(4, 1)
    assert_fuses(Function(lambda x: function(x) + 1), x, fired={NAME: 1})


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_near_misses_stay(function: Callable[[Tensor], Tensor]) -> None:
    assert_fuses(Function(lambda x: function(x) + 1), torch.randn(4, 6), fired={NAME: 0}, rejected={NAME: 0})


@pytest.mark.parametrize(("reason", "function"), DECLINED.items(), ids=DECLINED)
def test_what_would_show_is_declined(reason: str, function: Callable[[Tensor], Tensor]) -> None:
    report = assert_fuses(Function(function), torch.randn(4, 6), fired={NAME: 0}, rejected={NAME: 1})
    assert reason in [one.reason for one in report.rejected]


@pytest.mark.parametrize("function", [lambda x: torch.cat([x, x])[4:], lambda x: (y := torch.cat([x, x.exp()]), y[4:])])
def test_a_part_that_the_caller_receives_is_a_view_of_the_whole(function: Callable[[Tensor], Tensor]) -> None:
    assert_fuses(Function(function), torch.randn(4, 6), fired={NAME: 0})
