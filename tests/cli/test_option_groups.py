"""Groups of options: a command has those of their fields, and is called with the groups."""

from typing import Annotated

import attrs
import pytest
import typer
from typer.testing import CliRunner

from kvpolicy.cli.option_groups import with_groups


@attrs.frozen
class Inner:
    size: Annotated[int, typer.Option(min=1, help="A size.")] = 3


@attrs.frozen(kw_only=True)
class Outer:
    word: Annotated[str, typer.Argument()] = "none"
    inner: Inner
    flag: Annotated[bool, typer.Option("--flag")] = False


def called(*typed: str) -> tuple[object, ...]:
    """What a command with a group and an option of its own is called with."""
    found: list[tuple[object, ...]] = []
    app = typer.Typer()

    @app.command()
    @with_groups
    def command(outer: Outer, own: Annotated[int, typer.Option()] = 0) -> None:
        found.append((outer, own))

    assert CliRunner().invoke(app, list(typed), catch_exceptions=False).exit_code == 0
    return found[0]


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ((), (Outer(inner=Inner()), 0)),
        (("a", "--size", "7", "--own", "2"), (Outer(word="a", inner=Inner(7)), 2)),
        (("--flag", "b"), (Outer(word="b", inner=Inner(), flag=True), 0)),
    ],
)
def test_a_command_is_called_with_its_groups(
    typed: tuple[str, ...], wanted: tuple[object, ...]
) -> None:
    assert called(*typed) == wanted


def test_options_are_listed_in_the_order_of_fields() -> None:
    app = typer.Typer()

    @app.command()
    @with_groups
    def command(outer: Outer, own: Annotated[int, typer.Option()] = 0) -> None:
        """Does nothing."""

    parameters = typer.main.get_command(app).params
    names = [one.name for one in parameters]
    assert names[:4] == ["word", "size", "flag", "own"]
