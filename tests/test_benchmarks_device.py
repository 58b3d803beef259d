"""The checks for a GPU, on the CPU: they run, and notice disagreement and failures."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import device, device_checks, device_constants
from benchmarks.device_agreement import (
    Agreement,
    equal,
    near,
    near_as_a_whole,
    same_share,
)
from benchmarks.device_checks import step
from benchmarks.device_cost import Cost, cost_of
from benchmarks.device_figures import Effort, Figure
from benchmarks.device_ilql import Speaker
from benchmarks.device_limits import fixed_precision
from benchmarks.device_report import Report, not_measured, summary
from benchmarks.device_tests import MARK, Outcome
from raffia import TensorDict
from raffia.algorithms.efficientzero.learner import EfficientZeroLearner
from raffia.algorithms.efficientzero.planning import Planner
from tests.marks import slow_among
from tests.nn.test_cudagraphs import Twin

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
QUICK = "^(TensorDict|replay|update, cartpole|search, cartpole|figures, wordle)$"


def run(capsys, *args):
    """The command's status and output."""
    status = device.main(["--device", "cpu", "--seconds", "0", *args])
    return status, capsys.readouterr().out


@pytest.mark.slow
def test_without_a_gpu_it_runs_and_lists_what_was_not_measured(capsys, tmp_path):
    file = tmp_path / "figures.json"
    status, output = run(capsys, "--ops", QUICK, "--json", str(file))
    assert status == 0, output
    for part in ("the tests that need a card", "page-locked", "CUDA graphs", "wordle: texts"):
        assert re.search(f"^not measured: .*{part}", output, re.MULTILINE)
    found = json.loads(file.read_text())
    assert found["holds"] and not found["failures"] and found["small"]
    assert {check["check"] for check in found["checks"]} >= {"TensorDict", "replay"}
    assert [figure["name"] for figure in found["figures"]] == ["wordle: update", "wordle: texts"]
    assert all(figure["each_second"]["tokens"] > 0 for figure in found["figures"])
    assert 0 < found["figures"][0]["share_by_flops"]


@pytest.mark.slow
def test_all_checks_run(capsys):
    status, output = run(capsys, "--ops", "^(?!tests)")
    assert status == 0, output
    for name in [*device.CHECKS, "atari100k: the whole loop", "tower, forward and backward"]:
        assert name in output


@pytest.mark.slow
def test_a_disagreement_and_a_failure_are_reported(capsys, monkeypatch):
    def broken(device, small):
        raise RuntimeError("no kernel image")

    wrong = Agreement("other", "numbers", 3.0, "equal bits")
    checks = {"broken": broken, "other": lambda device, small: [wrong]}
    monkeypatch.setattr(device, "CHECKS", checks)
    monkeypatch.setattr(device, "gpu_tests", lambda: Outcome({"passed": 1, "failed": 1}, "why\n"))
    for name, message in (
        ("other", "disagrees: other: numbers, 3"),
        ("broken", "no kernel image"),
        ("tests", "1 passed, 1 failed"),
    ):
        status, output = run(capsys, "--ops", f"^{name}$")
        assert status == 1 and message in output


def larger(tree):
    return tree.apply(lambda x: x + 1)


def more_tokens(generated):
    return replace(
        generated,
        tokens=[[[*text, 1] for text in texts_of_prompt] for texts_of_prompt in generated.tokens],
    )


CARTPOLE = "update, cartpole"


WRONG = [  # the check, the function with changed results, the change, and the failed agreements
    (CARTPOLE, (EfficientZeroLearner, "grads"), lambda both: (both[0] * 1.1, both[1]), {"grads"}),
    (CARTPOLE, (EfficientZeroLearner, "apply"), larger, {"apply, of the same gradients"}),
    ("search, cartpole", (Planner, "root"),
     lambda root: root._replace(prior_logits=root.prior_logits.flip(-1)),
     {"visit counts", "root value"}),
    ("make_batch, cartpole", (device_checks, "make_batch"),
     lambda both: (larger(both[0]), both[1]),
     {"what is not searched", "target policy", "target value"}),
    ("ILQL generation, GPT", (Speaker, "__call__"), more_tokens, {"texts"}),
    ("TensorDict", (TensorDict, "load"), larger, {"loaded on the CPU"}),
]  # fmt: skip


@pytest.mark.slow
def test_a_figure_that_fails_leaves_the_others(capsys, monkeypatch):
    def fails():
        raise torch.OutOfMemoryError("too large")

    def group(effort):
        yield "first", fails
        yield "second", lambda: Figure("second", 0.5, {"calls": 1.0}, Cost(1e9, 1e9, 5))

    monkeypatch.setattr(device, "GROUPS", {"some": group})
    status, output = run(capsys, "--ops", "^some$")
    assert status == 1 and "failed: first: OutOfMemoryError: too large" in output
    assert re.search("^second .* 2 calls", output, re.MULTILINE)


def every_second(call, change):
    """The call with every second result changed: the device's, in a check."""
    count = itertools.count()

    def twin(*args, **kwargs):
        result = call(*args, **kwargs)
        return change(result) if next(count) % 2 else result

    return twin


def differing(check):
    return {agreement.what for agreement in check(CPU, True) if not agreement.holds}


