"""A failing trial made small: with one thing less, again and again, as long as it fails."""

from collections.abc import Iterator
from typing import Any

import attrs

from kvpolicy.testing.clauses import ConformanceError
from kvpolicy.testing.setup import Setup
from kvpolicy.testing.trial import Trial

Actions = list[tuple[str, dict[str, int]]]

# Trials that may be spent on it.
_MOST = 200


def replay(trial: Trial, actions: Actions, **sizes: Any) -> tuple[Trial, ConformanceError | None]:
    """The same trial with other actions and sizes, and what it breaks."""
    again = Trial(trial.maker, world=trial.world, **(attrs.asdict(trial.setup) | sizes))
    try:
        for name, arguments in actions:
            if name != "finish":
                getattr(again, name)(**arguments)
        again.finish()
    except ConformanceError as error:
        return again, error
    return again, None


def shorten(trial: Trial, error: ConformanceError) -> tuple[Trial, ConformanceError]:
    """The smallest trial found that breaks the same clause."""
    left, tried = _MOST, set[str]()
    while left:
        for actions, sizes in _smaller(trial):
            key = repr((actions, attrs.evolve(trial.setup, **sizes)))
            if key in tried or not left:
                continue
            tried.add(key)
            left -= 1
            again, found = replay(trial, actions, **sizes)
            if found is not None and found.clause == error.clause:
                trial, error = again, found
                break
        else:
            break
    return trial, error


def _smaller(trial: Trial) -> Iterator[tuple[Actions, dict[str, Any]]]:
    """Trials with one thing less, the largest steps first."""
    actions = [action for action in trial.actions if action[0] != "finish"]
    for name in ("go", "cancel"):
        yield [action for action in actions if action[0] != name], {}
    for i in range(len(actions)):
        yield actions[:i] + actions[i + 1 :], {}
    for field in attrs.fields(Setup):
        plain = field.default
        if plain is not attrs.NOTHING and getattr(trial.setup, field.name) != plain:
            yield actions, {field.name: plain}
    for i, (name, arguments) in enumerate(actions):
        for key, value in arguments.items():
            for less in sorted({1, value // 2, value - 1} & set(range(1, value))):
                yield [*actions[:i], (name, {**arguments, key: less}), *actions[i + 1 :]], {}
