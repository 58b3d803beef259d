"""The run of ILQL that a call names, for commands that no other run is for."""

from __future__ import annotations

from pathlib import Path

from raffia.cli.errors import UsageError
from raffia.cli.runs import HOME, chosen_run, config_of
from raffia.cli.style import call
from raffia.recipes.ilql.config import ILQLRun
from raffia.report.folder import find_runs
from raffia.report.summary import summarise

TASKS = ("wordle", "data")  # what `summarise` calls the environment of such runs


def chosen_ilql_run(given: str | None, command: str) -> Path:
    """Its folder; UsageError, with runs that there are, if none is given or nothing lies there.

    >>> chosen_ilql_run("away/gone", "chat")
    Traceback (most recent call last):
        ...
    raffia.cli.errors.UsageError: away/gone does not exist
    """
    if given is None:
        fit = [run for run in find_runs(HOME) if summarise(run).env in TASKS]
        calls = [call("raffia", command, run) for run in fit[:3]]
        raise UsageError("which run?", *calls or ["raffia train ilql --preset wordle"])
    return chosen_run(given, command)


def config_of_ilql(run: Path, *others: str) -> ILQLRun:
    """Its settings; UsageError if it is of another algorithm.

    others: calls that do with such a run what was meant.
    """
    config = config_of(run)
    if not isinstance(config, ILQLRun):
        raise UsageError(f"{run} is no run of ILQL: it plays {config.env.id}", *others)
    return config
