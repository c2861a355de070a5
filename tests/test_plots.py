"""The report's pictures where there is one budget, where there are many policies, and where their names are long."""

import io
import itertools

import numpy as np
import pytest

from jaxkv.evaluation import plots
from jaxkv.evaluation.summary import wilson

LONG = "snapkv with allocate kind proportional and a window of thirty-two tokens at the end of the prompt"


def records(policies, budgets, lengths=(288,)):
    """Answers of every policy at every budget; the score falls with the policy's number."""
    out = []
    for (number, policy), budget, length, depth in itertools.product(enumerate(policies), budgets, lengths, (0.1, 0.9)):
        out.append(
            {
                "kind": "answer", "source": "jaxkv", "policy": policy, "budget": budget, "ratio": None, "mode": "aware",
                "task": "passkey", "length": length, "depth": depth, "score": 1 - number / len(policies), "kept": 100,
                "cache_bytes": 2**20 * (number + 1), "tokens_per_second": 10.0 + number + depth,
            }
        )  # fmt: skip
    return out


def fidelities(policies, budget):
    by_head = np.full((4, 2), 0.5).tolist()
    numbers = {"kl": 0.1, "top1": 0.9, "mass": 0.5}
    return [{"policy": name, "budget": budget, "at": budget, "by_head": by_head, **numbers} for name in policies]


def labels(axes):
    return [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]


def inside(figure):
    """Draws it, and tells whether all that is seen lies within its edges."""
    figure.savefig(io.BytesIO())
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    return min(box.x0, box.y0) >= -0.02 and box.x1 <= width + 0.02 and box.y1 <= height + 0.02


@pytest.mark.long
@pytest.mark.parametrize("count, budgets", [(63, (128,)), (2, (128,)), (25, (72, 128))])
def test_each_policy_has_a_line_of_its_own(count, budgets):
    names = [f"policy-{number}" for number in range(count)]
    some = records(names, budgets)
    quality = plots.quality_figure(some)
    assert len(quality.axes) == len(budgets) and labels(quality.axes[0]) == names[::-1], "the best on top"
    assert quality.get_figheight() > 0.18 * count
    for figure in (plots.tasks_figure(some), plots.needle_figure(some)):
        (axes,) = figure.axes
        assert labels(axes) == names and len(axes.texts) >= count
        assert inside(figure)
    assert inside(quality) and inside(plots.cost_figure(some))
    found = [row for budget in budgets for row in fidelities(names, budget)]
    assert inside(plots.fidelity_figure(found)) and inside(plots.heads_figure(found))


def test_few_policies_at_several_budgets_are_lines():
    figure = plots.quality_figure(records(["full", "h2o"], (72, 128, 192)))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "tokens kept per KV head" and len(axes.containers) == 2


@pytest.mark.parametrize("budgets", [(128,), (72, 128)])
def test_long_names_are_whole(budgets):
    some = records([LONG, LONG + ", again", "h2o"], budgets)
    for figure in (plots.quality_figure(some), plots.tasks_figure(some), plots.cost_figure(some)):
        assert inside(figure)
        drawn = " ".join(text.get_text() for text in figure.findobj(lambda each: hasattr(each, "get_text")))
        assert LONG in " ".join(drawn.split())


def test_several_lengths_are_heat_maps():
    figure = plots.needle_figure(records(["full", "h2o"], (72, 128), lengths=(288, 512)))
    assert len(figure.axes) == 2 * 2 + 1
    some = records(["h2o"], (72,), lengths=(288, 512))
    both = [*some, *({**each, "mode": "agnostic", "score": 0.0} for each in some)]
    figure = plots.needle_figure(both)
    assert [axes.get_ylabel() for axes in figure.axes[:2]] == ["h2o, aware", "h2o, agnostic"]
    assert [axes.images[0].get_array().max() for axes in figure.axes[:2]] == [1, 0], "modes are not mixed"
    assert plots._questions([{"score": wilson([1.0])}, {"score": wilson([1.0, 0.0])}]) == "1 to 2 questions"
