"""Workloads of a benchmark: decode steps of long texts, whole texts, or a prompt."""

from collections.abc import Sequence

import attrs
import torch

Prompts = Sequence[Sequence[int]]


@attrs.frozen
class Decode:
    """Decode steps of texts that already have a number of tokens.

    Attributes:
        batch: Sequences decoded together.
        held: Tokens that each sequence has; a contender with a budget holds fewer rows.
        steps: Steps to measure, at least 1. Some more before them warm up.
        seed: Random seed for tokens and rows.
        label: Name in tables, where the number of tokens does not tell workloads apart.
        compacts_all: Whether so many steps are measured that every sequence is compacted; if not,
            so many that compactions are among them in due proportion.
        profiled: Steps that are profiled after those that are measured.
    """

    batch: int
    held: int
    steps: int
    seed: int = 0
    label: str = ""
    compacts_all: bool = True
    profiled: int = 0

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.label or f"{self.held:,} held"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts of as many tokens; shorter ones are beginnings of longer ones."""
        return [
            torch.randint(
                vocab_size,
                (self.held,),
                generator=torch.Generator().manual_seed(self.seed + number),
            ).tolist()
            for number in range(self.batch)
        ]


@attrs.frozen
class Text:
    """Whole texts: prompts, each continued by a number of tokens.

    Attributes:
        batch: Sequences decoded together.
        prompt_min: Tokens of the shortest prompt.
        prompt_max: Tokens of the longest prompt.
        new_tokens: Tokens generated for each sequence, at least 3.
        seed: Random seed for prompts.
    """

    batch: int
    prompt_min: int
    prompt_max: int
    new_tokens: int
    seed: int = 0

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"text of {self.prompt_max + self.new_tokens:,}"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts; their lengths are spread evenly and shuffled."""
        rng = torch.Generator().manual_seed(self.seed)
        lengths = torch.linspace(self.prompt_min, self.prompt_max, self.batch).round().long()
        lengths = lengths[torch.randperm(self.batch, generator=rng)]
        return [
            torch.randint(vocab_size, (int(length),), generator=rng).tolist() for length in lengths
        ]


@attrs.frozen
class Prefill:
    """Prompts that are brought in.

    Attributes:
        num_tokens: Tokens of each prompt.
        batch: Prompts that are brought in together.
        seed: Random seed for tokens.
    """

    num_tokens: int
    batch: int = 1
    seed: int = 0

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"prompt of {self.num_tokens:,}"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts."""
        rng = torch.Generator().manual_seed(self.seed)
        shape = self.batch, self.num_tokens
        tokens: list[list[int]] = torch.randint(vocab_size, shape, generator=rng).tolist()
        return tokens


Workload = Decode | Text | Prefill
