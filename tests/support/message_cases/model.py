"""Models that are refused."""

from collections.abc import Callable
from pathlib import Path

from tiny import tiny_model

from kvpolicy import Engine, Plan, load_model


def without_configuration(folder: Path) -> object:
    (folder / "weights").mkdir()
    return load_model(folder / "weights")


def with_end_token(value: object) -> Engine:
    model = tiny_model()
    model.generation_config.eos_token_id = value
    return Engine(model, plan=Plan.uniform("full"))


CASES: dict[str, Callable[[Path], object]] = {
    "a folder without a model": without_configuration,
    "a dtype that is none": lambda folder: load_model(folder, dtype=3),  # type: ignore[arg-type]
    "an end token that is none": lambda _: with_end_token([1, "end"]),
}
