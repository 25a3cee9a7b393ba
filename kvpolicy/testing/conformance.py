"""`check_policy`: one line in a plugin author's test."""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvpolicy.compat import has_states
from kvpolicy.errors import KVPolicyError, error_text, shown
from kvpolicy.extras import install_extra
from kvpolicy.features import is_there
from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.testing.cases import Environment, PolicyFactory, Setup, least_budget, not_built
from kvpolicy.testing.clauses import ConformanceError, Example, Report
from kvpolicy.testing.toy_model import KINDS
from kvpolicy.testing.trial import Arrival, Trial, explain, find_difference, refusal
from kvpolicy.validators import MAX_SEED, positive_int

#: Cases of one policy.
PROFILES = {"quick": 100, "ci": 1_000, "thorough": 10_000}

# Of the case in each kind of model: with it, a sequence is cut, and a beginning reused.
_SEED_OF_KINDS = 2

# What gives the decoder the embeddings of images.
_IMAGES = "kvpolicy.engine.extensions.embedded"

# Hypothesis remembers all cases of one test: several short tests are faster.
_CASES_AT_ONCE = 500

# Called with the cases done, and their total number.
Progress = Callable[[int, int], None]


def check_policy(
    factory: Any,
    *,
    knobs: dict[str, Any] | None = None,
    profile: str = "quick",
    max_examples: int | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    hidden_size: int = 16,
    num_layers: int = 2,
    progress: Progress | None = None,
) -> Report:
    """Check a policy against the whole contract, in cases drawn by Hypothesis.

    In a case, requests of drawn lengths arrive in an engine of drawn sizes and are prefilled,
    decoded, compacted, released and cancelled, with the policy alone, under a wrapper, and next
    to another policy in other layers, in models with attention in all layers, hybrid ones, such
    with latent attention, and such with images in their prompts. Every hook call is checked, and
    every request is repeated alone. The model is a small random decoder; prompts and answers
    consist of a few tokens of the tokenizer, including line breaks and think tags.

    Args:
        factory: The policy's class, a function that builds one, or the name of an installed
            policy.
        knobs: Knobs of a policy given by name.
        profile: Number of cases: ``"quick"`` 100, ``"ci"`` 1,000, ``"thorough"`` 10,000.
        max_examples: Number of cases, instead of a profile.
        seed: Equal seeds draw equal cases.
        tokenizer: The tokenizer that policies receive; a small one with line breaks and
            ``<think>`` tags if not given.
        hidden_size: Size of the hidden states, for policies with a steering vector.
        num_layers: Decoder layers, for policies that name one.
        progress: Called with the cases done and their total number, now and then.

    Returns:
        What was checked; it prints well.

    Raises:
        ConformanceError: If a clause is broken, with a minimal example.
        KVPolicyError: If Hypothesis is not installed, or an argument is wrong.
    """
    try:
        from kvpolicy.testing.state_machine import run_cases, undisturbed
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        msg = f"check_policy needs Hypothesis; install it: {install_extra('testing')}"
        raise KVPolicyError(msg) from error
    if not isinstance(profile, str) or profile not in PROFILES:
        msg = f"there is no profile {profile!r}; known are {', '.join(PROFILES)}"
        raise KVPolicyError(msg)
    num_cases = PROFILES[profile] if max_examples is None else max_examples
    numbers: dict[str, tuple[object, int]] = {
        "max_examples": (num_cases, 1),
        "num_layers": (num_layers, 1),
        "hidden_size": (hidden_size, 1),
        "seed": (seed, 0),
    }
    for what, (value, least) in numbers.items():
        try:
            positive_int(value, least=least, most=MAX_SEED)
        except TypeError as error:
            msg = f"check_policy was given {what}={value!r:.60}; at least {least} is needed"
            raise KVPolicyError(msg) from error
    start = time.perf_counter()
    policy_factory = PolicyFactory.of(factory, knobs)
    environment = Environment.of(tokenizer, hidden_size, num_layers)
    checked: Counter[str] = Counter()
    _check_building(policy_factory)
    checked["building"] += 1
    refused = _missing_kinds()
    for done in range(0, num_cases, _CASES_AT_ONCE):
        num = min(_CASES_AT_ONCE, num_cases - done)
        run_cases(
            policy_factory,
            environment,
            num_cases=num,
            seed=seed + done,
            checked=checked,
            refused=refused,
        )
        if progress is not None:
            progress(done + num, num_cases)
    with undisturbed():
        for kind in KINDS[1:]:
            for protected in (False, True):
                if kind not in refused:
                    setup = {"model": kind, "protected": protected}
                    _check_kind(setup, policy_factory, environment, checked, refused)
    checked["knobs"] += _check_knobs(policy_factory, environment)
    elapsed = time.perf_counter() - start
    return Report(policy_factory.name, num_cases, elapsed, checked, refused)


