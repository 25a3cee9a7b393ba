"""One test case: how the policy is built, the sizes around it, and the other policies."""

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import KVPolicyError, PolicyLoadError, class_name, shown
from kvpolicy.hooks.declarations import HOOKS
from kvpolicy.hooks.discovery import load_policy, policy_names, snake_case
from kvpolicy.hooks.stack import Stack
from kvpolicy.markers import hookimpl
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.spec import Heads, LayerGroup, PolicySpec, PromptRows
from kvpolicy.plugin_code import declared_by, plugin_code
from kvpolicy.testing.clauses import ConformanceError, Example
from kvpolicy.testing.toy_images import place_of_image
from kvpolicy.testing.toy_model import ToyModel, active_token_ids, toy_tokenizer

WHERE = ("all", "first", "last")
_MAX_PROTECTED = 1024
DTYPES = ("float64", "float32", "bfloat16", "float16")


@attrs.frozen
class PolicyFactory:
    """Builds new policies from a class, a function, or the name of an installed policy.

    Attributes:
        name: Name of the policy in messages.
        source: Arguments that name the factory in a line of code.
        build: Builds a policy.
    """

    name: str
    source: str
    build: Callable[[], object]

    @classmethod
    def of(cls, factory: Any, knobs: dict[str, Any] | None = None) -> "PolicyFactory":
        """Convert what the caller gave.

        Args:
            factory: The policy's class, a function that builds one, or a name.
            knobs: Knobs of a policy given by name.

        Raises:
            KVPolicyError: If it is none of these, or knobs are given without a name.
        """
        if isinstance(factory, PolicyFactory):
            return factory
        if isinstance(factory, str):
            given = PolicySpec(factory, knobs or {}).knobs
            source = f"{factory!r}, {given!r}" if given else repr(factory)
            policy_class = type(load_policy(factory, **given))  # looked up and checked once
            return cls(factory, source, lambda: _call(partial(policy_class, **given), factory))
        if not callable(factory):
            msg = (
                f"check_policy was given {shown(factory)}; give the policy's class, a function "
                f"that builds one, or a name: {', '.join(policy_names())}"
            )
            raise KVPolicyError(msg)
        if knobs:
            msg = (
                f"check_policy was given the knobs {knobs} and no name; write "
                "check_policy(lambda: MyPolicy(...))"
            )
            raise KVPolicyError(msg)
        is_class = inspect.isclass(factory)
        function_name = (
            class_name(factory) if is_class else getattr(factory, "__name__", "<lambda>")
        )
        source = "factory" if function_name == "<lambda>" else function_name
        policy_class = factory if is_class else type(_call(factory, function_name))
        name = snake_case(class_name(policy_class))
        return cls(name, source, lambda: _call(factory, function_name))

    @cached_property
    def hooks(self) -> frozenset[str]:
        """The hooks that the policy implements."""
        stack = Stack([(self.name, self.build())])
        return frozenset(hook for hook in HOOKS if stack.implements(hook))

    @cached_property
    def is_ragged(self) -> bool:
        """Whether the policy works with heads that hold different numbers of rows."""
        return not Stack([(self.name, self.build())]).even_only


def not_built(
    factory: PolicyFactory, expected: str, came: str, clause: str = "building"
) -> ConformanceError:
    """The error of a factory whose policy is not new each time, or fits no engine."""
    code = f"from kvpolicy.testing import Trial\n\nTrial({factory.source}, budget=8)"
    example = Example("one policy", code)
    return ConformanceError(clause, expected, came, factory.name, example)


def _call(factory: Callable[[], object], name: str) -> object:
    problem = f"{name}(), called without arguments, builds no policy"
    with plugin_code(problem, PolicyLoadError, passes=(KVPolicyError,)):
        return factory()


@attrs.define(eq=False)
class LongKeys:
    """Keeps rows with long keys: scores for a policy that has none, and for other layers.

    Lengths serve as masses where a policy needs these.
    """

    gives_mass: ClassVar[bool] = True
    ragged: ClassVar[bool] = True

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        """Rate rows by the Euclidean length of their keys."""
        return keys.float().norm(dim=-1)


