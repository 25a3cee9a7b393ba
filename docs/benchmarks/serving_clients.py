"""Clients of a server with OpenAI's interface; `serving_throughput.py` starts this file.

They have a process of their own, so that their processor time is known and can run on other cores.
Each line on the standard input is a JSON object with the arguments of `measure`, and is answered by
a line with what that returns.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI, OpenAIError

TIMEOUT_S = 3600.0


async def measure(
    base_url: str,
    model: str,
    clients: int,
    requests: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Send requests; each client sends the next one when it has its answer.

    Args:
        base_url: Address of the server, without a path.
        model: Name of its model.
        clients: Number of clients.
        requests: ``{"prompt": TEXT, "max_tokens": N}`` each.

    Returns:
        ``{"elapsed_s": ..., "answers": [...]}``; see `_answer`.
    """
    waiting = iter(enumerate(requests))  # all clients take from it
    answers: dict[int, dict[str, Any]] = {}
    async with AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as openai:
        start = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - start

        async def client() -> None:
            for number, request in waiting:
                answers[number] = await _answer(openai, {"model": model, **request}, clock)

        await asyncio.gather(*(client() for _ in range(clients)))
        elapsed_s = clock()
    return {"elapsed_s": elapsed_s, "answers": [answers[number] for number in sorted(answers)]}


async def _answer(
    openai: AsyncOpenAI, fields: Mapping[str, Any], clock: Callable[[], float]
) -> dict[str, Any]:
    """Stream one greedy answer.

    Returns:
        ``sent_s``, when the request was sent; ``times``, when each token came, which are words of
        the text; ``text``; and ``error``, a text or ``None``.
    """
    pieces: list[str] = []
    times: list[float] = []
    error = None
    sent_s = clock()
    try:
        async for chunk in await openai.completions.create(**fields, temperature=0, stream=True):
            text = chunk.choices[0].text if chunk.choices else ""
            if text:
                pieces.append(text)
                times += [clock()] * len(text.split())
    except OpenAIError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"sent_s": sent_s, "times": times, "text": "".join(pieces), "error": error}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(measure(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
