"""A model file is loaded as its author meant it, without allocating where possible; every fault is one clear line."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import fuse
from fuse.errors import FuseError
from fuse.graph.capture import capture
from fuse.graph.loading.load import load
from fuse.graph.loading.model_file import ModelFile, is_user_code

FIRST_CONVENTION = """
import torch
from torch import nn

features = 3
batch_size = 2

class Model(nn.Module):
    def __init__(self, features, bias):
        super().__init__()
        self.linear = nn.Linear(features, 5, bias=bias)

    def forward(self, x, scale=1.0):
        return self.linear(x) * scale

def get_init_inputs():
    return [features, False]

def get_inputs():
    return [torch.randn(batch_size, features)]
"""

SECOND_CONVENTION = """
import torch
model = torch.nn.Linear(3, 5)
example_inputs = (torch.ones(2, 3),)
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file and returns its path."""

    def write(text: str, name: str = "model.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def refusal(target: str, **options: Any) -> str:
    """The one line that loading ends with, the folder of the file taken away."""
    with pytest.raises(FuseError) as caught:
        load(target, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{Path(target).parent}/", "")


# Conventions


def test_the_first_convention_passes_both_lists(write: Write) -> None:
    loaded = load(write(FIRST_CONVENTION))
    assert loaded.name == "Model"
    assert loaded.model.linear.weight.shape == (5, 3)
    assert loaded.model.linear.bias is None
    assert [argument.shape for argument in loaded.args] == [(2, 3)]
    assert loaded.kwargs == {}


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        ("(torch.ones(2, 3),)", 1, []),
        ("[torch.ones(2, 3)]", 1, []),
        ("{'input': torch.ones(2, 3)}", 0, ["input"]),
        ("lambda: (torch.ones(2, 3),)", 1, []),
        ("lambda: {'input': torch.ones(2, 3)}", 0, ["input"]),
    ],
)
@pytest.mark.parametrize("model", ["torch.nn.Linear(3, 5)", "lambda: torch.nn.Linear(3, 5)"])
def test_the_second_convention_takes_values_and_functions(
    write: Write, model: str, inputs: str, args: int, kwargs: list[str]
) -> None:
    loaded = load(write(f"import torch\nmodel = {model}\nexample_inputs = {inputs}"))
    assert isinstance(loaded.model, nn.Linear)
    assert len(loaded.args) == args
    assert list(loaded.kwargs) == kwargs


def test_a_model_object_built_from_a_class_named_model_is_the_one_taken(write: Write) -> None:
    text = FIRST_CONVENTION.replace("def get_inputs", "def inputs") + "model = Model(4, True)\nexample_inputs = inputs"
    loaded = load(write(text))
    assert loaded.name == "model"
    assert loaded.model.linear.in_features == 4


@pytest.mark.parametrize(
    ("name", "kind"), [("Other", "Other"), ("instance", "Linear"), ("make", "Tanh"), ("Model", "Model")]
)
def test_a_name_after_the_path_picks_a_class_an_object_or_a_function(write: Write, name: str, kind: str) -> None:
    others = """
class Other(Model):
    pass

instance = nn.Linear(3, 3)

def make():
    return nn.Tanh()