@pytest.mark.parametrize(("check", "target", "change", "failed"), WRONG)
def test_each_check_notices_a_wrong_device(check, target, change, failed, monkeypatch):
    assert not differing(device.CHECKS[check])
    monkeypatch.setattr(*target, every_second(getattr(*target), change))
    assert differing(device.CHECKS[check]) >= failed


def test_agreements_notice_differences():
    ones = TensorDict(a=torch.ones(3), b=torch.ones(2))
    other = TensorDict(a=torch.ones(3), b=torch.tensor([1.0, 1.1]))
    one, nan = torch.ones(1), torch.tensor([float("nan")])
    visits = torch.tensor([[50, 0]]), torch.tensor([[49, 1]])
    for agreement, holds in (
        (equal("", "", ones, ones.clone()), True),
        (equal("", "", ones, other), False),
        (equal("", "", ones, ones.double()), False),
        (near_as_a_whole("", "", ones, other, share=0.01), False),
        (near_as_a_whole("", "", ones, other, share=0.1), True),
        (near("", "", one, nan, rtol=1.0), False),
        (near_as_a_whole("", "", TensorDict(a=one), TensorDict(a=nan), share=1), False),
        (near("", "", torch.ones(2), torch.ones(3), rtol=1.0), False),
        (same_share("", "", *visits, allowed=0.02, of="visits"), True),
        (same_share("", "", *visits, allowed=0.01, of="visits"), False),
    ):
        assert agreement.holds is holds


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "cuda"], "sees no card"),
        (["--device", "meta"], "cuda and cpu"),
        (["--ops", "nothing"], "--list names them"),
    ],
)
def test_invalid_arguments_are_refused(args, message):
    if torch.cuda.is_available() and "cuda" in args:
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match=message):
        device.main(args)


def test_parameters_that_rounding_moves_are_not_compared():
    params = TensorDict(w=torch.tensor([1.0, 2.0, 3.0]), bias=torch.tensor([4.0]))
    grads = TensorDict(w=torch.tensor([0.5, -1e-6, 0.5]), bias=torch.tensor([1e-9]))
    compared = step(params, TensorDict(grads=grads))
    assert compared["w"].tolist() == [1, 0, 3] and compared["bias"].tolist() == [0]


def test_bytes_and_operations_are_those_that_reach_the_device():
    x, table = torch.ones(4, 4), torch.ones(100, 2)
    assert cost_of(lambda: x @ x) == Cost(128.0, 3 * 64, 1)
    assert cost_of(lambda: x.t().view(4, 2, 2)[0]) == Cost()
    assert cost_of(lambda: x.mul_(2)).num_bytes == 2 * 64
    assert cost_of(lambda: x[:1].expand(4, 4) + 1).num_bytes == 16 + 64
    picked = cost_of(lambda: torch.nn.functional.embedding(torch.arange(3), table))
    assert picked.num_bytes >= 2 * 3 * 2 * 4 and picked.num_bytes < table.numel() * 4


def test_precision_is_restored():
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    with pytest.raises(KeyError), fixed_precision("tf32"):
        assert [backend.allow_tf32 for backend in backends] == [True, True]
        raise KeyError
    assert [backend.allow_tf32 for backend in backends] == before


@pytest.mark.parametrize(
    "subject", slow_among(device_constants.SUBJECTS, "tower, forward and backward")
)
def test_graphs_are_warmed_up_recorded_and_replayed(subject, monkeypatch):
    """With a twin of the GPU, which runs on the CPU."""
    twin = Twin()
    monkeypatch.setattr(device_constants, "Card", lambda device: twin)
    effort = Effort(CPU, 0.0, small=True)
    make = device_constants.SUBJECTS[subject]
    for variant in [variant for variant in device_constants.VARIANTS if variant.graph]:
        twin.log.clear()
        figure = device_constants._measured("it", make, variant, effort)
        assert twin.log[:4] == ["warm"] * 3 + ["record"] and {*twin.log[4:]} == {"replay"}
        assert figure.cost.flops > 1e7 and figure.precision == variant.precision


def test_on_a_gpu_more_is_measured():
    card, figure = torch.device("cuda", 0), Figure("tower, graph, bfloat16", 1.0, {}, Cost(3e13))
    report = Report(Effort(card, 3.0, small=False), Outcome({"passed": 97}, ""), figures=[figure])
    assert not not_measured(report)
    assert "30.0 to 30.0 TFLOP/s, where plans assume 60" in summary(report)
    report.tests = Outcome({"skipped": 97}, "")
    assert not_measured(report) == ["the tests that need a card: none ran"]


@pytest.mark.gpu
@pytest.mark.parametrize("part", [*device.CHECKS, "convolutions"])
def test_all_checks_agree_on_a_gpu(part, capsys):
    status = device.main(["--small", "--seconds", "0", "--ops", f"^{re.escape(part)}$"])
    assert status == 0, capsys.readouterr().out


def test_tests_that_need_a_gpu_have_the_mark():
    """One mark for all of them, by which the benchmark finds them."""
    by_hand = re.compile(r"skipif\(\s*not torch\.cuda|\*\s*torch\.cuda\.is_available")
    found = {file: file.read_text() for file in ROOT.glob("tests/**/*.py")}
    assert not [file for file, text in found.items() if by_hand.search(text)]
    assert len([file for file, text in found.items() if f"pytest.{MARK}" in text]) > 10
