"""`kvtiers demo`: watch a prefix come back from every tier of a chain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiers.cli.arguments import ChainOption, JsonFile, check_places, refused, write_result

if TYPE_CHECKING:
    from rich.console import Console

    from tiers.lab.demo.plan import Plan
    from tiers.lab.demo.worker import Asked


def demo(
    json_file: JsonFile = None,
    model: Annotated[
        str | None, typer.Option(help="Serve this model; by default SmolLM2-135M-Instruct.")
    ] = None,
    chain_file: ChainOption = None,
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="Arguments of vllm.LLM, over the demo's own.")
    ] = "{}",
) -> None:
    """Serve real prompts cold, then from CPU memory, from disk and from Redis, and compare.

    Without --chain the tiers are the CPU, a disk and an embedded Valkey.

    \b
    kvtiers demo --model Qwen/Qwen3-0.6B --chain chain.yaml
    """
    from rich.console import Console

    from spec.errors import SpecError
    from tiers.errors import KVTiersError

    check_places(json_file=json_file, keep=[chain_file])
    arguments = _engine_arguments(engine_args)
    try:
        faults = _demonstrate(Console(highlight=False), chain_file, model, arguments, json_file)
    except SpecError:
        raise  # as for any command: status 2
    except KVTiersError as error:
        raise refused(error, status=1) from error
    if faults:
        raise typer.Exit(1)


def _demonstrate(
    console: Console,
    chain_file: Path | None,
    model: str | None,
    arguments: dict[str, Any],
    json_file: Path | None,
) -> dict[str, str]:
    """Run every phase, show the results, and return what went wrong by phase."""
    from contextlib import ExitStack
    from tempfile import TemporaryDirectory

    from tiers.lab.demo import phases
    from tiers.lab.demo.plan import make_plan

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvtiers-demo-")))
        chain = chain_file or stack.enter_context(phases.embedded_chain(folder))
        plan = make_plan(chain, folder)
        asked = _run(plan, model, arguments, folder)
        faults = _show(console, plan, asked, json_file)
        for phase, fault in faults.items():
            (engine,) = (run for run in plan.runs if phase in run.phases)
            typer.echo(f"{phases.log_tail(engine, folder)}\n{phase}: {fault}", err=True)
    return faults


def _engine_arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--engine-args is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise typer.BadParameter("--engine-args must be a JSON object")
    return arguments


def _run(plan: Plan, model: str | None, engine_args: dict[str, Any], folder: Path) -> list[Asked]:
    from tiers.cli.progress import bars
    from tiers.lab.demo import phases
    from tiers.lab.demo.model import obtain

    with bars() as progress:
        bar = progress.add_task("", total=phases.steps(plan) + 1, completed=-1)

        def step(scene: str) -> None:
            progress.update(bar, advance=1, description=scene)

        step("the model is fetched and converted, the first time")
        return phases.run(plan, model or str(obtain()), engine_args, folder, step)


def _show(
    console: Console, plan: Plan, asked: list[Asked], json_file: Path | None
) -> dict[str, str]:
    from tiers.lab.demo import report

    results = report.summarise(asked)
    write_result(json_file, report.to_json(results))
    console.print(report.table(results))
    console.print("TTFT: time to first token, median over the prompts, asked one at a time.")
    for phase, why in plan.skipped.items():
        console.print(f"{phase} is not shown: {why}.")
    return report.faults(results, plan.serving)