@attrs.define(eq=False)
class ShareRows:
    """Keeps the best rows of all heads that share a budget, and the best one of each."""

    ragged: ClassVar[bool] = True

    @hookimpl
    def select(self, scores: Tensor, positions: Tensor, budget: int, heads: str) -> Tensor | None:
        """Rank the rows of all heads together; protected rows are among the best."""
        if heads == "own":
            return None
        own_best = scores.argmax(dim=2, keepdim=True)
        raised = scores.scatter(2, own_best, torch.inf)
        best = raised.flatten(1).argsort(dim=1, descending=True, stable=True)
        best = best[:, : budget * scores.shape[1]]
        mask = torch.zeros_like(scores, dtype=torch.bool).flatten(1).scatter(1, best, True)
        return mask.reshape(scores.shape) & (positions >= 0)


@attrs.define(eq=False)
class ProtectEnds:
    """Protects the first row and the two newest rows."""

    protects: ClassVar[tuple[int, int]] = (1, 2)


@attrs.define(eq=False)
class ProtectImages:
    """Protects the rows of images."""

    @hookimpl
    def protect(self, is_image: Tensor) -> Tensor:
        """All that the engine says are of images."""
        return is_image


@attrs.frozen(kw_only=True)
class Setup:
    """Sizes of the engine and the model, and the policies besides the one under test.

    The defaults are the simplest values, so that a minimal example names what matters.

    Attributes:
        budget: Rows that stay after a compaction.
        buffer: Rows that may join before the next compaction.
        slots: Sequences decoded together.
        chunk: The most tokens of a prompt in one forward.
        kv_heads: KV heads.
        group: Query heads of each KV head.
        readers: Layers that attend to the rows of each layer, itself among them.
        head_dim: Size of a head.
        dtype: Dtype of the model, a name in torch.
        numbers: Kind of keys, one of `NUMBERS`.
        where: Layers that have the policy: ``"all"``, ``"first"``, or ``"last"``; the others
            have `LongKeys`.
        beneath: Whether `LongKeys` is listed before the policy.
        protected: Whether `ProtectEnds` is listed after the policy, and where prompts have images,
            `ProtectImages`.
        prompt: What becomes of the rows of prompts, ``"evict"`` or ``"keep"``; see `Plan`.
        model: Kind of the model, one of `KINDS`: ``"hybrid"`` has one more layer, the first, which
            has a state of fixed size and no attention; ``"latent"`` has one KV head, whatever
            ``kv_heads`` says, and keys that are larger than its values; in ``"images"``, most
            prompts have an image.
        heads: ``"own"``, or ``"shared"``, if the policy declares ``ragged``: `ShareRows` is listed
            before the policy then, so that heads hold different numbers of rows whoever chooses.
        seed: Seed of weights and prompts.
    """

    budget: int
    buffer: int = 1
    slots: int = 1
    chunk: int = 512
    kv_heads: int = 1
    group: int = 1
    readers: int = 1
    head_dim: int = 2
    dtype: str = "float64"
    numbers: str = "plain"
    where: str = "all"
    beneath: bool = False
    protected: bool = False
    prompt: PromptRows = "evict"
    model: str = "attention"
    heads: Heads = "own"
    seed: int = 0

    def source(self) -> str:
        """The values that differ from the defaults, as arguments."""
        values = ((field, getattr(self, field.name)) for field in attrs.fields(Setup))
        changed = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return ", ".join(changed)


