"""The models do what their formulas say, and dispatch the operators the counts are quoted for."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fuse.check.oracle import check
from fuse.graph.loading.load import LoadedModel, load

MODELS = Path(__file__).parent.parent / "models"
SHORT = {"ligru": ("seq_length=32",)}


class Dispatches(TorchDispatchMode):
    """Names of the operators eager dispatches, views left out, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op.is_view:
            self.names.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


def real(name: str, *settings: str) -> LoadedModel:
    return load(str(MODELS / f"{name}.py"), settings=settings, real=True)


@torch.inference_mode()
def run(loaded: LoadedModel) -> Any:
    return loaded.model(*loaded.args, **loaded.kwargs)


def dispatched(loaded: LoadedModel) -> list[str]:
    with torch.no_grad(), Dispatches() as dispatches:
        loaded.model(*loaded.args, **loaded.kwargs)
    return dispatches.names


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.py")))
def test_every_model_loads_without_allocating_and_runs_for_real(name: str) -> None:
    fake = load(str(MODELS / f"{name}.py"))
    tensors = [*fake.model.parameters(), *fake.model.buffers(), *torch.utils._pytree.tree_leaves(fake.args)]
    assert all(isinstance(t, FakeTensor) for t in tensors if isinstance(t, torch.Tensor))
    assert fake.notes == ()
    assert not fake.model.training
    for leaf in torch.utils._pytree.tree_leaves(run(real(name))):
        assert leaf.isfinite().all()


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.py")))
def test_every_model_runs_fused_as_predicted(name: str) -> None:
    loaded = real(name, *SHORT.get(name, ()))
    with torch.no_grad():
        report = check(loaded.model, loaded.args, loaded.kwargs)
    assert report.passed, report
    assert not report.fallbacks
    assert report.predicted == report.observed


@pytest.mark.parametrize("steps", [1, 5, 64])
def test_the_lstm_loop_dispatches_three_operators_and_twelve_a_step(steps: int) -> None:
    names = dispatched(real("lstm_loop", f"seq_length={steps}"))
    step = ["addmm", "addmm", "add", "sigmoid", "sigmoid", "tanh", "sigmoid", "mul", "mul", "add", "tanh", "mul"]
    assert names == ["zeros", "zeros", *step * steps, "stack"]


def test_the_gru_loop_dispatches_two_operators_and_thirteen_a_step() -> None:
    assert len(dispatched(real("gru_loop", "seq_length=7"))) == 2 + 13 * 7


@pytest.mark.parametrize(("name", "reference"), [("lstm_loop", nn.LSTM), ("gru_loop", nn.GRU)])
def test_the_loops_compute_what_the_library_layers_do(name: str, reference: type[nn.RNNBase]) -> None:
    loaded = real(name, "seq_length=9", "batch_size=3", "input_size=5", "hidden_size=7")
    layer = reference(5, 7)
    weights = loaded.model.state_dict()
    layer.load_state_dict(
        {
            f"{kind}_{side}_l0": weights[f"{linear}.{kind}"]
            for kind in ("weight", "bias")
            for side, linear in (("ih", "from_input"), ("hh", "from_hidden"))
        }
    )
    outputs, state = run(loaded)
    expected_outputs, expected_state = layer(*loaded.args)
    torch.testing.assert_close(outputs, expected_outputs)
    expected_leaves = [leaf.squeeze(0) for leaf in torch.utils._pytree.tree_leaves(expected_state)]
    torch.testing.assert_close(torch.utils._pytree.tree_leaves(state), expected_leaves)


def test_the_perceptron_returns_logarithms_of_probabilities() -> None:
    result = run(real("mlp", "batch_size=3", "num_classes=4"))
    assert result.shape == (3, 4)
    torch.testing.assert_close(result.exp().sum(dim=1), torch.ones(3))


