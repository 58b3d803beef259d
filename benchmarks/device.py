"""What a card makes of all this: do results agree with the CPU's, and how fast is it?

    python -m benchmarks.device [--device cuda|cpu] [--seconds S] [--small] [--ops REGEX]
        [--threads N] [--json FILE]

In three parts: the tests that need a card (`pytest -m gpu`); updates, searches, batches, texts,
containers and replay, on the device and on the CPU from the same numbers; and figures at the sizes
that presets have, each beside what the device's own products and copies would allow. Less than ten
minutes on a card. Without one all of it runs on the CPU with small sizes, in about three minutes,
and says what was not measured. The exit status is 1 where something fails or disagrees.
"""

import argparse
import gc
import re
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path: this folder heads sys.path, and tensordict.py hides the peer
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks import (
    device_checks,
    device_checks_data,
    device_checks_ilql,
    device_constants,
    device_figures,
    device_populations,
    device_sums,
)
from benchmarks.device_figures import Effort, Group
from benchmarks.device_limits import fixed_precision, measure_limits
from benchmarks.device_report import (
    CHECK_HEADER,
    FIGURE_HEADER,
    Report,
    as_json,
    check_cells,
    check_line,
    figure_cells,
    figure_line,
    limit_line,
    setting,
    summary,
)
from benchmarks.device_tests import gpu_tests

TESTS = "tests"  # for --ops
CHECKS = device_checks_data.CHECKS | device_checks.CHECKS | device_checks_ilql.CHECKS
GROUPS = (
    device_constants.GROUPS | device_figures.GROUPS | device_populations.GROUPS | device_sums.GROUPS
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="of each figure; default 3, or 0.5 if small"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, as on a CPU in any case")
    parser.add_argument("--ops", metavar="REGEX", default="", help="only the parts that match")
    parser.add_argument("--threads", type=int, metavar="N", default=1, help="of torch on the CPU")
    parser.add_argument("--list", action="store_true", help="name the parts, and do nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    return parser.parse_args(argv)


def effort_of(args: argparse.Namespace) -> Effort:
    """The device and the time for each figure, from the arguments.

    >>> effort_of(parse(["--device", "cpu"]))
    Effort(device=device(type='cpu'), seconds=0.5, small=True)
    """
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type not in ("cuda", "cpu"):
        raise SystemExit(f"--device {name}: it measures cuda and cpu, and can't wait for others")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no card here: leave --device out, or say --device cpu")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)
    small = args.small or device.type != "cuda"
    seconds = args.seconds if args.seconds is not None else (0.5 if small else 3.0)
    return Effort(device, seconds, small)


def check_all(report: Report, ops: str) -> None:
    """Hold the device's results against the CPU's."""
    wanted = {name: check for name, check in CHECKS.items() if re.search(ops, name)}
    if not wanted:
        return
    print(check_line(CHECK_HEADER))
    for name, check in wanted.items():
        try:
            with fixed_precision("float32"):
                found = check(report.effort.device, report.effort.small)
        except Exception as error:  # the others are still run
            _fail(report, name, error)
            continue
        report.agreements += found
        for agreement in found:
            print(check_line(check_cells(agreement)), flush=True)
        free(report.effort.device)
    print()


def measure_all(report: Report, ops: str) -> None:
    """The figures, and what they are held against."""
    wanted = {name: group for name, group in GROUPS.items() if re.search(ops, name)}
    if not wanted:
        return
    effort = report.effort
    report.limits = measure_limits(effort.device, effort.seconds, effort.small)
    print(limit_line(report.limits))
    print(figure_line(FIGURE_HEADER))
    for name, group in wanted.items():
        try:
            measure_group(report, group)
        except Exception as error:  # such as too little memory
            _fail(report, name, error)
        free(effort.device)
    print()


def measure_group(report: Report, group: Group) -> None:
    """Figures that share what they are about."""
    assert report.limits is not None
    for name, measure in group(report.effort):
        try:
            figure = measure()
        except Exception as error:
            _fail(report, name, error)
            continue
        report.figures.append(figure)
        print(figure_line(figure_cells(figure, report.limits)), flush=True)
        free(report.effort.device)


def _fail(report: Report, name: str, error: Exception) -> None:
    why = f"{type(error).__name__}: {error}"
    report.failures[name] = why
    print(f"{name}: {why.splitlines()[0]}", flush=True)


def free(device: torch.device) -> None:
    """Give back the memory of what was done."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        print("\n".join([TESTS, *CHECKS, *GROUPS]))
        return 0
    if not any(re.search(args.ops, name) for name in [TESTS, *CHECKS, *GROUPS]):
        raise SystemExit(f"no part matches --ops {args.ops!r}; --list names them")
    effort = effort_of(args)
    torch.set_num_threads(args.threads)
    report, machine = Report(effort), setting(effort.device)
    print(machine, flush=True)
    if re.search(args.ops, TESTS):
        report.tests = gpu_tests()
        print(report.tests.output, end="", flush=True)
    check_all(report, args.ops)
    measure_all(report, args.ops)
    print(summary(report))
    if args.json:
        args.json.write_text(as_json(report, machine))
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
