"""The command ``kvpool doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.common import EXIT_FAILURE


def doctor(
    is_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    checks_vllm: Annotated[
        bool,
        typer.Option("--vllm", help="Run seeded histories on the installed vLLM, stock and with kvpool in its place."),
    ] = False,
) -> None:
    """Describe the installation: version, backend, compiler, Python, and what else is here.

    With --vllm the exit code is 1 if vLLM with kvpool in its place differs from stock vLLM, or if kvpool does not
    take hold.
    """
    import json

    from kvpool.cli.doctor import check_vllm, gather_facts

    facts = gather_facts()
    is_equal = True
    if checks_vllm:
        is_equal, facts["vllm_check"] = check_vllm()
    if is_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        for label, value in facts.items():
            typer.echo(f"{label.replace('_', ' '):<24}{'-' if value is None else value}")
    if not is_equal:
        raise typer.Exit(EXIT_FAILURE)
