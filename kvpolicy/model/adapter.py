"""The adapter to transformers; `kvpolicy.compat` says what differs between its releases.

The engine does not call a model but its twin, which shares all parameters and calls our attention
function (see `kvpolicy.model.twin`). It gets our cache for its own and the positions of the tokens
as ``position_ids``.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvpolicy.attention.softmax import Softmax
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import LayerShape, Rotate, Slab, StateShape
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.compat import cache_argument, layer_configs
from kvpolicy.devices import as_current, upload
from kvpolicy.errors import KVPolicyError, ModelError, error_summary
from kvpolicy.model.annotating import input_hook
from kvpolicy.model.attention import attention_function
from kvpolicy.model.config import (
    check_loaded,
    check_runs,
    has_state_layers,
    layer_shape,
    row_sources,
    sliding_windows,
    stop_ids,
)
from kvpolicy.model.decoder import attention_module, decoder_layers, decoder_of, head_counts
from kvpolicy.model.embedded import Embedder, embed_chunks, image_arguments, image_ids
from kvpolicy.model.fingerprint import ModelFingerprint
from kvpolicy.model.first_forwards import FirstForwards
from kvpolicy.model.forward_input import Annotating, ForwardInput, under_way
from kvpolicy.model.fused_prompts import FusedPrompts
from kvpolicy.model.latent import (
    LATENT_ATTENTION,
    latent_attention,
    latent_modules,
    store_latents,
)
from kvpolicy.model.packed import PackedWeights, packed_weights
from kvpolicy.model.rope import Rotation
from kvpolicy.model.rope_types import (
    by_sequence,
    check_rope,
    depends_on_length,
    longrope_length,
    max_positions,
)
from kvpolicy.model.states import layer_states
from kvpolicy.model.steering import steering_hook
from kvpolicy.model.step_cache import StepCache
from kvpolicy.model.tensor_parallel import SingleProcess, processes_of
from kvpolicy.model.twin import Copies, Twin
from kvpolicy.model.weights import StoredToken, layer_weights
from kvpolicy.model.wrappers import replaced_forward, unwrapped
from kvpolicy.state import LayerWeights

ATTENTION = "kvpolicy"


class ModelAdapter:
    """One model as the engine sees it.

    Attributes:
        num_layers: Decoder layers.
        max_positions: Tokens a sequence may have, prompt and generation together.
        longrope_length: Tokens that no sequence can cross, if there is such a number.
        rotates_by_length: Whether the rotary embedding depends on the length of the prompt.
        stop_ids: Tokens that end a generation, from the model's own configuration.
        hidden_size: Size of the hidden state, ``M``.
        processes: The processes that hold the model.
        embedder: Embeds prompts with images; ``None``: the model takes none.
        image_ids: Token ids in whose place the model puts embeddings of images.
    """

    processes: SingleProcess = SingleProcess()
    longrope_length: int | None = None
    rotates_by_length: bool = False
    _sources: Sequence[int | None]  # see `row_sources`
    _softmax: Sequence[Softmax] = ()  # of each layer, once a forward has shown it
    _prompts: FusedPrompts | None = None  # once a forward may run so
    _one_by_one: bool = False  # see `KVCache.one_by_one`, once a forward has shown it

    def __init__(self, model: PreTrainedModel, *, run_own_hooks: bool = True) -> None:
        """Inspect a model, which is left as it is.

        Args:
            model: The model.
            run_own_hooks: Whether `forward` runs the hooks of the model itself; those of its
                submodules always run. Not wanted within a call of the model, which runs them.

        Raises:
            ModelError: If the engine cannot run the model.
        """
        self.model = model = unwrapped(model)
        self._config = model.config.get_text_config(decoder=True)
        try:
            self._read_config()
        except KVPolicyError:
            raise
        except Exception as error:  # whatever a configuration may raise
            msg = (
                f"model {type(model).__name__} cannot be run: its configuration cannot be read: "
                f"{error_summary(error)}"
            )
            raise ModelError(msg) from error
        AttentionInterface.register(ATTENTION, attention_function)
        AttentionInterface.register(LATENT_ATTENTION, latent_attention)
        self.processes = processes_of(model, self._config)
        self._run_own_hooks = run_own_hooks
        self._steered: frozenset[int] = frozenset()
        self._annotated: frozenset[int] = frozenset()
        self._reads_states = False
        self._make_twins()
        self._fingerprint = ModelFingerprint(model)
        self.image_ids = image_ids(model)
        takes_images = image_arguments(model) and decoder_of(model) is not model
        self.embedder = Embedder(model) if takes_images else None
        num_found = len(decoder_layers(model))
        if num_found != self.num_layers:
            msg = (
                f"model {type(model).__name__} cannot be run: its decoder has {num_found} layers, "
                f"its configuration says {self.num_layers}"
            )
            raise ModelError(msg)

    def _read_config(self) -> None:
        """Read what the configuration says of the model; raises `ModelError` if it is refused."""
        model, config = self.model, self._config
        config.vocab_size  # noqa: B018 - one that has none is refused now
        check_runs(model, config)
        check_rope(model)
        for layer in layer_configs(config):
            layer_shape(layer, model.dtype, model.device)  # what cannot be read is refused now
        self._windows = sliding_windows(config)
        self._latents = latent_modules(model)
        self._sources = row_sources(config)
        self._heads = list(map(head_counts, decoder_layers(model)))
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.max_positions = max_positions(config)
        self.longrope_length = longrope_length(config)
        self.stop_ids = stop_ids(model)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; `resize_token_embeddings` may change it at any time."""
        size: int = self._config.vocab_size
        return size

    @property
    def weights(self) -> PackedWeights:
        """The packed weights of the model, of which it may have none."""
        return packed_weights(self.model)

    @property
    def eager_reason(self) -> str | None:
        """Why decode steps of this model take the eager path; ``None``: they are static."""
        if any(self._layer_states):
            return "its layers have states of fixed size"
        if self._shares_rows:
            return "its layers attend to keys and values of others"
        if self.processes.num_processes > 1:
            return "its heads are shared by several processes"
        if len({shape.device for shape in self.layer_shapes()} | {self.device}) > 1:
            return "its layers are on several devices"
        names = {name.rpartition(".")[2] for name, _ in self.model.named_modules()}
        if "experts" in names:
            return "its experts are chosen on the host"
        if any(map(depends_on_length, self.model.modules())):
            return "its rotary embedding depends on the length"
        return None

    def growth_problem(self, before: int, after: int) -> str | None:
        """Why a sequence of some tokens cannot grow to so many; ``None`` if it can."""
        most = self.longrope_length
        if most is None or not before <= most < after:
            return None
        return (
            f"a sequence of {before} tokens would grow to {after}, and beyond {most} the rotary "
            "embedding 'longrope' of this model changes all keys and values, those stored "
            f"included; give prompt and generation at most {most + 1} tokens together, or the "
            f"prompt more than {most}"
        )

    def add_hooks(
        self, *, steered: Collection[int], states: bool, annotated: Collection[int] = ()
    ) -> None:
        """Say what forwards may ask for beyond logits.

        Args:
            steered: Layers whose input may be steered.
            states: Whether the last hidden states may be wanted.
            annotated: Layers whose new rows may be annotated.
        """
        self._steered |= frozenset(steered)
        self._annotated |= frozenset(annotated)
        self._reads_states |= states
        self._make_twins()

    def _make_twins(self) -> None:
        """Make what is called for tokens, and what is called for tokens with embeddings of ours."""
        self._twin = Twin(self.model, ATTENTION, self._register)
        self._embedding_twin = Twin(self.model, ATTENTION, self._register_embedding)

    def check_forward(self, *, static: bool) -> None:
        """Run a few tokens in all ways in which they will be run, so that it is refused now.

        Args:
            static: Whether decode steps are static.

        Raises:
            ModelError: If the engine cannot run the model.
        """
        check_loaded(self.model)
        tried = FirstForwards(self.model, self.forward, self._small_cache, self._any_token)
        cache = tried.check(static=static)
        self._softmax = [layer.softmax for layer in cache.layers]
        self._one_by_one = cache.one_by_one
        if self._annotated:
            self._stored_token(sorted(self._annotated))

    @property
    def attention_layers(self) -> list[int]:
        """Numbers of the layers that cache keys and values."""
        return [index for index, source in enumerate(self._sources) if index == source]

    @property
    def _shares_rows(self) -> bool:
        """Whether layers attend to keys and values that others cache."""
        return any(source not in (None, index) for index, source in enumerate(self._sources))

    def layer_shapes(self) -> list[LayerShape]:
        """Shape and device of what each layer holds."""
        dtype, shards = self.model.dtype, self.processes.num_shards
        sources = self._sources
        return [
            layer_shape(
                config,
                dtype,
                device,
                window,
                shards,
                heads=self._heads[index],
                latent=index in self._latents,
                states=states,
                num_readers=sources.count(index),
            )
            if source == index
            else LayerShape(
                0,
                0,
                0,
                dtype,
                device,
                states=states,
                source=source,
                reader=0 if source is None else sources[:index].count(source),
            )
            for index, (config, device, window, source, states) in enumerate(
                zip(
                    layer_configs(self._config),
                    map(_device_of, decoder_layers(self.model)),
                    self._windows,
                    sources,
                    self._layer_states,
                    strict=True,
                )
            )
        ]

    @cached_property
    def _layer_states(self) -> list[tuple[StateShape, ...]]:
        """The states of each layer."""
        if not has_state_layers(self._config):
            return [()] * self.num_layers
        if self.processes.num_processes > 1:
            msg = (
                f"model {type(self.model).__name__} cannot be run by several processes: its layers "
                "have states of fixed size, which are not divided among them; use one process"
            )
            raise ModelError(msg)
        return layer_states(self.model, self._config, self._any_token, self.device)

    def new_cache(self, slabs: Sequence[Slab], num_slots: int) -> KVCache:
        """An empty KV cache for this model."""
        cache = KVCache(self.layer_shapes(), slabs, num_slots)
        cache.row_bytes *= self.processes.num_shards
        cache.plain_row_bytes *= self.processes.num_shards
        cache.rotate = self.rotation()
        cache.one_by_one = self._one_by_one
        # A cache that is filled from snapshots may never see a prefill.
        for layer, softmax in zip(cache.layers, self._softmax, strict=False):
            layer.softmax = softmax
        return cache

    def fingerprint(self) -> str:
        """The fingerprint of the model as it is now.

        Raises:
            ModelError: If weights are not in memory.
        """
        return self._fingerprint.current()

    def rotation(self) -> Rotate:
        """Moves keys of a layer to other positions, with this model's rotary embedding."""
        return Rotation(self.model, self._keys_at, self.max_positions)

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs."""
        return _device_of(self.model)

    @property
    def last_device(self) -> torch.device:
        """Device of the last layer's states."""
        return _device_of(decoder_layers(self.model)[-1])

    def layer_weights(self, layers: Sequence[int]) -> Iterator[LayerWeights]:
        """The projections of the attention of some layers.

        Raises:
            ModelError: If they cannot be read.
        """
        shapes, rotate, stored = self.layer_shapes(), self.rotation(), self._stored_token(layers)
        for index in layers:
            yield layer_weights(self.model, index, shapes[index], rotate, stored[index])

    def forward(self, given: ForwardInput) -> tuple[Tensor, Tensor | None]:
        """Run the model over the new tokens of a step; their rows are provisional.

        The caller commits them. Those of a static step that draws are counted by `StaticStep`.

        Args:
            given: Tokens, and where their rows go.

        Returns:
            Logits after the newest token of each sequence, ``[B, V]``, and, if wanted, the
            hidden states after the final norm, ``[B, L, M]``.

        Raises:
            ModelError: If the model does not use the cache or the attention function.
        """
        copy = self._twin if given.embedded is None else self._embedding_twin
        twin, step = copy.current(), given.step
        try:
            with as_current(self.device):
                if isinstance(step, StaticStep):
                    logits, given.states = self._run_static(twin, step, given)
                    return logits, given.states
                logits = self._run_eagerly(twin, step, given)
        except BaseException:
            if isinstance(step, EagerStep):
                step.discard()
            raise
        finally:
            copy.hand_back()
        if given.wants_logits:
            given.logits = logits
        return logits[:, -1], given.states

    def _run_eagerly(self, twin: PreTrainedModel, step: EagerStep, given: ForwardInput) -> Tensor:
        """The logits of the new tokens of a step, whose rows are stored, ``[B, 1 or L, V]``."""
        positions, tokens = None, given.token_ids
        on_host = tokens.device.type == "cpu"
        tokens = upload(tokens, self.device) if on_host else tokens.to(self.device)
        if given.gives_positions:
            offset = step.cache.rope_offset[step.tokens.slots]
            positions = upload(step.position_ids + offset[:, None], self.device)
        with torch.inference_mode(), under_way(given):
            found = self._run_fused(twin, given, tokens, positions) if given.fuses else None
            if found is None:
                output = self._called(twin)(
                    input_ids=tokens,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=0 if given.wants_logits else self._newest_only(step.width),
                    kvpolicy_forward=given,
                    **cache_argument(StepCache(step, given, self.model)),
                )
                found = getattr(output, "logits", None)
        wanted = {index: source for index, source in enumerate(self._sources) if source is not None}
        expected = len(wanted)
        done = sum(
            source in step.layers and index in step.attended for index, source in wanted.items()
        )
        if done != expected:
            which = "layers" if expected == self.num_layers else "layers with attention"
            msg = (
                f"model {type(self.model).__name__} cannot be run: {done} of its "
                f"{expected} {which} use the cache and the attention they are given"
                f"{replaced_forward(self.model)}"
            )
            raise ModelError(msg)
        for states in step.states.values():
            if (problem := states.problem) is not None:
                msg = f"model {type(self.model).__name__} cannot be run: it {problem}"
                raise ModelError(msg)
        if found is None or found.dim() != 3:
            msg = f"model {type(self.model).__name__} cannot be run: it gives no logits of tokens"
            raise ModelError(msg)
        return found

    def _run_fused(
        self, twin: PreTrainedModel, given: ForwardInput, tokens: Tensor, positions: Tensor | None
    ) -> Tensor | None:
        """Logits of a forward that is run from a recording; ``None``: it is not."""
        assert positions is not None, "a trial that leaves them out does not fuse"
        if self._prompts is None:
            self._prompts = FusedPrompts(self._small_cache, self._any_token)
        found = self._prompts.run(self._called(twin), given, tokens, positions)
        if found is None:
            return None
        logits, given.states = found
        return logits

    def _small_cache(self, num_slots: int, num_rows: int) -> KVCache:
        """A cache of slots that keep so many rows."""
        shapes = self.layer_shapes()
        return KVCache(shapes, [Slab(num_rows)] * len(shapes), num_slots)

    @property
    def prompts_problem(self) -> str | None:
        """Why no groups of operators of prompts are one each; ``None``: they may be."""
        return None if self._prompts is None else self._prompts.problem

    def _newest_only(self, width: int) -> int | Tensor:
        """The columns of which logits are wanted, as models take them: the last of so many.

        Where layers share rows, some models compute these layers for these columns only, if they
        are given as a number; rows would receive no attention from the others.
        """
        return upload(np.array([width - 1]), self.device) if self._shares_rows else 1

    def _run_static(
        self, twin: PreTrainedModel, step: StaticStep, given: ForwardInput
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and states after the new tokens of a static step, of slots that take part."""
        with torch.inference_mode(), under_way(given):
            logits, states = given.run(self._called(twin), given)
        return logits[: step.num_served], None if states is None else states[: step.num_served]

    def _called(self, twin: PreTrainedModel) -> Callable[..., Any]:
        return twin if self._run_own_hooks else twin.forward

    def _register(self, copies: Copies) -> None:
        """Register the hooks of a new twin; they read the forward under way from its arguments."""
        rotaries = list(filter(depends_on_length, self.model.modules()))
        self.rotates_by_length = bool(rotaries)
        for rotary in rotaries:
            copied = copies.hookable(rotary)
            vars(copied)["forward"] = by_sequence(copied)
        if self._reads_states:
            decoder = copies.hookable(decoder_of(self.model))
            decoder.register_forward_hook(_receive_states, with_kwargs=True)
        for module in self._latents.values():
            store_latents(copies, module)
        layers = decoder_layers(self.model)
        for layer_idx in self._steered:
            layer = copies.hookable(layers[layer_idx])
            layer.register_forward_pre_hook(steering_hook(layer_idx), with_kwargs=True)
        for layer_idx in self._annotated:
            attention = copies.hookable(attention_module(self.model, layer_idx))
            hook = input_hook(layer_idx, self.hidden_size)
            attention.register_forward_pre_hook(hook, with_kwargs=True)

    def _register_embedding(self, copies: Copies) -> None:
        """Register the hooks of a twin whose decoder is given embeddings."""
        self._register(copies)
        decoder = copies.hookable(decoder_of(self.model))
        decoder.register_forward_pre_hook(_embed, with_kwargs=True)

    def _keys_at(self, position: int) -> dict[int, Tensor]:
        """Keys of every layer with rows, in all heads, for one token alone at a position."""
        cache = self._run_alone(position)
        return {
            index: self.processes.all_gather(layer.keys)
            for index, layer in enumerate(cache.layers)
            if layer.shape.has_rows
        }

    def _stored_token(self, layers: Sequence[int]) -> dict[int, StoredToken]:
        """What one token leaves in some layers if it stands alone at position 0.

        Raises:
            ModelError: If what enters the attention of one of them is not found.
        """
        stored: dict[int, StoredToken] = {}

        def note(
            layer_idx: int, states: Tensor, keys: Tensor, values: Tensor, _: Tensor
        ) -> dict[str, Tensor]:
            stored[layer_idx] = StoredToken(states, keys, values)
            return {}

        before = self._annotated, self._twin
        self._annotated = frozenset(layers)
        self._twin = Twin(self.model, ATTENTION, self._register)
        try:
            self._run_alone(0, Annotating(note))
        finally:
            self._annotated, self._twin = before
        if missing := [index for index in layers if index not in stored]:
            msg = (
                f"model {type(self.model).__name__} cannot be run with policies that read its "
                f"attention: what enters that of layer {missing[0]} is not found"
            )
            raise ModelError(msg)
        return stored

    def _run_alone(self, position: int, annotating: Annotating | None = None) -> KVCache:
        """The cache after a forward of one token, which stands alone at a position."""
        cache = self._small_cache(1, 1)
        cache.seq_len[0] = position
        tokens, step = torch.tensor([[self._any_token]]), EagerStep(cache, [0], [1])
        self.forward(ForwardInput(tokens, step, annotating=annotating))
        step.commit()
        return cache

    @property
    def _any_token(self) -> int:
        """Not the padding token: its state, and so its keys, may be zero."""
        return 1 if getattr(self._config, "pad_token_id", None) == 0 else 0


def _device_of(module: nn.Module) -> torch.device:
    """The device on which a module computes: that of its weights.

    Weights that accelerate has offloaded are on ``meta`` until its hooks bring them.
    """
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    brought = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((one for one in brought if one is not None), device))


def _embed(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give the decoder the embeddings of chunks with images."""
    given: ForwardInput | None = kwargs.get("kvpolicy_forward")
    if given is None or given.embedded is None:  # a model that drops arguments is refused later
        return None
    return args, embed_chunks(given.embedded, given.token_ids.shape[1], kwargs)


def _receive_states(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Note what the decoder passes to the head: ``[B, L, M]``, after the final norm."""
    given: ForwardInput = kwargs["kvpolicy_forward"]
    if given.wants_states:
        given.states = getattr(output, "last_hidden_state", None)
        if given.states is None:
            msg = (
                "the model cannot be run with policies that read hidden states: its decoder gives "
                "none after its last layer"
            )
            raise ModelError(msg)