def _missing_kinds() -> dict[str, str]:
    """Kinds of models that this installation does not run, each with the reason."""
    found = {}
    if not has_states():
        found["hybrid"] = "hybrid models need transformers 5.17 or newer"
    if not is_there(_IMAGES):
        found["images"] = f"prompts with images need {_IMAGES}, whose file is missing"
    return found


def _check_building(factory: PolicyFactory) -> None:
    """Check that a factory builds new policies that fit the hook specs."""
    try:
        first, second = factory.build(), factory.build()
        Stack([(factory.name, first)])
    except KVPolicyError as error:
        expected = "a policy that fits the hook specs"
        raise not_built(factory, expected, came=str(error)) from error
    if first is second:
        expected = "a new policy each time"
        raise not_built(factory, expected, came=f"{shown(first, 80)} twice")


def _check_kind(
    setup: Mapping[str, Any],
    factory: PolicyFactory,
    environment: Environment,
    checked: Counter[str],
    refused: dict[str, str],
) -> None:
    """Complete a few requests in one kind of model, which few cases may not have drawn.

    Args:
        setup: The kind, and whether rows are protected.
        factory: Builds the policy.
        environment: What is the same in all cases.
        checked: Counts the checks of each clause.
        refused: Gets the sentence if the model refuses the policy.

    Raises:
        ConformanceError: With the requests as an example.
    """
    budget = least_budget(factory.build()) + 2
    sizes: dict[str, Any] = {"budget": budget, "buffer": 2, "slots": 2, "kv_heads": 2}
    options: dict[str, Any] = {"environment": environment, "checked": checked}
    trial = None
    try:
        trial = Trial(factory, **options, **sizes, **setup, head_dim=8, seed=_SEED_OF_KINDS)
        # The last one gets the slot of the one that ends first.
        for num_prompt, num_new in ((budget + 3, 8), (3, 2), (budget, 8)):
            trial.arrive(prompt=num_prompt, new=num_new)
        trial.finish()
    except ConformanceError as error:
        if (sentence := refusal(error)) is not None:
            refused[setup["model"]] = sentence
        elif trial is None:
            raise not_built(factory, error.expected, error.came, error.clause) from error
        else:
            raise explain(trial, error) from error
    except KVPolicyError as error:
        refused[setup["model"]] = f"refused: {error}"


def _check_knobs(factory: PolicyFactory, environment: Environment) -> bool:
    """Check that knobs written as a plan writes them, and read again, make the same policy.

    Returns:
        Whether it was checked: only the knobs of attrs classes can be read.
    """
    policy = factory.build()
    policy_class: Any = type(policy)
    if not hasattr(policy_class, "__attrs_attrs__"):
        return False

    def fail(expected: str, came: str) -> ConformanceError:
        code = [
            "import attrs",
            "from kvpolicy.testing import Trial",
            "",
            f"policy = Trial({factory.source}, budget=64).policy",
            "fields = attrs.fields(type(policy))",
            "print({field.name: getattr(policy, field.name) for field in fields if field.init})",
        ]
        example = Example("one policy and its knobs", "\n".join(code))
        return ConformanceError("knobs", expected, came, factory.name, example)

    def write(policy: object) -> str:
        try:
            knobs = PolicySpec(factory.name).spell_out(policy).knobs
        except KVPolicyError as error:
            expected = "knobs that can be read again"
            raise fail(expected, str(error)) from error
        for name, value in knobs.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                expected = f"'{name}' is a number, a text, true or false, or a list of such"
                raise fail(expected, f"{shown(value, 80)}, and {error_text(error)}") from error
        return json.dumps(knobs)

    def read(text: str) -> object:
        try:
            return policy_class(**json.loads(text))
        except Exception as error:
            expected = f"a policy with the knobs {text}"
            raise fail(expected, error_text(error)) from error

    written = write(policy)
    for times in ("", " twice"):
        policy = read(write(policy))
        if write(policy) != written:
            expected = f"the knobs {written}"
            raise fail(expected, f"{write(policy)} after writing and reading them{times}")
    loaded = attrs.evolve(factory, build=lambda: read(written))
    budget = least_budget(factory.build()) + 2
    setup = attrs.asdict(Setup(budget=budget, buffer=2, kv_heads=2, group=2, head_dim=8))
    arrival = Arrival(0, prompt=budget + 9, new=8)
    (given_trace,), (loaded_trace,) = (
        Trial(one, environment=environment, **setup).alone([arrival]) for one in (factory, loaded)
    )
    difference = find_difference(loaded_trace, given_trace)
    if difference is not None:
        expected = f"{difference[0]} (the policy as given)"
        raise fail(expected, f"{difference[1]} after writing and reading it")
    return True