def albert_reference(weights: dict[str, Tensor], inputs: dict[str, Tensor], layers: int, heads: int) -> Tensor:
    """ALBERT's encoder from library functions: fused attention with a boolean mask, gelu in one operator."""

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, eps=1e-12)

    ids, kept = inputs["input_ids"], inputs["attention_mask"].bool()
    x = weights["encoder.embeddings.word.weight"][ids]
    x = x + weights["encoder.embeddings.segment.weight"][inputs["token_type_ids"]]
    x = x + weights["encoder.embeddings.position.weight"][: ids.shape[1]]
    x = linear(norm(x, "encoder.embeddings.norm"), "encoder.embeddings.to_hidden")
    attention = "encoder.layer.attention"
    for _ in range(layers):
        query, key, value = (
            linear(x, f"{attention}.{part}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=kept[:, None, None, :])
        mixed = linear(mixed.transpose(1, 2).reshape(x.shape), f"{attention}.output")
        x = norm(x + mixed, "encoder.layer.attention_norm")
        wide = functional.gelu(linear(x, "encoder.layer.expand"), approximate="tanh")
        x = norm(x + linear(wide, "encoder.layer.contract"), "encoder.layer.output_norm")
    return x


def test_albert_answers_questions_as_an_independent_reference_does() -> None:
    loaded = real("albert", "num_layers=2")
    weights = loaded.model.state_dict()
    encoded = albert_reference(weights, loaded.kwargs, layers=2, heads=4)
    expected = functional.linear(encoded, weights["span.weight"], weights["span.bias"])
    result = run(loaded)
    assert set(result) == {"start_logits", "end_logits"}
    torch.testing.assert_close(result["start_logits"], expected[..., 0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(result["end_logits"], expected[..., 1], atol=1e-5, rtol=1e-4)


def test_albert_classifies_as_an_independent_reference_does() -> None:
    loaded = real("albert", "task=classification", "num_classes=5")
    weights = loaded.model.state_dict()
    first = albert_reference(weights, loaded.kwargs, layers=3, heads=4)[:, 0]
    pooled = torch.tanh(functional.linear(first, weights["pooler.weight"], weights["pooler.bias"]))
    expected = functional.linear(pooled, weights["classifier.weight"], weights["classifier.bias"])
    assert expected.shape == (2, 5)
    torch.testing.assert_close(run(loaded), expected, atol=1e-5, rtol=1e-4)


def test_padding_does_not_change_albert_answers() -> None:
    loaded = real("albert")
    padded = loaded.kwargs["attention_mask"] == 0
    assert padded.any()
    before = run(loaded)["start_logits"]
    loaded.kwargs["input_ids"][padded] = 7
    torch.testing.assert_close(run(loaded)["start_logits"][~padded], before[~padded])


def test_albert_casts_the_mask_in_every_layer() -> None:
    names = dispatched(real("albert", "num_layers=5"))
    assert names.count("_to_copy") == 5
    assert names.count("rsub") == 5


def test_albert_layers_share_one_set_of_weights() -> None:
    counts = {
        layers: sum(p.numel() for p in real("albert", f"num_layers={layers}").model.parameters()) for layers in (1, 6)
    }
    assert counts[1] == counts[6]


@pytest.mark.parametrize(("size", "hidden", "intermediate"), [("base", 768, 3072), ("large", 1024, 4096)])
def test_albert_has_the_published_sizes(size: str, hidden: int, intermediate: int) -> None:
    loaded = load(str(MODELS / "albert.py"), settings=[f"size={size}", "task=classification"])
    embeddings = (30000 + 512 + 2) * 128 + 2 * 128 + (128 + 1) * hidden
    layer = 4 * (hidden + 1) * hidden + 2 * hidden * intermediate + intermediate + hidden + 2 * 2 * hidden
    heads = (hidden + 1) * hidden + (hidden + 1) * 2
    count = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert count == embeddings + layer + heads
    assert math.isclose(count, {"base": 12e6, "large": 18e6}[size], rel_tol=0.03)  # table 1 of the paper


def test_albert_sizes_can_be_set_one_by_one() -> None:
    settings = ["size=base", "hidden_size=96", "num_layers=1", "intermediate_size=32", "vocab_size=50", "seq_length=6"]
    loaded = real("albert", *settings)
    assert loaded.kwargs["input_ids"].shape == (2, 6)
    assert loaded.model.encoder.embeddings.to_hidden.weight.shape == (96, 128)
    assert run(loaded)["start_logits"].shape == (2, 6)


@pytest.mark.parametrize(("name", "published"), [("resnet18", 11_689_512), ("mobilenet", 3_504_872)])
def test_image_models_have_as_many_parameters_as_the_published_ones(name: str, published: int) -> None:
    loaded = load(str(MODELS / f"{name}.py"))
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == published


def test_a_segmentation_has_the_size_of_the_image() -> None:
    assert run(real("unet", "num_classes=3", "image_size=32", "width=4", "batch_size=2")).shape == (2, 3, 32, 32)


@pytest.mark.parametrize("decode", ["teacher", "greedy"])
def test_padding_does_not_change_a_translation(decode: str) -> None:
    loaded = real("rnnsearch", f"decode={decode}")
    source, mask, target = loaded.args
    assert not mask.all()
    scores, attention = run(loaded)
    torch.testing.assert_close(attention.sum(dim=2), torch.ones(attention.shape[:2]))
    with torch.inference_mode():
        others, _ = loaded.model(torch.where(mask, source, 7), mask, target)
    torch.testing.assert_close(others, scores)


def test_a_greedy_translation_reads_the_words_it_chose() -> None:
    torch.manual_seed(3)
    loaded = real("rnnsearch", "decode=greedy")
    source, mask, _ = loaded.args
    scores, _ = run(loaded)
    teacher = real("rnnsearch")
    teacher.model.load_state_dict(loaded.model.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(teacher.model(source, mask, scores.argmax(dim=2))[0], scores)


def test_a_document_is_classified_by_its_words_only() -> None:
    loaded = real("texting")
    words, adjacency, mask = loaded.args
    expected = run(loaded)
    with torch.inference_mode():
        result = loaded.model(torch.where(mask.unsqueeze(2), words, 5.0), adjacency, mask)
    torch.testing.assert_close(result, expected)


def test_the_tagger_scores_all_paths_and_finds_the_best() -> None:
    crf = real("bert_crf", "num_tags=3").model.crf
    emissions, mask = torch.randn(2, 4, 3), torch.tensor([[True] * 4, [True, True, False, False]])
    with torch.inference_mode():
        likely = crf.decode(emissions, mask)
        for row, length in enumerate((4, 2)):
            inputs = emissions[row : row + 1, :length]
            paths = torch.tensor(list(itertools.product(range(3), repeat=length)))
            whole = torch.ones(1, length, dtype=torch.bool)
            scores = torch.stack([crf.path_score(inputs, path.unsqueeze(0), whole) for path in paths]).squeeze(1)
            together = crf.log_partition(emissions, mask)[row]
            torch.testing.assert_close(together, scores.logsumexp(0))
            assert likely[row, :length].tolist() == paths[scores.argmax()].tolist()


def test_the_chain_scores_all_paths_and_finds_the_best() -> None:
    crf = real("crf", "tags=3").model
    emissions, mask = torch.randn(4, 2, 3), torch.tensor([[True, True], [True, True], [True, False], [True, False]])
    with torch.inference_mode():
        together, likely = crf.log_partition(emissions, mask), crf.viterbi(emissions, mask)
        for row, length in enumerate((4, 2)):
            paths = torch.tensor(list(itertools.product(range(3), repeat=length)))
            scores = crf.start[paths[:, 0]] + crf.end[paths[:, -1]] + emissions[range(length), row, paths].sum(1)
            scores = scores + crf.transitions[paths[:, :-1], paths[:, 1:]].sum(1)
            torch.testing.assert_close(together[row], scores.logsumexp(0))
            assert likely[:length, row].tolist() == paths[scores.argmax()].tolist()


def test_viterbi_runs_as_two_loops() -> None:
    loaded = real("crf", "decode=True", "seq_length=24")
    with torch.no_grad():
        report = check(loaded.model, loaded.args, loaded.kwargs)
    assert report.passed, report
    assert not report.fallbacks
    _, after = report.observed
    assert after < 8


def test_a_selective_scan_adds_up_what_decays() -> None:
    model = real("selective_scan", "model_size=4", "state_size=3").model.double()
    x = torch.randn(2, 6, 8, dtype=torch.double)
    with torch.inference_mode():
        step, write, read = model.select(x).split(model.sizes, dim=2)
        step = functional.softplus(model.to_step(step))
        since = step.cumsum(1)
        expected = model.skip * x
        for t in range(x.shape[1]):
            for s in range(t + 1):
                kept = torch.exp((since[:, t] - since[:, s]).unsqueeze(2) * -model.log_decay.exp())
                mixed = torch.einsum("bdn,bn,bn->bd", kept, write[:, s], read[:, t])
                expected[:, t] += step[:, s] * x[:, s] * mixed
        torch.testing.assert_close(model.scan(x), expected)


def test_wkv_is_attention_that_decays_with_the_distance() -> None:
    model = real("wkv", "model_size=4").model.double()
    key, value = torch.randn(2, 5, 4).double(), torch.randn(2, 5, 4).double()
    for t in range(5):
        distance = torch.arange(t - 1, -1, -1).unsqueeze(1)
        scores = torch.cat([key[:, :t] - distance * model.decay.exp(), (model.bonus + key[:, t]).unsqueeze(1)], 1)
        expected = (scores.softmax(1) * value[:, : t + 1]).sum(1)
        torch.testing.assert_close(model.wkv(key, value)[:, t], expected)


def test_half_the_step_makes_a_sixteenth_of_the_error() -> None:
    def ends_at(steps: int) -> Tensor:
        torch.manual_seed(0)
        loaded = real("neural_ode", f"steps={steps}")
        with torch.inference_mode():
            result: Tensor = loaded.model.double()(loaded.args[0].double())[-1]
        return result

    exact = ends_at(256)
    errors = [(ends_at(steps) - exact).norm() for steps in (8, 16)]
    assert math.isclose(errors[0] / errors[1], 16, rel_tol=0.2)


def test_a_greedy_decoder_reads_the_tokens_it_chose_until_the_end() -> None:
    torch.manual_seed(0)
    loaded = real("decoder_greedy", "vocabulary=5", "longest=20", "batch_size=8")
    tokens, likelihoods = run(loaded)
    model, h = loaded.model, loaded.args[0]
    ended = torch.zeros(8, dtype=torch.bool)
    read = torch.ones(8, dtype=torch.long)
    with torch.inference_mode():
        for t in range(20):
            h = model.cell(model.embedding(read), h)
            best, chosen = model.to_scores(h).log_softmax(1).max(1)
            read = tokens[:, t]
            assert torch.equal(read, chosen.masked_fill(ended, 0))
            torch.testing.assert_close(likelihoods[:, t], best.masked_fill(ended, 0.0))
            ended |= chosen == 2
    assert ended.any()
