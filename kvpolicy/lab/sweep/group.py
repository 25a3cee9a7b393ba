"""A group: one model asked one task with one seed, which several plans have in common."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import attrs

import kvpolicy
from kvpolicy.engine.request import Sampling
from kvpolicy.lab.models import ModelInfo, fingerprint_texts
from kvpolicy.lab.store.records import ItemRecord, sample_key
from kvpolicy.lab.tasks.task import Item, Split, Task

# What a group is called and shown by decides nothing of what its samples are.
_ONLY_TOLD = ("model", "columns")


@attrs.frozen
class Group:
    """Everything that samples depend on, but for the plan.

    Attributes:
        model: The model.
        task: Where the items come from, and how they are measured.
        items: What every plan is asked, each attempt at an item for itself.
        seed: Chooses the items.
        max_new_tokens: The most tokens a sample may generate.
        slots: Samples decoded together.
        split: Split of the task that the items are of.
        sampling: How tokens are drawn.
        id: Names the group: a hash of all that decides what its samples are.
    """

    model: ModelInfo
    task: Task
    items: Sequence[Item]
    seed: int
    max_new_tokens: int
    slots: int
    split: Split = "test"
    sampling: Sampling = attrs.field(factory=Sampling)
    id: str = attrs.field(init=False)

    @id.default
    def _hash(self) -> str:
        decisive = {k: v for k, v in self._settings().items() if k not in _ONLY_TOLD}
        return digest(decisive)

    @property
    def num_attempts(self) -> int:
        """How often every item is asked."""
        return 1 + max((item.attempt for item in self.items), default=0)

    @property
    def num_items(self) -> int:
        """Items, whatever the attempts at each."""
        return len({item.index for item in self.items})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the manifest."""
        return {"group": self.id, **self._settings()}

    def item_records(self) -> list[ItemRecord]:
        """Every item once, for the results folder."""
        return [
            ItemRecord(
                group=self.id,
                model=self.model.name,
                task=self.task.name,
                seed=self.seed,
                item=item.index,
                prompt=item.prompt,
                answer=item.answer,
                reference=item.reference,
                facets=dict(item.facets),
            )
            for item in self.items
            if item.attempt == 0
        ]

    def key(self, plan: str, item: Item) -> str:
        """Name of one sample: a hash of everything it depends on.

        Args:
            plan: Digest of the resolved plan.
            item: One attempt at one item of the group.
        """
        return sample_key(
            plan=plan,
            model=self.model.fingerprint,
            task=self.task.name,
            measure=self.task.measure.name,
            item=item.index,
            prompt=self._text(item),
            attempt=item.attempt,
            seed=self.seed,
            sampling=describe_sampling(self.sampling),
            max_new_tokens=self.max_new_tokens,
            version=kvpolicy.__version__,
        )

    def _settings(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "model_fingerprint": self.model.fingerprint,
            "device": self.model.device,
            "dtype": self.model.dtype,
            "task": self.task.name,
            "seed": self.seed,
            "split": self.split,
            "n": self.num_items,
            "attempts": self.num_attempts,
            "prompt_hash": fingerprint_texts([self._text(item) for item in self.items]),
            "sampling": describe_sampling(self.sampling),
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_new_tokens": self.max_new_tokens,
            "slots": self.slots,
            "measure": self.task.measure.name,
            "columns": [column.to_dict() for column in self.task.measure.columns],
        }

    def _text(self, item: Item) -> str:
        """All that is read of an item: another answer to a question gives other grades."""
        reference = item.reference if self.task.measure.reads_reference else None
        return json.dumps([item.prompt, item.answer, reference])


def digest(data: object) -> str:
    """Hash plain data to 16 hexadecimal digits.

    Args:
        data: What `json.dumps` takes.
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def describe_sampling(sampling: Sampling) -> str:
    """How tokens are drawn, in words."""
    if sampling.greedy:
        return "greedy"
    top_p = "" if sampling.top_p == 1 else f", top-p {sampling.top_p:g}"
    return f"temperature {sampling.temperature:g}{top_p}"
