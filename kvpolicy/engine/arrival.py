"""Arrival: from a request to a sequence that can be served."""

from collections import abc
from typing import Any

import attrs

from kvpolicy.engine.compose import problem_with
from kvpolicy.engine.requests.encoding import encode
from kvpolicy.engine.requests.logits_processors import SequenceProcessors, own_processors
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.resuming import Resuming
from kvpolicy.errors import RequestError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.embedded import image_arguments
from kvpolicy.model.generation_config import GenerationRules


@attrs.frozen
class Arrivals:
    """Checks requests and makes sequences of them.

    Attributes:
        adapter: The model.
        rules: Its generation config.
        tokenizer: Its tokenizer, if there is one.
        resuming: Resumes snapshots.
        clock: Tells the time in seconds; see `Sequence.clock`.
        max_len: The most tokens of a sequence, prompt and generation together; ``None``: the
            model's positions.
        max_prompt_len: The most tokens of a prompt; ``None``: any number.
        longest_kept: Tokens of a sequence of which the plan evicts no row; ``None``: any number.
        stores_pads: Whether the plan stores pads as rows.
    """

    adapter: ModelAdapter
    rules: GenerationRules
    tokenizer: Any
    resuming: Resuming
    clock: abc.Callable[[], float]
    max_len: int | None = None
    max_prompt_len: int | None = None
    longest_kept: int | None = None
    stores_pads: bool = False

    def sequence_of(self, request: Request) -> Sequence:
        """The sequence of a request, without a number.

        Raises:
            RequestError: If it cannot be served.
        """
        adapter, snapshot = self.adapter, request.resume
        if problem := problem_with(request):
            raise RequestError(problem)
        if snapshot is not None and (problem := self.resuming.problem_with(snapshot)):
            raise RequestError(problem)
        if request.images is not None:
            self._check_images(request, request.images)
        if request.snapshot and (problem := self.resuming.problem):
            msg = f"no snapshot can be taken: {problem}"
            raise RequestError(msg)
        before, tokens = ((), ()) if snapshot is None else (snapshot.token_ids, snapshot.tokens)
        own = self._own_prompt(request)
        if own:
            prompt, tokens = (*before, *own), ()
        else:
            prompt = before[: len(before) - len(tokens)]
        num_before = len(prompt) + len(tokens)
        self._check_length(num_before, resumed=snapshot is not None)
        most = min(num_before + request.max_new_tokens, self._most_tokens)
        # The last token is not brought in.
        seen = num_before if snapshot is None else snapshot.seq_len
        if problem := adapter.growth_problem(seen, most - 1):
            raise RequestError(problem)
        if request.prompt_logprobs is not None:
            self._check_prompt_logprobs(len(prompt), resumed=snapshot is not None)
        if request.deadline_s is not None and adapter.processes.num_processes > 1:
            msg = (
                "the processes that share the model would not agree on when the deadline has "
                "passed; leave out deadline_s"
            )
            raise RequestError(msg)
        if (stop := self.stop_strings_of(request)) != request.stop:
            request = attrs.evolve(request, stop=stop)
        if request.stop and self.tokenizer is None:
            msg = "stop strings need a tokenizer, and the engine has none; use stop_ids"
            raise RequestError(msg)
        stop_ids = adapter.stop_ids if request.stop_ids is None else request.stop_ids
        processors, sampling = self._choice(request, prompt, most, stop_ids)
        seq = Sequence(
            -1,
            request,
            prompt,
            most - len(prompt),
            frozenset(stop_ids),
            self.tokenizer,
            self.clock,
            tokens=[*tokens],
            num_before=len(tokens),
            num_earlier=len(prompt) - len(own),
            processors=processors,
            sampling=sampling,
        )
        if self.max_prompt_len is not None and seq.num_staying > self.max_prompt_len:
            msg = (
                f"the prompt has {seq.num_staying} tokens; at most {self.max_prompt_len} are "
                "accepted here, as max_prompt_len says"
            )
            raise RequestError(msg)
        return seq

    def _choice(
        self,
        request: Request,
        prompt: tuple[int, ...],
        max_len: int,
        stop_ids: abc.Iterable[int],
    ) -> tuple[SequenceProcessors | None, Sampling]:
        """What changes the logits of a sequence, and how its tokens are drawn from them."""
        sampling = request.sampling
        given = {
            "max_length": max_len,
            "eos_token_id": [one for one in stop_ids if 0 <= one < self.adapter.vocab_size],
            "do_sample": not sampling.greedy,
            "temperature": float(sampling.temperature),
            "top_k": sampling.top_k,
            "top_p": float(sampling.top_p),
            "min_p": sampling.min_p or None,
        }
        if sampling.repetition_penalty is not None:
            given["repetition_penalty"] = float(sampling.repetition_penalty)
        if request.min_new_tokens is not None:
            given["min_new_tokens"] = request.min_new_tokens
        outside = [token for token, _ in sampling.logit_bias if token >= self.adapter.vocab_size]
        if outside:
            msg = (
                f"logit_bias names token id {outside[0]}; expected 0 to "
                f"{self.adapter.vocab_size - 1}"
            )
            raise RequestError(msg)
        device = self.adapter.device
        made, draws = self.rules.processors(prompt, given, device)
        made[:0] = own_processors(sampling, len(prompt), device)
        if draws:  # they have done all but the drawing
            sampling = Sampling(1.0, seed=sampling.seed)
        return (SequenceProcessors(made, max_len) if made else None), sampling

    def stop_strings_of(self, request: Request) -> tuple[str, ...]:
        """The stop strings of a request: its own, or those of the generation config."""
        return request.stop or self.rules.stop_strings

    def _check_images(self, request: Request, images: abc.Mapping[str, Any]) -> None:
        adapter, prompt = self.adapter, request.prompt
        name, known = type(adapter.model).__name__, image_arguments(adapter.model)
        unknown = [one for one in images if one not in known]
        problem = None
        if adapter.embedder is None:
            problem = f"the request has images, and model {name} takes none; leave out images"
        elif unknown:
            problem = (
                f"images have {unknown[0]!r:.60}, which model {name} does not take; it takes "
                f"{', '.join(sorted(known))}"
            )
        elif isinstance(prompt, str):
            problem = (
                "images were given with a text; give as the prompt the input_ids that the model's "
                "processor returns with them, which have tokens for each image"
            )
        elif request.resume is not None:
            problem = (
                "images were given for what follows a snapshot; give the whole conversation with "
                "all of its images, or go on in a PolicyCache"
            )
        elif self.stores_pads:
            problem = 'prompts with images are not padded; run them with a plan of padding = "none"'
        elif adapter.processes.num_processes > 1:
            problem = (
                "images are not embedded by several processes that share a model; use one process"
            )
        if problem is not None:
            raise RequestError(problem)

    def _check_prompt_logprobs(self, num_prompt: int, *, resumed: bool) -> None:
        if resumed:
            msg = (
                "the log-probabilities of a prompt that follows a snapshot are not known; leave "
                "out prompt_logprobs"
            )
            raise RequestError(msg)
        if self.longest_kept is not None and num_prompt > self.longest_kept:
            msg = (
                f"the log-probabilities of a prompt of {num_prompt} tokens are asked for, and this "
                f"plan keeps {self.longest_kept} rows: they are computed before rows are evicted, "
                "so they would be those of a full cache; ask a plan without a budget, or score "
                "texts with kvpolicy lm-eval or the task perplexity"
            )
            raise RequestError(msg)

    @property
    def _most_tokens(self) -> int:
        positions = self.adapter.max_positions
        return positions if self.max_len is None else min(self.max_len, positions)

    def _check_length(self, num_tokens: int, *, resumed: bool) -> None:
        if num_tokens < self._most_tokens:
            return
        what = "snapshot and prompt have" if resumed else "the prompt has"
        limit = (
            f"the model has positions for {self._most_tokens}"
            if self._most_tokens == self.adapter.max_positions
            else f"at most {self._most_tokens} are accepted here, as max_len says"
        )
        msg = f"{what} {num_tokens} tokens; {limit}, the generation included"
        raise RequestError(msg)

    def _own_prompt(self, request: Request) -> tuple[int, ...]:
        """The tokens of the prompt; none if the answer of a snapshot goes on."""
        snapshot, prompt = request.resume, request.prompt
        if snapshot is None or not request.goes_on:
            before = () if snapshot is None else snapshot.token_ids
            return encode(prompt, self.tokenizer, self.adapter.vocab_size, before)
        if snapshot.seq_len == len(snapshot.token_ids):
            msg = (
                "the prompt is empty, and the model has seen all tokens of the snapshot; at least "
                "one token that follows is needed"
            )
            raise RequestError(msg)
        return ()
