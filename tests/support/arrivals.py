"""Scripts of an open run: what arrives, what is cancelled, and steps in between."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from compare import result_values
from hypothesis import strategies as st
from strategies import prompts

from kvpolicy import Request, Result, Run, Sampling, TokenLogprobs

# Log-probabilities are computed in single precision, from logits that differ by rounding.
ROUNDING = 1e-5


@attrs.frozen
class Script:
    """Requests, and actions in order.

    Attributes:
        requests: The requests; each arrives once.
        actions: ``("submit", number)``, ``("cancel", number)`` of one that was submitted, or
            ``("step", number of steps)``.
    """

    requests: list[Request]
    actions: list[tuple[str, int]]

    def play(self, run: Run) -> tuple[list[Result], dict[int, list[int]]]:
        """Play it on a run, to the last result; the results, and the tokens as they came."""
        results: list[Result] = []
        tokens: dict[int, list[int]] = {number: [] for number in range(len(self.requests))}

        def step() -> None:
            events = run.step()
            results.extend(events.results)
            for number, token in events.tokens:
                tokens[number].append(token)

        for action, number in self.actions:
            if action == "submit":
                assert run.submit(self.requests[number]) == number
            elif action == "cancel":
                run.cancel(number)
            else:
                for _ in range(number):
                    step()
        run.close()
        while not run.done:
            step()
        return results, tokens


@st.composite
def scripts(
    draw: st.DrawFn, *, count: int = 4, max_prompt: int = 40, max_new: int = 20, **options: Any
) -> Script:
    """Requests of different lengths that arrive at different times; some are cancelled."""
    requests = [
        Request(
            prompt,
            draw(st.integers(1, max_new)),
            Sampling(temperature=draw(st.sampled_from([0.0, 0.8])), seed=number),
            stop_ids=draw(st.sampled_from([(), (3, 17, 40)])),
            priority=draw(st.integers(-1, 1)),
            logprobs=draw(st.sampled_from([None, 0, 3])),
            **options,
        )
        for number, prompt in enumerate(draw(prompts(count=count, max_len=max_prompt)))
    ]
    actions: list[tuple[str, int]] = []
    for number in range(count):
        actions.append(("submit", number))
        if draw(st.booleans()):
            actions.append(("step", draw(st.integers(1, 9))))
        if draw(st.integers(0, 3)) == 0:
            actions.append(("cancel", draw(st.integers(0, number))))
    return Script(requests, actions)


def check_equal_alone(
    results: Sequence[Result], alone: Sequence[Result], tokens: dict[int, list[int]]
) -> None:
    """Each request has one result, with the tokens of itself alone, or the first of them."""
    assert sorted(one.id for one in results) == list(range(len(alone)))
    for result in results:
        other = alone[result.id]
        assert tuple(tokens[result.id]) == result.tokens
        if result.finish_reason == "cancelled":
            assert result.tokens == other.tokens[: len(result.tokens)]
            assert result.rows_evicted <= other.rows_evicted
        else:
            assert result_values(result) == result_values(other)
            check_alike(result.logprobs, other.logprobs)


def check_alike(
    ours: Sequence[TokenLogprobs] | None, theirs: Sequence[TokenLogprobs] | None
) -> None:
    """The same tokens, with log-probabilities that differ by rounding."""
    if ours is None or theirs is None:
        assert ours is theirs
        return
    for one, other in zip(ours, theirs, strict=True):
        assert one.token == other.token
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=ROUNDING)
        pairs = zip(one.top, other.top, strict=True)
        assert all(abs(ours - theirs) <= ROUNDING for (_, ours), (_, theirs) in pairs)
