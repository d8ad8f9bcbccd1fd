"""`python -m bench.demo`: watch a prefix come back from every tier of a chain."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from bench.demo import demo_report, run_demo
from bench.demo.demo_engine import Answered
from bench.demo.demo_model import obtain
from bench.demo.demo_plan import DemoPlan, make_plan
from tiers.cli.arguments import ChainOption, JsonFile, bar, check_places, write_result
from tiers.cli.main import main

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
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
    python -m bench.demo --model Qwen/Qwen3-0.6B --chain chain.yaml
    """
    check_places(json_file=json_file, keep=[chain_file])
    arguments = _engine_arguments(engine_args)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvtiers-demo-")))
        chain = chain_file or run_demo.embedded_chain(folder, stack)
        plan = make_plan(chain, folder)
        results = demo_report.summarise(_run(plan, model, arguments, folder))
        write_result(json_file, demo_report.to_json(results))
        typer.echo(demo_report.table(results))
        typer.echo("TTFT: time to first token, median over the prompts, asked one at a time.")
        for phase, why in plan.skipped.items():
            typer.echo(f"{phase} is not shown: {why}.")
        faults = demo_report.faults(results, plan.serving)
        for phase, fault in faults.items():
            (engine,) = (run for run in plan.runs if phase in run.phases)
            typer.echo(f"{run_demo.log_tail(engine, folder)}\n{phase}: {fault}", err=True)
    if faults:
        raise typer.Exit(1)


def _engine_arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--engine-args is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise typer.BadParameter("--engine-args must be a JSON object")
    return arguments


def _run(
    plan: DemoPlan, model: str | None, engine_args: dict[str, Any], folder: Path
) -> list[Answered]:
    with bar("", run_demo.steps(plan) + 1, -1) as update:

        def step(title: str) -> None:
            update(advance=1, description=title)

        step("the model is fetched and converted, the first time")
        return run_demo.run(plan, model or str(obtain()), engine_args, folder, step)


if __name__ == "__main__":
    main(app, "python -m bench.demo")
