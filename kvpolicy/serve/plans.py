"""The plans that a server offers: one engine for each, all with the weights of one model.

A client chooses a plan by the id of the model: a name of the model alone is the first plan,
``MODEL:NAME`` the plan of that name.
"""

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.engine.async_engine import AsyncEngine, RequestStream
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.results import EngineStats
from kvpolicy.engine.reuse.store import PrefixStore
from kvpolicy.model.image_prompts import READS_TEXT
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.engine_log import EngineLog, broken_sentence
from kvpolicy.serve.record import Record
from kvpolicy.serve.token_bytes import token_bytes

_RECENT = 32  # requests whose durations say how long a full queue takes
_MOST_RETRY_S = 60
_MOST_TOKENS = 2**16  # whose bytes are remembered


@attrs.define(eq=False)
class ServedPlan:
    """A plan, and the engine that serves it.

    Attributes:
        name: Its name.
        id: What a client gives for the model to choose it.
        engine: The engine, which has the plan and the model.
        running: The same engine, while it takes requests.
        log: Logs its failures.
        max_len: The most tokens of a sequence, prompt and generation together.
        max_prompt_len: The most tokens of a prompt.
        max_choices: Choices that may run and wait at the same time.
        num_cancelled: Choices that were ended because the server stops.
    """

    name: str
    id: str
    engine: Engine
    running: AsyncEngine
    log: EngineLog
    max_len: int
    max_prompt_len: int
    max_choices: int
    num_cancelled: int = attrs.field(default=0, init=False)
    _durations: deque[float] = attrs.field(factory=lambda: deque(maxlen=_RECENT), init=False)

    @property
    def stats(self) -> EngineStats:
        """What the engine does now."""
        return self.running.stats

    @property
    def problem(self) -> str | None:
        """One sentence for the operator if the engine has broken; else ``None``."""
        broken_by = self.running.broken_by
        return None if broken_by is None else broken_sentence(self.name, broken_by)

    def submit(self, request: Request, record: Record) -> RequestStream:
        """Have a choice generated; raises as `AsyncEngine.submit`.

        Args:
            request: The choice.
            record: The request that it belongs to.
        """
        stream = self.running.submit(request)
        self.log.note_choice(stream.id, record)
        return stream

    def note_duration(self, seconds: float) -> None:
        """Remember how long a request took, for `retry_after_s`."""
        self._durations.append(seconds)

    @property
    def retry_after_s(self) -> int:
        """Seconds in which a place in a full queue becomes free, as recent requests tell."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 0.0
        return min(max(math.ceil(mean / self.stats.slots), 1), _MOST_RETRY_S)


@attrs.define(eq=False)
class ServedModel:
    """A model, and the plans under which it is served.

    Attributes:
        name: Its name, as clients give it.
        tokenizer: Its tokenizer.
        plans: The plans; the first one answers to the name of the model alone.
        prefix_store: What the engines of all plans reuse; ``None``: nothing.
        aliases: Further names of it.
        processor: What prepares the images of chats; ``None``: they may have none.
        no_images: Why they may have none.
        created: When it was loaded, in seconds since 1970.
    """

    name: str
    tokenizer: Any
    plans: Sequence[ServedPlan]
    prefix_store: PrefixStore | None = None
    aliases: Sequence[str] = ()
    processor: Any = None
    no_images: str = READS_TEXT
    created: int = attrs.field(factory=lambda: int(time.time()))
    _bytes: dict[int, bytes] = attrs.field(factory=dict, init=False)

    @property
    def ids(self) -> list[str]:
        """The ids that are listed: its names, and each plan of several once, under the first."""
        names = [self.name, *self.aliases]
        return [*names, *(plan.id for plan in self.plans if plan.id not in names)]

    @property
    def by_id(self) -> dict[str, ServedPlan]:
        """Every plan by each of the ids that choose it; plans answer under aliases, too."""
        ids: dict[str, ServedPlan] = {}
        for name in (self.name, *self.aliases):
            own = {name + plan.id.removeprefix(self.name): plan for plan in self.plans}
            ids |= {name: self.plans[0], **own}
        return ids

    @property
    def problem(self) -> str | None:
        """Why the process must be started again: an engine has broken. ``None``: none has.

        The plans of the other engines are still served.
        """
        return next((plan.problem for plan in self.plans if plan.problem is not None), None)

    def plan_of(self, model_id: str) -> ServedPlan:
        """The plan that a client has chosen.

        Args:
            model_id: What it gave for the model.

        Raises:
            ApiError: There is none.
        """
        plan = self.by_id.get(model_id)
        if plan is None:
            message = (
                f"there is no model '{model_id:.60}'; GET /v1/models lists them: "
                f"{', '.join(self.ids)}"
            )
            raise ApiError(404, message, param="model", code="model_not_found")
        return plan

    def token_text(self, token: int) -> str:
        """The text of a token in the middle of a text; a part of a character is U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token in the middle of a text, special tokens included."""
        content = self._bytes.get(token)
        if content is None:
            content = token_bytes(self.tokenizer, token)
            if len(self._bytes) < _MOST_TOKENS:
                self._bytes[token] = content
        return content
