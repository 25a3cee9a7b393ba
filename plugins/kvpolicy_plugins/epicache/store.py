"""`EpisodeStore`: a conversation as one compressed cache for each of its topics.

The whole history is prefilled once for each episode, block by block, with the episode's own patched
prompt; what stays is kept on the host as a snapshot. A question is answered from the snapshot whose
episode is nearest to it, and leaves it as it was.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import torch

from kvpolicy import Engine, KVPolicyError, PolicyCache, Request, Result, SequenceSnapshot
from kvpolicy.toolkit import cache_argument
from kvpolicy_plugins.epicache.embeddings import Embed, Embedding, encoded
from kvpolicy_plugins.epicache.episodes import Episode, group, nearest, windows_of
from kvpolicy_plugins.epicache.policy import EpiCache

POLICY = "epicache"
INSTRUCTION = str(attrs.fields(EpiCache).prompt.default)
NUM_EPISODES, WINDOW, N_MEDOID = 4, 4, 8
_INDEX, _VERSION = "index.json", 2


class Conversation(Protocol):
    """What was said, in order: a conversation of a task, or any object like it."""

    @property
    def utterances(self) -> Sequence[str]:
        """The utterances."""


@attrs.frozen(kw_only=True)
class Framing:
    """What stands around the history and a question in a prompt; a task's `Frame` has the same.

    Attributes:
        opening: Text before the first utterance.
        joint: Text behind each utterance.
        before_question: Text between the history and the question.
        closing: Text behind the question.
        has_special_tokens: Whether the opening contains the special tokens of a prompt.
    """

    opening: str = ""
    joint: str = "\n"
    before_question: str = "\n"
    closing: str = "\n"
    has_special_tokens: bool = False

    @classmethod
    def of(cls, frame: Any) -> "Framing":
        """A copy of any object with these attributes; the default for ``None``."""
        if frame is None:
            return cls()
        return cls(**{field.name: getattr(frame, field.name) for field in attrs.fields(cls)})


@attrs.frozen(kw_only=True)
class Settings:
    """How a store is built; kept beside it.

    Attributes:
        num_episodes: Episodes, E; fewer if the conversation has fewer windows that differ.
        window: Utterances in a window.
        n_medoid: Windows of an episode that are in its patched prompt.
        instruction: Text before these; may be empty.
        embedding: ``"inputs"`` or ``"states"``, see `embeddings.Embedding`.
        weighted: Whether rare tokens weigh more in embeddings.
        route: ``"cosine"``, the paper's, or ``"dot"``, the authors' code's.
        seed: Random seed of the clustering.
    """

    num_episodes: int = NUM_EPISODES
    window: int = WINDOW
    n_medoid: int = N_MEDOID
    instruction: str = INSTRUCTION
    embedding: str = "inputs"
    weighted: bool = True
    route: str = "cosine"
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("num_episodes", "window", "n_medoid"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                msg = f"the store was given {name}={value!r:.40}; expected a count of at least 1"
                raise KVPolicyError(msg)
        if self.route not in ("cosine", "dot"):
            msg = f"the store was given route={self.route!r:.40}; choose 'cosine' or 'dot'"
            raise KVPolicyError(msg)


@attrs.frozen(eq=False)
class StoredEpisode:
    """An episode, its patched prompt and its cache.

    Attributes:
        episode: The windows, and their centroid.
        prompt: The patched prompt.
        snapshot: What stays of the history, on the host.
        peak_rows: The most rows that any layer held in its prefill.
        peak_bytes: Bytes of keys and values in its rows then, at most.
        full_bytes: Those of a full cache.
    """

    episode: Episode
    prompt: str
    snapshot: SequenceSnapshot
    peak_rows: int
    peak_bytes: int
    full_bytes: int


@attrs.frozen(eq=False)
class Answer:
    """The answer to a question.

    Attributes:
        question: The question.
        episode: Number of the episode whose cache gave it.
        result: The engine's result; its text is the answer.
    """

    question: str
    episode: int
    result: Result

    @property
    def text(self) -> str:
        """What was answered; empty if it failed, see ``result.error``."""
        return self.result.text or ""


@attrs.frozen(eq=False)
class EpisodeStore:
    """The caches of a conversation, and the router to them.

    Each episode has an engine of its own, since another patched prompt is another plan; the model
    is shared, and caches exist only while they are in use.

    Attributes:
        engine: The engine that was given: its model, tokenizer and plan, which names `EpiCache`.
        settings: How it was built.
        framing: What stands around history and questions.
        embedding: Compares texts.
        episodes: The episodes, in the order of their first windows.
    """

    engine: Engine
    settings: Settings
    framing: Framing
    embedding: Embedding
    episodes: tuple[StoredEpisode, ...]
    _engines: dict[int, Engine] = attrs.field(factory=dict, init=False, repr=False)

    @classmethod
    def build(
        cls,
        engine: Engine,
        conversation: Conversation,
        *,
        frame: Any = None,
        settings: Settings = Settings(),
        embed: Embed | None = None,
        report: Callable[[int, int], None] = lambda num_done, num: None,
    ) -> "EpisodeStore":
        """Find the episodes of a conversation, and prefill it once for each.

        Args:
            engine: Its plan names the policy ``epicache``, whose ``prompt`` is replaced; budget
                and buffer are the M and M_block of every cache.
            conversation: Its utterances.
            frame: What stands around history and questions: a `Framing`, or a task's `Frame`.
            settings: Numbers of episodes, windows and medoids, and how texts are compared.
            embed: Embeds texts, ``[N, D]``, in place of the model itself.
            report: Called with the number of episodes that are done, and of all.

        Raises:
            KVPolicyError: The plan has no such policy, the conversation is empty or too long for
                the model, or a text has no tokens.
        """
        framing, utterances = Framing.of(frame), tuple(conversation.utterances)
        if not utterances:
            msg = "the conversation has no utterances; expected at least one"
            raise KVPolicyError(msg)
        windows = windows_of(utterances, settings.window, framing.joint)
        embedding = Embedding.fitted(
            engine, windows, settings.embedding, weighted=settings.weighted, own=embed
        )
        found = group(
            embedding.vectors(engine, windows),
            settings.num_episodes,
            n_medoid=settings.n_medoid,
            seed=settings.seed,
        )
        history = framing.opening + "".join(one + framing.joint for one in utterances)
        ids = encoded(engine, history, begins=not framing.has_special_tokens)
        episodes = []
        for number, episode in enumerate(found):
            report(number, len(found))
            prompt = settings.instruction + "".join(windows[w] for w in sorted(episode.medoids))
            own = _with_prompt(engine, prompt)
            episodes.append(StoredEpisode(episode, prompt, *prefilled(own, ids)))
        report(len(found), len(found))
        return cls(engine, settings, framing, embedding, tuple(episodes))

    def route(self, question: str) -> int:
        """The number of the episode that a question is about."""
        (vector,) = self.embedding.vectors(self.engine, [question])
        return nearest(vector, [one.episode for one in self.episodes], by=self.settings.route)

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer one question; the caches stay as they are.

        Args:
            question: The question.
            options: Further fields of `Request`, such as ``max_new_tokens``.
        """
        return self.ask_all([question], **options)[0]

    def ask_all(self, questions: Sequence[str], **options: Any) -> list[Answer]:
        """Answer questions, each on its own; those of one episode are decoded together."""
        routes = [self.route(question) for question in questions]
        answers: dict[int, Answer] = {}
        for episode in sorted(set(routes)):
            places = [place for place, route in enumerate(routes) if route == episode]
            results = asked(
                self._engine_of(episode),
                self.episodes[episode].snapshot,
                [self._prompt(questions[place]) for place in places],
                **options,
            )
            for place, result in zip(places, results, strict=True):
                answers[place] = Answer(questions[place], episode, result)
        return [answers[place] for place in range(len(questions))]

    @property
    def host_bytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(one.snapshot.num_bytes for one in self.episodes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of keys and values that the device held at most while the caches were made."""
        return max(one.peak_bytes for one in self.episodes)

    def save(self, folder: str | Path) -> None:
        """Write the store to a folder: a snapshot for each episode, and an index.

        Args:
            folder: A new folder, or one that a store was saved to.

        Raises:
            KVPolicyError: The folder cannot be written, or holds something else.
        """
        target = Path(folder)
        try:
            target.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are private
            if any(target.iterdir()) and not (target / _INDEX).exists():
                msg = f"folder '{target}' holds other files, and no store; choose a new folder"
                raise KVPolicyError(msg)
            (target / _INDEX).unlink(missing_ok=True)  # until all snapshots are there
            for number, one in enumerate(self.episodes):
                one.snapshot.save(_snapshot_file(target, number))
            index = self._index()
            text = json.dumps(index | {"checksum": _checksum(index)}, ensure_ascii=False, indent=1)
            partial = target / f"{_INDEX}.partial"
            partial.unlink(missing_ok=True)  # of a process that was killed
            partial.touch(mode=0o600)
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, target / _INDEX)
        except OSError as error:
            msg = f"the store cannot be written to '{target}': {error.strerror}"
            raise KVPolicyError(msg) from error

    @classmethod
    def load(
        cls, folder: str | Path, engine: Engine, *, embed: Embed | None = None
    ) -> "EpisodeStore":
        """Read a store that `save` has written.

        Args:
            folder: The folder.
            engine: An engine with an equal plan and the same model.
            embed: The function that embeds texts, if the store was built with one.

        Raises:
            KVPolicyError: It is no store, or one of another plan or model.
        """
        source = Path(folder)
        try:
            index = json.loads((source / _INDEX).read_text(encoding="utf-8"))
            version = index["version"]
        except OSError as error:
            msg = f"'{source}' is no store of episodes: {_INDEX} cannot be read, {error.strerror}"
            raise KVPolicyError(msg) from error
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(source) from error
        if version != _VERSION:
            msg = (
                f"store '{source}' has version {version!r:.20} of the format, and this kvpolicy "
                f"reads version {_VERSION}; build it again"
            )
            raise KVPolicyError(msg)
        if index.pop("checksum", None) != _checksum(index):
            raise _damaged(source)
        try:
            settings, framing = Settings(**index["settings"]), Framing(**index["framing"])
            episodes = tuple(
                _stored(entry, SequenceSnapshot.load(_snapshot_file(source, number)))
                for number, entry in enumerate(index["episodes"])
            )
            weights = index["weights"]
            embedding = Embedding(
                settings.embedding,
                np.array(index["centre"], dtype=np.float64),
                None if weights is None else {int(token): weight for token, weight in weights},
                embed,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(source) from error
        if index["has_own"] != (embed is not None):
            was = "with" if index["has_own"] else "without"
            msg = (
                f"store '{source}' was built {was} a function that embeds texts; give embed= as it "
                "was given then"
            )
            raise KVPolicyError(msg)
        return cls(engine, settings, framing, embedding, episodes)

    def _index(self) -> dict[str, Any]:
        weights = self.embedding.weights
        return {
            "version": _VERSION,
            "settings": attrs.asdict(self.settings),
            "framing": attrs.asdict(self.framing),
            "centre": self.embedding.centre.tolist(),
            "weights": None if weights is None else list(weights.items()),
            "has_own": self.embedding.own is not None,
            "episodes": [
                {
                    "windows": one.episode.windows,
                    "medoids": one.episode.medoids,
                    "centroid": one.episode.centroid.tolist(),
                    "prompt": one.prompt,
                    "peak_rows": one.peak_rows,
                    "peak_bytes": one.peak_bytes,
                    "full_bytes": one.full_bytes,
                }
                for one in self.episodes
            ],
        }

    def _engine_of(self, number: int) -> Engine:
        if number not in self._engines:
            self._engines[number] = _with_prompt(self.engine, self.episodes[number].prompt)
        return self._engines[number]

    def _prompt(self, question: str) -> list[int]:
        framing = self.framing
        return encoded(self.engine, framing.before_question + question + framing.closing)


def prefilled(engine: Engine, ids: Sequence[int]) -> tuple[SequenceSnapshot, int, int, int]:
    """Prefill a history, and take it from the device.

    Args:
        engine: The engine.
        ids: Tokens of the history.

    Returns:
        Its snapshot on the CPU, with peak rows, peak bytes and bytes of a full cache.
    """
    model: Any = engine.adapter.model
    cache = PolicyCache(
        model,
        engine.plan,
        engine.tokenizer,
        chunk=engine.chunk,
        max_tokens_per_forward=engine.max_tokens_per_forward,
    )
    with torch.no_grad():
        given = torch.tensor([ids], device=engine.adapter.device)
        model(input_ids=given, **cache_argument(cache))
        assert cache.core is not None, "it has tokens"
        cache.core.evictor.evict(cache.sequences)  # what the end of the history makes due
    report = cache.report
    snapshot = cache.snapshot(0).to("cpu")
    return snapshot, report.peak_rows, report.held_bytes, report.full_bytes


def asked(
    engine: Engine, snapshot: SequenceSnapshot, prompts: Sequence[Sequence[int]], **options: Any
) -> list[Result]:
    """Answer prompts that follow a history, each on its own.

    Args:
        engine: The engine.
        snapshot: The history.
        prompts: Tokens of the questions.
        options: Further fields of `Request`.
    """
    requests = [Request(prompt, resume=snapshot, **options) for prompt in prompts]
    return engine.generate(requests).results()


def _with_prompt(engine: Engine, prompt: str) -> Engine:
    """An engine like another whose plan has this patched prompt."""
    if not prompt:
        msg = "a patched prompt is empty; give an instruction"
        raise KVPolicyError(msg)
    size = len(encoded(engine, prompt))
    layers, num_changed = [], 0
    for layer in engine.plan.layers:
        specs = []
        for spec in layer.stack:
            is_ours = spec.policy == POLICY or isinstance(spec.instance, EpiCache)
            num_changed += is_ours
            specs.append(_spec_with(spec, prompt, size) if is_ours else spec)
        layers.append(attrs.evolve(layer, stack=tuple(specs)))
    if not num_changed:
        msg = f"the plan of the store names no policy '{POLICY}'; add it to the stack"
        raise KVPolicyError(msg)
    return Engine(
        engine.adapter,
        engine.tokenizer,
        attrs.evolve(engine.plan, layers=tuple(layers), stacks=None),
        slots=engine.num_slots,
        chunk=engine.chunk,
        max_tokens_per_forward=engine.max_tokens_per_forward,
    )


def _spec_with(spec: Any, prompt: str, size: int) -> Any:
    """A policy of a plan with another patched prompt, all of which is used."""
    knobs = {"prompt": prompt, "n_last": 0, "lookahead_size": size}
    if spec.instance is not None:
        return attrs.evolve(spec, instance=attrs.evolve(spec.instance, **knobs))
    return attrs.evolve(spec, knobs=spec.knobs | knobs)


def _stored(entry: dict[str, Any], snapshot: SequenceSnapshot) -> StoredEpisode:
    centroid = np.array(entry["centroid"], dtype=np.float64)
    episode = Episode(tuple(entry["windows"]), tuple(entry["medoids"]), centroid)
    numbers = (entry[name] for name in ("peak_rows", "peak_bytes", "full_bytes"))
    return StoredEpisode(episode, entry["prompt"], snapshot, *numbers)


def _checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _snapshot_file(folder: Path, number: int) -> Path:
    return folder / f"episode-{number}.safetensors"


def _damaged(folder: Path) -> KVPolicyError:
    return KVPolicyError(f"store '{folder}' is damaged: {_INDEX} cannot be read; build it again")
