"""The sizes of one trial: what is drawn, and what a minimal example shows."""

from typing import Any

import attrs
import torch

from kvpolicy.engine.engine import Engine
from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.testing.company import KeyLengths, Pinned
from kvpolicy.testing.toy import Toy, lively_ids, toy_tokenizer
from kvpolicy.testing.watch import Watch

WHERE = ("all", "first", "last")
DTYPES = ("float64", "float32", "bfloat16", "float16")


@attrs.frozen(kw_only=True)
class Setup:
    """Sizes of the engine and the model, and what stands around the policy.

    The defaults are the simplest of everything, so that a minimal example names what matters.

    Attributes:
        budget: Rows that stay after a compaction.
        buffer: Rows that may join before the next.
        slots: Sequences served together.
        chunk: The most tokens of a prompt in one forward.
        kv_heads: KV heads.
        group: Query heads of each.
        head_dim: Size of a head.
        dtype: Dtype of the model, a name in torch.
        numbers: What keys look like, one of `NUMBERS`.
        where: Layers that have the policy: ``"all"``, ``"first"``, or ``"last"``; the others
            have a policy of the kit's.
        beneath: Whether a policy that scores is listed before it.
        pinned: Whether a wrapper that pins rows is listed after it.
        seed: Seed of weights and prompts.
    """

    budget: int
    buffer: int = 1
    slots: int = 1
    chunk: int = 512
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 2
    dtype: str = "float64"
    numbers: str = "plain"
    where: str = "all"
    beneath: bool = False
    pinned: bool = False
    seed: int = 0

    def words(self) -> str:
        """What differs from the defaults, as arguments."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in attrs.fields(Setup)
            if getattr(self, field.name) != field.default
        ]
        return ", ".join(changed)


@attrs.frozen(eq=False)
class World:
    """What a policy is tried in, which no example changes.

    Attributes:
        tokenizer: The engine's tokenizer.
        hidden_size: Size of the hidden state.
        num_layers: Decoder layers.
        lively: Token ids that are read and written.
    """

    tokenizer: Any
    hidden_size: int
    num_layers: int
    lively: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any = None, hidden_size: int = 16, num_layers: int = 2) -> "World":
        """The same for equal arguments, as far as trials can tell."""
        tokenizer = toy_tokenizer() if tokenizer is None else tokenizer
        return cls(tokenizer, hidden_size, num_layers, lively_ids(tokenizer))

    def toy(self, setup: Setup) -> Toy:
        """The model of a setup."""
        return Toy(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            kv_heads=setup.kv_heads,
            group=setup.group,
            head_dim=setup.head_dim,
            dtype=getattr(torch, setup.dtype),
            numbers=setup.numbers,
            vocab_size=len(self.tokenizer),
            lively=self.lively,
            seed=setup.seed,
        )

    def prompt(self, setup: Setup, number: int, length: int) -> list[int]:
        """The prompt of a request; a longer one begins like a shorter one."""
        rng = torch.Generator().manual_seed(1000 * setup.seed + number)
        chosen = torch.randint(len(self.lively), (length,), generator=rng)
        return [self.lively[i] for i in chosen.tolist()]

    def engine(self, watch: Watch, setup: Setup, toy: Toy) -> Engine:
        """An engine that serves with the policy that a watch is for."""
        plan = plan_of(watch.policy, watch.hooks, setup, self.num_layers)
        engine = Engine(toy, self.tokenizer, plan, slots=setup.slots, chunk=setup.chunk)
        for stack in dict.fromkeys([*engine.stacks, engine.scheduling]):
            watch.over(stack)
        return engine


def plan_of(policy: object, hooks: frozenset[str], setup: Setup, num_layers: int) -> Plan:
    """The plan of a setup: the policy alone, in company, or for the order of admission."""
    spec = PolicySpec.of(policy)
    if hooks == {"schedule"}:
        return Plan((PolicySpec.of(KeyLengths()),), setup.budget, setup.buffer, schedule=(spec,))
    stack = [spec]
    if setup.beneath:
        stack.insert(0, PolicySpec.of(KeyLengths()))
    if setup.pinned:
        stack.append(PolicySpec.of(Pinned()))
    schedule = (spec,) if "schedule" in hooks else ()
    # A plan that leaves out a layer which the policy steers is refused.
    steered = getattr(policy, "steers", None) or ()
    has = sorted({*layers_with(setup.where, num_layers), *steered})
    groups = [LayerGroup(where=tuple(has), stack=tuple(stack))]
    rest = tuple(layer for layer in range(num_layers) if layer not in has)
    if rest:
        groups.append(LayerGroup(where=rest, stack=(PolicySpec.of(KeyLengths()),)))
    return Plan(budget=setup.budget, buffer=setup.buffer, layers=tuple(groups), schedule=schedule)


def layers_with(where: str, num_layers: int) -> list[int]:
    """The layers that have the policy."""
    layers = list(range(num_layers))
    return {"all": layers, "first": layers[:1], "last": layers[-1:]}[where]


def least_budget(policy: object) -> int:
    """The smallest budget under which a policy can be tried, wrapped or not."""
    stack = Stack([("policy", policy), ("pinned", Pinned())])
    return max(stack.n_first + stack.n_last, 1)
