"""Why mutants that no test notices change nothing: by the file, the operator, and the line as it stands.

A survivor without a reason here is a gap: a near miss that nobody has written down yet.
"""

from __future__ import annotations

REASONS = {
    (
        "cross_entropy",
        "Gt_NotEq",
        "if logits.dim() > 2 and logits.stride(1) == 1:",
    ): "a log-softmax over dimension 1 has two dimensions at least",
    ("cross_entropy", "Eq_LtE", "if reduction == NONE:"): "a reduction is 0, 1 or 2",
    (
        "cross_entropy",
        "Eq_LtE",
        "return losses.sum() / weights.sum() if reduction == MEAN else losses.sum()",
    ): "a reduction of 0 has returned before",
    (
        "nearest_upsample",
        "Eq_LtE",
        'factor = m["factor"] if m["spelling"] == 0 else size[0] / max(height, 1)',
    ): "the position of an alternative is never negative",
    (
        "conditions",
        "Gt_GtE",
        "if node in seen or around.place.get(node, 0) > last:",
    ): "the last node is in the match, which is asked before",
    ("matching", "LeaveOut", "if step.node in own:"): (
        "costs only: what comes of such candidates is dropped at the end"
    ),
    ("matching", "LeaveOut", "if not least:"): "costs only: without lists, the forms of every length are the same",
    (
        "matching",
        "Gt_NotEq",
        "several = {place: one for place, one in matches.items() if len(one.outputs) > 1}",
    ): "a match has one result at least",
    ("matching", "LeaveOut", "if len(several) < 2:"): "costs only: a circle needs two",
    (
        "matching",
        "Gt_NotEq",
        "circles = [part for part in networkx.strongly_connected_components(quotient) if len(part) > 1]",
    ): "a strongly connected component has one node at least",
    (
        "replacing",
        "Gt_NotEq",
        'shared = own.op == "placeholder" or owners.count(own) > 1',
    ): "each owner is counted once at least",
    ("exact_match", "Lt_NotEq", "if len(results) < len(outputs):"): "the results are some of the outputs",
    (
        "exact_match",
        "Eq_GtE",
        "return single and torch.Size(one.shape).numel() == torch.Size(other.shape).numel()",
    ): "no graph has the term of a reshape to another number of elements",
    (
        "exact_match",
        "Eq_LtE",
        "return single and torch.Size(one.shape).numel() == torch.Size(other.shape).numel()",
    ): "no graph has the term of a reshape to another number of elements",
    (
        "index",
        "Lt_NotEq",
        "if own is None or own.shape.viewed < 0:",
    ): "no operator is a view of another operand than its first",
    ("index", "Eq_GtE", "if own.shape.viewed == place:"): "no operator is a view of another operand than its first",
    ("views", "Eq_GtE", "if count == x.shape[dim]:"): "a slice has no more elements than what it is taken from",
    ("views", "Gt_NotEq", "if len(b.shape) > 2:"): "the right operand of a product has two dimensions at least",
}
"""The reason by the stem of the file, the operator without what all comparisons share, and the line."""


def reason(survivor: dict[str, str]) -> str | None:
    """Why ``survivor``, of ``mutation.json``, changes nothing; None where that is not known."""
    stem = survivor["file"].rpartition("/")[2].removesuffix(".py")
    operator = survivor["operator"].removeprefix("ReplaceComparisonOperator_")
    return REASONS.get((stem, operator, survivor["before"]))
