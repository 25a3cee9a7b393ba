"""Decode speed of the engine under several plans against transformers' ``generate``.

All contenders run in turns in one process on one model with random weights, which decodes
as fast as a trained one. Each round begins with another contender, and speeds are compared
within a round, so that what the machine does meanwhile falls on all alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import attrs
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from kvpolicy.engine import Engine
from kvpolicy.lab.grid import Cell
from kvpolicy.lab.rival import generate_once
from kvpolicy.models import move

GENERATE = "generate"


@attrs.frozen
class Workload:
    """What every contender has to do.

    Attributes:
        batch: Sequences decoded together.
        prompt_min: Tokens of the shortest prompt.
        prompt_max: Tokens of the longest prompt.
        new_tokens: Tokens generated for each.
        seed: Chooses weights and prompts.
    """

    batch: int
    prompt_min: int
    prompt_max: int
    new_tokens: int
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random prompts, their lengths spread evenly and in no order."""
        rng = torch.Generator().manual_seed(self.seed)
        lengths = torch.linspace(self.prompt_min, self.prompt_max, self.batch).round().long()
        lengths = lengths[torch.randperm(self.batch, generator=rng)]
        return [
            torch.randint(vocab_size, (int(length),), generator=rng).tolist() for length in lengths
        ]


@attrs.frozen
class Turn:
    """One contender's part of one round.

    Attributes:
        round: Number of the round.
        name: The contender.
        decode_tok_s: Tokens per second after the first of each sequence.
        policy_share: Part of the decode time spent in score, select and compaction; ``None``
            for ``generate``.
        kv_bytes: Bytes of the cache at its largest.
    """

    round: int
    name: str
    decode_tok_s: float
    policy_share: float | None
    kv_bytes: int


@attrs.frozen
class Standing:
    """How one contender did.

    Attributes:
        name: The contender.
        budget: Rows that stay; ``None`` if everything does.
        decode_tok_s: Median over the rounds.
        ratio: Median over the rounds of its speed by ``generate``'s in the same round.
        ratio_min: The least of these ratios.
        ratio_max: The greatest of them.
        policy_share: Median over the rounds; ``None`` for ``generate``.
        kv_bytes: Bytes of the cache at its largest.
        rounds: Its speed in each round.
    """

    name: str
    budget: float | None
    decode_tok_s: float
    ratio: float
    ratio_min: float
    ratio_max: float
    policy_share: float | None
    kv_bytes: int
    rounds: tuple[float, ...]


def small_model(seed: int, *, max_positions: int, device: str = "cpu") -> PreTrainedModel:
    """Build a model of about 30 M parameters with random weights, which never ends a text.

    Args:
        seed: Chooses the weights; the global random state is left as it was.
        max_positions: Tokens a sequence may have.
        device: Where to put it.

    Returns:
        The model in float32.

    Raises:
        ModelError: There is no such device.
    """
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1664,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).eval()
    model.set_attn_implementation("sdpa")
    assert model.generation_config is not None, "every decoder has one"
    model.generation_config.eos_token_id = None
    return move(model, device)


def measure(
    model: PreTrainedModel, cells: Sequence[Cell], workload: Workload, *, rounds: int
) -> Iterator[Turn]:
    """Run all contenders in turns.

    Args:
        model: The model.
        cells: The engine's plans.
        workload: What each contender does.
        rounds: How many times.

    Yields:
        Each contender's turn as it ends.
    """
    by_name = {name_of(cell): cell for cell in cells}
    names = [GENERATE, *by_name]
    prompts = workload.prompts(model.config.vocab_size)
    warm_up = attrs.evolve(workload, new_tokens=min(8, workload.new_tokens))
    for name in names:
        _turn(model, by_name.get(name), prompts, warm_up)
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            speed, share, kv_bytes = _turn(model, by_name.get(name), prompts, workload)
            yield Turn(number, name, speed, share, kv_bytes)


def standings(turns: Sequence[Turn], cells: Sequence[Cell]) -> list[Standing]:
    """Sum up all complete rounds.

    Args:
        turns: What was measured.
        cells: The engine's plans.

    Returns:
        One standing for each contender, ``generate`` first; none if no round is complete.
    """
    budgets = {name_of(cell): cell.budget for cell in cells}
    rounds: dict[int, dict[str, Turn]] = {}
    for turn in turns:
        rounds.setdefault(turn.round, {})[turn.name] = turn
    complete = [found for found in rounds.values() if len(found) == 1 + len(budgets)]
    return [
        _standing(name, budgets.get(name), complete)
        for name in ([GENERATE, *budgets] if complete else [])
    ]


def name_of(cell: Cell) -> str:
    """What a contender is called."""
    return cell.series


def _standing(name: str, budget: float | None, rounds: Sequence[Mapping[str, Turn]]) -> Standing:
    mine = [found[name] for found in rounds]
    ratios = [found[name].decode_tok_s / found[GENERATE].decode_tok_s for found in rounds]
    shares = [turn.policy_share for turn in mine if turn.policy_share is not None]
    return Standing(
        name=name,
        budget=budget,
        decode_tok_s=median(turn.decode_tok_s for turn in mine),
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        policy_share=median(shares) if shares else None,
        kv_bytes=max(turn.kv_bytes for turn in mine),
        rounds=tuple(turn.decode_tok_s for turn in mine),
    )


def _turn(
    model: PreTrainedModel, cell: Cell | None, prompts: Sequence[Sequence[int]], workload: Workload
) -> tuple[float, float | None, int]:
    num_decoded = workload.batch * (workload.new_tokens - 1)
    if cell is None:
        decode_s, kv_bytes = generate_once(model, prompts, workload.new_tokens)
        return num_decoded / decode_s, None, kv_bytes
    engine = Engine(model, None, cell.plan, slots=workload.batch)
    run = engine.generate(prompts, max_new_tokens=workload.new_tokens, stop_ids=())
    for result in run:
        assert result.error is None, result.error
    report = run.report
    share = report.policy_s / report.decode_s
    return num_decoded / report.decode_s, share, report.peak_kv_bytes