"""
    loaded = load(write(FIRST_CONVENTION + others) + f":{name}")
    assert loaded.name == name
    assert type(loaded.model).__name__ == kind


def test_models_are_in_eval_mode_unless_training_is_asked_for(write: Write) -> None:
    path = write(SECOND_CONVENTION + "model = torch.nn.Sequential(model, torch.nn.Dropout().eval())")
    assert not load(path).model.training
    training = load(path, train=True).model
    assert [module.training for module in training.modules()] == [True, True, False]


# Fake and real tensors


def test_layers_that_are_copies_of_one_another_are_captured_without_allocating(write: Write) -> None:
    path = write("""
        import copy, torch
        layer = torch.nn.Linear(1_000_000, 1_000_000)
        model = torch.nn.Sequential(layer, copy.deepcopy(layer))
        example_inputs = (torch.ones(2, 1_000_000),)
    """)
    loaded = load(path)
    assert isinstance(loaded.args[0], FakeTensor)
    assert (
        len(
            capture(loaded.model, loaded.args).graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
        )
        == 2
    )


def test_a_model_far_larger_than_memory_is_loaded_without_allocating(write: Write) -> None:
    loaded = load(write(SECOND_CONVENTION.replace("3", "1_000_000").replace("5", "1_000_000")))
    assert loaded.notes == ()
    weight = loaded.model.weight
    assert isinstance(weight, FakeTensor)
    assert isinstance(weight, nn.Parameter)
    assert weight.numel() == 10**12
    assert loaded.args[0].fake_mode is weight.fake_mode


@pytest.mark.parametrize("initialiser", ["trunc_normal_", "orthogonal_", "kaiming_normal_", "xavier_uniform_"])
def test_initialisers_run_without_values(write: Write, initialiser: str) -> None:
    before = nn.init._no_grad_trunc_normal_
    loaded = load(write(f"{SECOND_CONVENTION}torch.nn.init.{initialiser}(model.weight)"))
    assert loaded.notes == ()
    assert nn.init._no_grad_trunc_normal_ is before


@pytest.mark.parametrize(
    "reads",
    [
        "model.weight.sum().item()",
        "model.weight.detach().numpy()",
        "model.weight.tolist()",
        "bool(model.weight.sum() > 0)",
        "model.weight[model.weight > 0]",
        "torch.tensor([model.weight.detach().sum()])",
    ],
)
def test_a_file_that_reads_values_is_loaded_for_real_with_a_note(write: Write, reads: str) -> None:
    path = write(SECOND_CONVENTION + f"value = {reads}")
    loaded = load(path)
    assert not isinstance(loaded.model.weight, FakeTensor)
    (note,) = loaded.notes
    assert f"{path}:5" in note
    assert "loaded for real" in note


def test_values_are_real_and_repeatable_when_asked_for(write: Write) -> None:
    path = write(FIRST_CONVENTION)
    first, same, other = (load(path, real=True, seed=seed) for seed in (1, 1, 2))
    assert not isinstance(first.args[0], FakeTensor)
    assert torch.equal(first.args[0], same.args[0])
    assert torch.equal(first.model.linear.weight, same.model.linear.weight)
    assert not torch.equal(first.args[0], other.args[0])


def test_a_plain_mistake_is_reported_without_running_the_file_twice(write: Write, tmp_path: Path) -> None:
    path = write(f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\nundefined_name")
    assert "NameError" in refusal(path)
    assert (tmp_path / "runs").read_text() == "x"


def test_a_failure_with_real_tensors_says_why_they_were_used(write: Write) -> None:
    message = refusal(write(SECOND_CONVENTION + "model.weight.sum().item()\nraise ValueError('wrong size')"))
    assert message.startswith(
        "model.py:6: loading the file: ValueError: wrong size (loaded for real because model.py:5"
    )


# Settings and inputs


def test_a_setting_changes_everything_derived_from_it(write: Write) -> None:
    loaded = load(write(FIRST_CONVENTION), settings=["features=7", "batch_size=1"])
    assert loaded.args[0].shape == (1, 7)
    assert loaded.model.linear.in_features == 7


@pytest.mark.parametrize("name", ["x", "0"])
@pytest.mark.parametrize("real", [True, False])
def test_an_input_is_replaced_by_name_or_position(write: Write, name: str, real: bool) -> None:
    loaded = load(write(FIRST_CONVENTION), inputs=[f"{name}=bf16[4,6,3]"], real=real)
    (x,) = loaded.args
    assert x.shape == (4, 6, 3)
    assert x.dtype == torch.bfloat16
    assert isinstance(x, FakeTensor) != real


def test_inputs_given_in_full_need_no_convention(write: Write) -> None:
    path = write("import torch\nmodel = torch.nn.Linear(3, 5)")
    assert load(path, inputs=["input=f32[2,3]"]).kwargs["input"].shape == (2, 3)
    assert "defines no inputs of the model; define get_inputs() or example_inputs" in refusal(path)


# Faults in the file


def test_files_that_are_not_there_or_not_python_are_named(write: Write, tmp_path: Path) -> None:
    path = write(FIRST_CONVENTION, "lstm_loop.py")
    assert refusal(path.replace("loop", "lop")) == f"no file lstm_lop.py; did you mean {path}?".replace(
        f"{tmp_path}/", ""
    )
    assert refusal(str(tmp_path / "far" / "model.py")) == "no file model.py"
    assert refusal(write("", "model.txt")) == (
        "model.txt is not a .py file; give the path of a model file, or path/to/model.py:Name"
    )
    assert refusal(str(tmp_path)).startswith(f"{tmp_path.name} is a folder; give the path of a model file")
    assert refusal(f"{path}:").endswith("names no class or object; write path/to/model.py:Name")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nif x\n    pass", "model.py:2: SyntaxError: expected ':'"),
        ("if True:\npass", "model.py:2: IndentationError: expected an indented block after 'if' statement on line 1"),
        ("x = 1\0", "model.py.*null bytes"),
        (
            "import torch\nimport no_such_module",
            "model.py:2: ModuleNotFoundError: No module named 'no_such_module'; install",
        ),
        ("from torch import no_such_name", "model.py:1: ImportError: cannot import name 'no_such_name' from 'torch'"),
        ("x = 1\nprint(y)", "model.py:2: loading the file: NameError: name 'y' is not defined$"),
        ("def f():\n    raise KeyError\nf()", "model.py:2: loading the file: KeyError$"),
        (
            "import sys\nsys.exit(3)",
            "model.py:2: the file called exit while loading the file; put what should only run",
        ),
        ("x = 1", "model.py defines no model; define `class Model"),
        ("class Net: pass", "model.py defines no model, only Net; define `class Model"),
        ("model = 3\nexample_inputs = ()", "model.py: model is of type int; it must be an nn.Module or return one$"),
        ("model = dict\nexample_inputs = ()", r"model.py: model\(\) is of type dict; it must be an nn.Module$"),
        (
            SECOND_CONVENTION.replace("(torch.ones(2, 3),)", "3"),
            "model.py: example_inputs is of type int; it must be a tuple",
        ),
    ],
)
def test_faults_of_the_file_are_one_line_with_the_line_of_the_user(write: Write, text: str, message: str) -> None:
    assert re.match(message, refusal(write(text)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[features, False]",
            "[features]",
            r"model.py:9: building Model: TypeError: .*missing 1 required .*; get_init_inputs\(\) returns",
        ),
        ("nn.Linear(features", "nn.Linear(-features", r"model.py:11: building Model: \w+: .*"),
        (
            "[features, False]",
            "3",
            r"model.py: get_init_inputs\(\) is of type int; return the list of Model's arguments$",
        ),
        (
            "[features, False]",
            "1 / 0",
            r"model.py:17: calling get_init_inputs\(\): ZeroDivisionError: division by zero$",
        ),
        ("torch.randn(", "torch.rand_n(", r"model.py:20: calling get_inputs\(\): AttributeError: .*rand_n"),
        (
            "[torch.randn(batch_size, features)]",
            "torch.ones(2)",
            r"model.py: get_inputs\(\) is of type Tensor; it must be",
        ),
        (
            "[torch.randn(batch_size, features)]",
            "{'scale': 2.0}",
            r"model.py:13: the inputs do not fit forward, which takes x, scale: missing .* 'x'; return",
        ),
        (
            "[torch.randn(batch_size, features)]",
            "[torch.ones(2, 3), 1.0, 2.0]",
            r"model.py:13: the inputs do not fit .*: too many positional arguments; return",
        ),
        ("def get_inputs():", "def get_inputs(size):", r"model.py:19: calling get_inputs\(\): TypeError: .*'size'"),
        (
            "batch_size, features)",
            "2, 3) @ torch.randn(4, 5)",
            r"model.py:20: calling get_inputs\(\): RuntimeError: .*",
        ),
    ],
)
def test_faults_of_constructor_and_inputs_name_exception_and_line(
    write: Write, old: str, new: str, message: str
) -> None:
    assert re.match(message, refusal(write(FIRST_CONVENTION.replace(old, new))))


@pytest.mark.parametrize(
    "addition",
    [
        "    def __call__(self, x): return super().__call__(x, 2.0)",
        "        self.register_forward_pre_hook(lambda module, args: (*args, 2.0))",
    ],
)
def test_arguments_that_a_call_or_a_hook_adds_are_not_missed(write: Write, addition: str) -> None:
    text = FIRST_CONVENTION.replace("scale=1.0", "scale").replace(
        "\n\n    def forward", f"\n{addition}\n\n    def forward"
    )
    loaded = load(write(text))
    assert loaded.model(*loaded.args).shape == (2, 5)


def test_a_missing_name_is_answered_with_a_suggestion(write: Write) -> None:
    path = write(FIRST_CONVENTION)
    assert refusal(f"{path}:Modell") == "model.py defines no 'Modell'; did you mean 'Model'?"
    assert refusal(f"{path}:x") == "model.py defines no 'x'; it has Model, get_init_inputs, get_inputs"
    assert refusal(f"{path}:features") == "model.py: features is of type int; it must be an nn.Module or return one"


def test_interrupting_the_file_is_left_to_the_user(write: Write) -> None:
    path_before = list(sys.path)
    with pytest.raises(KeyboardInterrupt):
        load(write("raise KeyboardInterrupt"))
    assert sys.path == path_before


# Surroundings


def test_modules_beside_the_file_are_found_while_it_loads_and_forgotten_after(write: Write, tmp_path: Path) -> None:
    path_before = list(sys.path)
    for folder, size in (("one", 3), ("two", 4)):
        write(f"size = {size}", f"{folder}/sizes_of_layers.py")
        path = write(
            "from sizes_of_layers import size\n" + SECOND_CONVENTION.replace("3", "size"), f"{folder}/model.py"
        )
        assert load(path).model.in_features == size
        assert sys.path == path_before
        assert "sizes_of_layers" not in sys.modules


def test_a_fault_in_a_module_beside_the_file_names_that_module(write: Write) -> None:
    write("x = 1\nx.y", "helper_of_model.py")
    message = refusal(write("import helper_of_model"))
    assert message == "helper_of_model.py:2: loading the file: AttributeError: 'int' object has no attribute 'y'"
    write("x = 1\nx y  # of another length: Python tells what it compiled by seconds and sizes", "helper_of_model.py")
    assert refusal(write("import helper_of_model")) == "helper_of_model.py:2: SyntaxError: invalid syntax"
    assert "helper_of_model" not in sys.modules


def test_libraries_below_the_folder_of_the_file_are_never_blamed() -> None:
    root = Path(fuse.__file__).parents[1]
    file = ModelFile(root / "model.py", "model.py", None, compile("", "model.py", "exec"))
    assert is_user_code(str(root / "model.py"), file)
    assert is_user_code(str(root / "parts" / "layers.py"), file)
    assert not is_user_code(fuse.__file__, file)
    assert not is_user_code(str(root / "venv" / "site-packages" / "torch" / "nn.py"), file)


def test_a_file_named_like_a_library_does_not_take_its_place(write: Write) -> None:
    path = write(FIRST_CONVENTION, "json.py")
    loaded = load(path)
    import json

    assert json.loads("1") == 1
    assert sys.modules[type(loaded.model).__module__].__file__ == str(path)
    assert type(loaded.model).__module__ != "json"


def test_a_file_is_no_script_and_may_hold_dataclasses(write: Write) -> None:
    text = """
    from __future__ import annotations
    from dataclasses import dataclass
    @dataclass
    class Size:
        width: int = 3
    if __name__ == "__main__":
        raise SystemExit
    """
    assert load(write(textwrap.dedent(text) + SECOND_CONVENTION.replace("3", "Size().width"))).model.in_features == 3


def test_what_the_file_prints_stays_out_of_standard_output(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    load(write("print('building')\n" + SECOND_CONVENTION))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "building\n"