@attrs.frozen(eq=False)
class Environment:
    """Settings that are equal in all cases of a check.

    Attributes:
        tokenizer: The engine's tokenizer.
        hidden_size: Size of the hidden state.
        num_layers: Decoder layers with attention.
        token_ids: Token ids that prompts and answers consist of.
    """

    tokenizer: Any
    hidden_size: int
    num_layers: int
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any = None, hidden_size: int = 16, num_layers: int = 2) -> "Environment":
        """An environment; the default tokenizer is `toy_tokenizer`."""
        tokenizer = toy_tokenizer() if tokenizer is None else tokenizer
        return cls(tokenizer, hidden_size, num_layers, active_token_ids(tokenizer))

    def model(self, setup: Setup) -> ToyModel:
        """The model of a setup."""
        return ToyModel(
            num_layers=self.num_layers,
            num_readers=setup.readers,
            hidden_size=self.hidden_size,
            kv_heads=setup.kv_heads,
            group=setup.group,
            head_dim=setup.head_dim,
            dtype=getattr(torch, setup.dtype),
            numbers=setup.numbers,
            vocab_size=len(self.tokenizer),
            token_ids=self.token_ids,
            seed=setup.seed,
            kind=setup.model,
            image_id=self.image_id,
        )

    @property
    def image_id(self) -> int:
        """The token of images, which no text has, unless it has all tokens."""
        others = (one for one in range(len(self.tokenizer)) if one not in self.token_ids)
        return next(others, self.token_ids[-1])

    def prompt(self, setup: Setup, number: int, length: int) -> list[int]:
        """The prompt of a request; those of one number without images begin alike."""
        rng = torch.Generator().manual_seed(1000 * setup.seed + number)
        chosen = torch.randint(len(self.token_ids), (length,), generator=rng)
        prompt = [self.token_ids[i] for i in chosen.tolist()]
        if setup.model == "images":
            place = place_of_image(length, number)
            prompt[place] = [self.image_id] * len(prompt[place])
        return prompt


def plan_of(policy: object, hooks: frozenset[str], setup: Setup, layers: Sequence[int]) -> Plan:
    """The plan of a setup.

    Args:
        policy: The policy under test.
        hooks: The hooks that it implements.
        setup: Sizes, and the position of the policy in the plan.
        layers: Numbers of the layers with attention.
    """
    spec, long_keys = PolicySpec.of(policy), PolicySpec.of(LongKeys())
    if hooks == {"schedule"}:
        sizes = setup.budget, setup.buffer
        return Plan((long_keys,), *sizes, schedule=(spec,), prompt=setup.prompt)
    needs_scores = declared_by(policy, "needs_mass", False)
    before = [long_keys] if setup.beneath or needs_scores else []
    before += [PolicySpec.of(ShareRows())] if setup.heads == "shared" else []
    protects = [ProtectEnds(), *([ProtectImages()] if setup.model == "images" else [])]
    after = [PolicySpec.of(one) for one in protects] if setup.protected else []
    chosen = {"all": layers, "first": layers[:1], "last": layers[-1:]}[setup.where]
    # A plan is refused if the policy is not in the stack of a layer that it steers.
    steered = declared_by(policy, "steers", None) or ()
    if any(layer > max(layers) for layer in steered):
        msg = (
            f"check_policy was given a policy that steers layer {max(steered)}, and its model has "
            f"{max(layers) + 1}; give num_layers={max(steered) + 1}"
        )
        raise KVPolicyError(msg)
    members = tuple(sorted({*chosen, *steered}))
    rest = tuple(layer for layer in layers if layer not in members)
    groups = [LayerGroup(members, (*before, spec, *after))]
    groups += [LayerGroup(rest, (PolicySpec.of(LongKeys()),))] if rest else []
    schedule = (spec,) if "schedule" in hooks else ()
    return Plan(
        budget=setup.budget,
        buffer=setup.buffer,
        layers=tuple(groups),
        schedule=schedule,
        prompt=setup.prompt,
        heads=setup.heads,
    )


def least_budget(policy: object) -> int:
    """The smallest budget with which a policy can be tested, with and without `ProtectEnds`.

    Raises:
        KVPolicyError: Cases with so many rows would take hours.
    """
    stack = Stack([("policy", policy), ("protect_ends", ProtectEnds())])
    least = max(stack.n_first + stack.n_last, 1)
    if least > _MAX_PROTECTED:
        msg = (
            f"check_policy was given a policy that protects {least:,} rows, and every prompt is "
            f"longer; build it with knobs with which it protects at most {_MAX_PROTECTED}"
        )
        raise KVPolicyError(msg)
    return least
