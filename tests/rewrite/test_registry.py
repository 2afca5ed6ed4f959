from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuse.errors import FuseError
from fuse.rewrite import registry
from fuse.rewrite.registry import PassInfo


def info(name: str, after: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> PassInfo:
    return PassInfo(
        name, lambda graph: iter(()), "tests", "", "match", after, before, before_gradients=False, enabled=True
    )


def names(infos: list[PassInfo]) -> list[str]:
    return [one.name for one in infos]


@pytest.fixture
def opt_in() -> Iterator[str]:
    @registry.register_pass(enabled=False)
    def opt_in_pass(graph: object) -> Iterator[object]:
        """Only when asked for.

        More about it.
        """
        yield from ()

    yield "opt_in_pass"
    registry.unregister("opt_in_pass")


def test_without_constraints_the_given_order_holds():
    assert names(registry.ordered([info("c"), info("a"), info("b")])) == ["c", "a", "b"]


def test_constraints_move_only_what_they_must():
    passes = [info("late", after=("early",)), info("x"), info("early"), info("first", before=("x", "early"))]
    assert names(registry.ordered(passes)) == ["first", "x", "early", "late"]


def test_a_cycle_names_the_passes_in_it():
    with pytest.raises(FuseError, match="passes a, b declare an order that contradicts itself"):
        registry.ordered([info("a", after=("b",)), info("b", after=("a",)), info("c")])


def test_a_constraint_on_no_pass_suggests_one():
    with pytest.raises(
        FuseError, match=r"'x' of tests names 'dead_cod', which is not a pass \(did you mean 'dead_code'\?\)"
    ):
        registry.ordered([*registry.registered(), info("x", after=("dead_cod",))])


def test_registering_a_name_twice_says_how_that_happens(opt_in):
    with pytest.raises(FuseError, match=r"registered twice.*import fuse\.passes instead"):

        @registry.register_pass()
        def opt_in_pass(graph: object) -> Iterator[object]:
            yield from ()


def test_the_built_in_passes_clean_up_before_they_merge():
    order = names(registry.registered())
    wanted = ["dead_code", "view_chains", "common_subexpressions", "no_ops", "constant_folding", "merge_sibling_gemms"]
    assert [name for name in order if name in wanted] == wanted
    assert order.index("merge_sibling_gemms") < order.index("merge_shared_weight_gemms")


def test_every_pass_has_a_summary_and_an_origin():
    assert all(one.summary.endswith(".") and one.origin.startswith("fuse.passes.") for one in registry.registered())


def test_selection_adds_and_removes():
    assert names(registry.select(["no_ops", "dead_code"], ignore=["no_ops"], extend_select=["view_chains"])) == [
        "dead_code",
        "view_chains",
    ]


def test_opt_in_passes_run_only_when_selected(opt_in):
    assert opt_in not in names(registry.select())
    assert opt_in in names(registry.select(extend_select=[opt_in]))
    assert registry.find(opt_in).summary == "Only when asked for."


@pytest.mark.parametrize("where", ["select", "ignore", "extend_select"])
def test_an_unknown_name_is_an_error_with_a_suggestion(where):
    with pytest.raises(FuseError, match=r"no pass 'no_op' \(did you mean 'no_ops'\?\)"):
        registry.select(**{where: ["no_op"]})
