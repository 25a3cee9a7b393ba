"""A stack: the policies of a layer, and what they answer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from kvpolicy.cache.rows import LayerRows
from kvpolicy.engine.request import Waiting
from kvpolicy.hooks import checks
from kvpolicy.hooks.declared import Declared
from kvpolicy.hooks.manager import HookListener
from kvpolicy.hooks.parts import Parts
from kvpolicy.registers import Registers
from kvpolicy.state import Memory


class Stack(Declared):
    """Policies in listed order: later ones are asked first and wrap earlier ones."""

    def allocate(
        self, layer_indices: Sequence[int], budget: int, floors: Sequence[int], num_layers: int
    ) -> list[int]:
        """Ask how layers share their rows; without an answer each has the budget."""
        total = budget * len(layer_indices)
        answer: Sequence[int] | None = self._manager.ask(
            "allocate",
            None,
            lambda answer: checks.allocate_problem(answer, total, floors),
            optional=True,
            layer_indices=layer_indices,
            budget=budget,
            total=total,
            floors=floors,
            num_layers=num_layers,
        )
        return [budget] * len(layer_indices) if answer is None else list(answer)

    @contextmanager
    def listening(self, watcher: HookListener) -> Iterator[None]:
        """Let a watcher see all questions and answers in a block, those of parts included."""
        with ExitStack() as watched:
            watched.enter_context(self._manager.listening(watcher))
            for part in self._inner:
                watched.enter_context(part.listening(watcher))
            yield

    def schedule(
        self, waiting: Sequence[Waiting], num_free: int, num_active: int
    ) -> list[list[int]]:
        """Ask which requests are admitted next, in groups."""
        answer: list[list[int]] = self._manager.ask(
            "schedule",
            None,
            lambda answer: checks.schedule_problem(answer, waiting, num_free, num_active),
            waiting=waiting,
            num_free=num_free,
            num_active=num_active,
        )
        return answer

    def observe(self, **arguments: Any) -> None:
        """Show the policies the newest tokens of one sequence."""
        self._manager.ask("observe", None, checks.observe_problem, **arguments)
        for part in self._inner:
            part.observe(**arguments)

    def steer(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        token_ids: Tensor,
        *,
        tokenizer: object,
        registers: Registers,
        memory: Memory,
    ) -> Tensor | None:
        """Sum of all changes to the states entering a layer, ``[B, M]``; ``None`` for none."""

        def problem(answers: object) -> str | None:
            listed = answers if isinstance(answers, list) else [answers]
            found = (checks.steer_problem(answer, hidden_states) for answer in listed)
            return next(filter(None, found), None)

        changes: list[Tensor] = self._manager.ask(
            "steer",
            layer_idx,
            problem,
            hidden_states=hidden_states,
            token_ids=token_ids,
            tokenizer=tokenizer,
            registers=registers,
            memory=memory,
        )
        for part in self._inner:
            change = part.steer(
                layer_idx,
                hidden_states,
                token_ids,
                tokenizer=tokenizer,
                registers=registers,
                memory=memory,
            )
            changes += [] if change is None else [change]
        return sum(changes[1:], changes[0]) if changes else None

    def due(self, layer_idx: int, **state: Any) -> Tensor | None:
        """Ask which sequences are due, bool ``[B]``; ``None`` if no policy has an opinion."""
        num_sequences = state["num_rows"].shape[0]
        answer: Tensor | None = self._manager.ask(
            "due",
            layer_idx,
            lambda answer: checks.due_problem(answer, num_sequences),
            optional=True,
            **state,
        )
        parts = (part.due(layer_idx, **state) for part in self._inner)
        return next((one for one in parts if one is not None), None) if answer is None else answer

    def score(self, rows: LayerRows, layer_idx: int, arguments: dict[str, Any]) -> Tensor:
        """Ask for scores, ``[B, H_kv, T]``, fp32."""
        shape, device = rows.positions.shape, rows.positions.device

        def ask(part: Stack) -> Callable[[], Tensor]:
            return partial(part.score, rows, layer_idx, arguments)

        own = {
            "tracks": rows.tracks.within(self._prefix),
            "parts": Parts({key: list(map(ask, parts)) for key, parts in self._parts.items()}),
        }
        scores: Tensor = self._manager.ask(
            "score",
            layer_idx,
            lambda answer: checks.scores_problem(answer, shape, device),
            **(arguments | own),
        )
        return scores.float()

    def select(
        self, scores: Tensor, positions: Tensor, budget: int, layer_idx: int, memory: Memory
    ) -> Tensor:
        """Ask which rows stay, ``[B, H_kv, K]``, int64, rising."""
        keep: Tensor = self._manager.ask(
            "select",
            layer_idx,
            lambda answer: checks.keep_problem(answer, scores.shape, budget, scores.device),
            scores=scores,
            positions=positions,
            budget=budget,
            memory=memory,
        )
        return keep

    def evict(self, rows: LayerRows, keep: Tensor, layer_idx: int, memory: Memory) -> None:
        """Have the rows that leave done away with."""

        def problem(answer: object) -> str | None:
            if answer is not True:
                return f"answered with {answer!r}; True or None is wanted"
            if rows.kept is None or rows.kept.shape != keep.shape or (rows.kept != keep).any():
                return "says it is done, but did not call rows.keep() with the rows that stay"
            return None

        self._manager.ask("evict", layer_idx, problem, rows=rows, keep=keep, memory=memory)
