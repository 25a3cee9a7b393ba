"""``kvpolicy plan check`` and ``kvpolicy plan schema``.

With ``--json``, `check` prints ``{"file", "model", "ok", "digest", "problems": [{"error",
"message"}]}``; ``error`` is the class of the problem, and the digest null if there is any.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.options import (
    DEFAULT_MODEL,
    Json,
    Model,
    Overrides,
    Plugins,
    TrustRemoteCode,
    register_plugins,
)
from kvpolicy.cli.output import say, sentence, write, write_json
from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.plan.check import Findings

WRONG_INPUT = 2


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE|NAME", help="A plan, as TOML.")],
    model: Model = DEFAULT_MODEL,
    overrides: Overrides = None,
    plugin: Plugins = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Find everything that is wrong with a plan, and say each in one sentence.

    Exits with status 2 if there is anything. Needs the model's configuration only.
    """
    register_plugins(plugin)
    found = _check(file, model, overrides or [], trust_remote_code)
    digest = found.resolved.digest() if found.resolved else None
    if json:
        problems = [{"error": type(one).__name__, "message": str(one)} for one in found.problems]
        said = {"file": str(file), "model": model, "ok": not problems}
        write_json({**said, "digest": digest, "problems": problems}, indent=2)
    else:
        for problem in found.problems:
            say(sentence(str(problem)))
    if found.problems:
        raise typer.Exit(WRONG_INPUT)
    if not json:
        assert found.resolved is not None, "a plan without problems is resolved"
        num_layers = len(found.resolved.layers)
        write(f"{file}: OK on the {num_layers} layers of {model}, digest {digest}\n")


def schema() -> None:
    """Print a JSON schema of plan files, for editors.

    A plan names it in a first line: #:schema https://.../plan.schema.json, or a path.
    """
    from kvpolicy.plan.schema import plan_schema

    write_json(plan_schema(), indent=2)


def _check(file: Path, model: str, overrides: list[str], trust_remote_code: bool) -> "Findings":
    from kvpolicy.model.adapter import ModelAdapter
    from kvpolicy.model.loading import load_skeleton
    from kvpolicy.plan import extends
    from kvpolicy.plan.check import Findings, check_plan

    num_layers, problems = None, []
    try:
        num_layers = ModelAdapter(
            load_skeleton(model, trust_remote_code=trust_remote_code)
        ).num_layers
    except KVPolicyError as error:
        problems = [error]
    try:
        data = extends.read(file)
    except KVPolicyError as error:
        return Findings((error, *problems))
    found = check_plan(data, overrides, num_layers=num_layers, name=f"plan '{file}'")
    return Findings((*found.problems, *problems), found.resolved)
